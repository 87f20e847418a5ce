"""How keys and values are stored: what a kernel must know at compile time.

Every format is block-sparse rows underneath (FlashInfer, section 3.1.1): a segment of query rows
reads a list of blocks of `block_kv` tokens. Dense and ragged storage keep an affine address instead
of a list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from warploom.dsl.types.limits import MAX_LENGTH
from warploom.errors import ArgumentError, BadFormat

Layout = Literal["NHD", "HND"]
Positions = Literal["sequence", "cache"]
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

    @property
    def constants(self) -> Mapping[str, int]:
        """What kernels of this format alone are compiled with, by name."""
        return {}

    @property
    def label(self) -> str:
        """The format in names of kernels."""
        return type(self).__name__.lower() + str(self.block_kv or "")


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
    requests, and merges the states of the parts. Nothing is moved.
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


@dataclass(frozen=True)
class Rolling(KVFormat):
    """[batch, slot, head, dim] caches that keep each request's first tokens and its last ones.

    The first `sinks` tokens of a sequence stay in the first slots. Later ones go around a ring of
    `window` slots, so that each takes the place of the one `window` tokens before it: the caches of
    sliding-window layers, and of StreamingLLM. Plans are given the lengths of whole sequences.
    Queries are [row, head, dim], requests one after another, as for paged caches.

    All queries of a request read the cache as it is: it holds the last `window` tokens before the
    end, and of the rows of a chunk only the last has a full window before it. `plan` refuses a
    chunk whose mask shows the first row keys that are lost, and hides from the last row all such.

    Attributes:
        window: last tokens that are kept.
        sinks: first tokens that are kept.
        positions: what functors see. "sequence": kv_pos, q_pos and kv_len as if nothing had been
            lost. "cache": kv_pos counts the tokens that are kept, from the oldest on, and queries
            stand at their end, as rotary embeddings of StreamingLLM want it.
    """

    window: int = 0  # which is refused: there is no usual one
    sinks: int = 0
    positions: Positions = field(default="sequence", kw_only=True)
    _given: ClassVar[str] = "window and sinks, and all else by name"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (_is_size(self.window) and (self.sinks == 0 or _is_size(self.sinks))):
            expected = f"window to be an integer {_SIZES}, and sinks one from 0 on"
            raise BadFormat(what=self, expected=expected)
        if self.slots > MAX_LENGTH:
            raise BadFormat(what=self, expected=f"window + sinks to be {MAX_LENGTH} at most")
        if self.positions not in get_args(Positions):
            expected = "positions='sequence' or positions='cache'"
            raise BadFormat(what=self, expected=expected)

    @property
    def slots(self) -> int:
        """Tokens that a request's cache holds."""
        return int(self.sinks + self.window)

    def slot_of(self, position: Any) -> Any:
        """The slot where a token belongs.

        Args:
            position: in the sequence, from 0 on; an int, or integers of NumPy or torch of any
                shape. That tensors of torch are not negative is not checked.

        Returns:
            The slot, of the same type and shape; int64 for types that may not hold it.

        Raises:
            ArgumentError: not an integer, or a negative one.
        """
        position = _positions(position)
        ring = self.sinks + (position - self.sinks) % self.window
        return ring - (position < self.sinks) * (ring - position)

    @property
    def block_kv(self) -> int:
        return 1

    @property
    def column_positions(self) -> bool:
        return self.positions == "sequence"

    @property
    def constants(self) -> Mapping[str, int]:
        return {"window": int(self.window), "sinks": int(self.sinks)}

    @property
    def label(self) -> str:
        return f"rolling{self.window}" + (f"_{self.sinks}" if self.sinks else "")


def _positions(given: Any) -> Any:
    """Checked, and in a type that no computation with them leaves."""
    if isinstance(given, Integral) and not isinstance(given, bool):
        lowest, given = int(given), int(given)
    elif (name := str(getattr(given, "dtype", "")).removeprefix("torch.")).strip("u")[:3] == "int":
        if name not in ("int32", "int64"):
            given = given.long() if hasattr(given, "long") else given.astype("int64")
        is_numpy = hasattr(given, "astype") and given.size
        lowest = int(given.min()) if is_numpy else 0
    else:
        reason = f"is {given!r}; expected an int, or integers of NumPy or torch"
        raise ArgumentError(name="position", reason=reason)
    if lowest < 0:
        raise ArgumentError(name="position", reason=f"holds {lowest}; sequences begin at 0")
    return given


def _is_size(value: object) -> bool:
    if not isinstance(value, Integral) or isinstance(value, bool):
        return False
    return 1 <= int(value) <= MAX_LENGTH
