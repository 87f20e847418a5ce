"""How keys and values are stored: what a kernel must know at compile time.

Every format is block-sparse rows underneath (FlashInfer, section 3.1.1): a segment of query rows
reads a list of blocks of `block_kv` tokens. Dense and ragged storage keep an affine address instead
of a list.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from numbers import Integral
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from warploom.dsl.extents import MAX_LENGTH
from warploom.errors import BadFormat

Layout = Literal["NHD", "HND"]
_SIZES = f"from 1 on, to {MAX_LENGTH} at most"


@dataclass(frozen=True)
class KVFormat:
    """Facts shared by all formats.

    Attributes:
        layout: NHD is [..., token, head, dim]; HND is [..., head, token, dim].
    """

    layout: Layout = field(default="NHD", kw_only=True)
    _given: ClassVar[str] = "the layout by name: layout='NHD' or layout='HND'"

    if not TYPE_CHECKING:  # the arguments are those of __init__

        def __new__(cls, *args: object, **named: object) -> KVFormat:
            if len(args) > sum(not each.kw_only for each in fields(cls)):
                shown = ", ".join(map(repr, args))
                raise BadFormat(what=f"{cls.__name__}({shown})", expected=cls._given)
            return super().__new__(cls)

    def __post_init__(self) -> None:
        """Raise BadFormat for a layout or a size that does not exist."""
        if self.layout not in get_args(Layout):
            raise BadFormat(what=self, expected="layout='NHD' or layout='HND'")

    @property
    def block_kv(self) -> int:
        """Tokens per indexed block; 0 if storage is affine and there is no index list."""
        return 0

    @property
    def column_positions(self) -> bool:
        """True if kv_pos is the column of the block matrix, False if it is the list's index."""
        return False

    @property
    def composed(self) -> bool:
        """True if requests that share keys may be attended together, part by part."""
        return False


@dataclass(frozen=True)
class Dense(KVFormat):
    """[batch, token, head, dim] tensors, one sequence each.

    Attributes:
        shared: keys and values are of one sequence, [1, token, head, dim], that all requests read;
            how many of its tokens count is each request's own. Nothing is copied.
    """

    shared: bool = field(default=False, kw_only=True, repr=False)  # kernels are the same

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.shared, bool):
            raise BadFormat(what=f"shared={self.shared!r}", expected="shared=True or shared=False")


@dataclass(frozen=True)
class Ragged(KVFormat):
    """[token, head, dim] tensors; `kv_indptr` gives where each request begins."""


@dataclass(frozen=True)
class Paged(KVFormat):
    """[page, token in page, head, dim] caches and a page table; any page size, 1 too."""

    page_size: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _is_size(self.page_size):
            raise BadFormat(what=self, expected=f"page_size to be an integer {_SIZES}")

    @property
    def block_kv(self) -> int:
        return self.page_size


@dataclass(frozen=True)
class Composed(Paged):
    """A paged cache whose requests may share pages (FlashInfer, section 3.1.2).

    What the page table lists for several requests, from their first page on, is a prefix. A plan
    attends a prefix that is worth it once for all of them, in query tiles that hold rows of many
    requests, and joins the states of the parts. Nothing is moved.
    """

    @property
    def composed(self) -> bool:
        return True


@dataclass(frozen=True)
class BlockSparse(KVFormat):
    """A block-sparse matrix over a dense key sequence: (Br, Bc) blocks of queries by keys.

    Keys are [token, head, dim]; block row i of a request covers its query rows i*Br ..
    i*Br + Br - 1 and `indices` name blocks of Bc tokens, so that kv_pos is the column.
    """

    block: tuple[int, int] = (1, 1)
    _given: ClassVar[str] = "one pair, such as block=(8, 16), and the layout by name"

    def __post_init__(self) -> None:
        super().__post_init__()
        pair = self.block if isinstance(self.block, tuple) else ()
        if len(pair) != 2 or not all(map(_is_size, pair)):
            expected = f"block=(query rows, keys), two integers {_SIZES}"
            raise BadFormat(what=self, expected=expected)

    @property
    def block_kv(self) -> int:
        return self.block[1]

    @property
    def column_positions(self) -> bool:
        return True


def _is_size(value: object) -> bool:
    if not isinstance(value, Integral) or isinstance(value, bool):
        return False
    return 1 <= int(value) <= MAX_LENGTH
