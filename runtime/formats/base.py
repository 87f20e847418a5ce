"""What a KV format owns: plan arguments, lowering, tensors, the oracle's view, random batches.

A format is declared in `dsl.types.formats`, where kernels read what they need at compile time. A
class here, one for each, holds everything else that tells it from the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.limits import MAX_LENGTH
from warploom.errors import ArgumentError, BadIndptr, BadLength, UnequalRequests
from warploom.runtime.formats.batch import Arguments, Batch, HostBatch
from warploom.runtime.formats.lists import Int32s, indptr, refuse_lengths
from warploom.runtime.tensors.tensors import host_int32
from warploom.scheduler.model.bounds import Bounds

if TYPE_CHECKING:
    import torch

Floats = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
Declared = TypeVar("Declared", bound=KVFormat)


@dataclass(frozen=True)
class OracleSegment:
    """Rows of a request that share a list of keys, as the oracle is told.

    Attributes:
        rows: query rows of the request.
        keys: which of the request's keys they read.
        kv_pos: where functors see these.
        kv_len: keys that functors see.
    """

    rows: slice
    keys: Ints
    kv_pos: Ints
    kv_len: int


@dataclass(frozen=True)
class Drawn:
    """A random batch that a format is to store.

    Attributes:
        rng: for what is left open, such as pages.
        q_lens: query rows of each request.
        k, v: float32 [tokens, heads, dim] of each request. Formats whose requests share keys write
            to them.
    """

    rng: np.random.Generator
    q_lens: Sequence[int]
    k: Sequence[Floats]
    v: Sequence[Floats]

    @property
    def lengths(self) -> list[int]:
        """Keys of each request."""
        return [len(x) for x in self.k]


@dataclass(frozen=True)
class Stored:
    """Keys and values of a random batch as the format has them, in layout NHD.

    Attributes:
        k, v: float32; NaN where nobody's token lies.
        plan: arguments of `plan` but for `qo_indptr`.
        segments: of each request.
    """

    k: Floats
    v: Floats
    plan: dict[str, Any]
    segments: list[list[OracleSegment]]


class Format(ABC, Generic[Declared]):
    """A declared format at run time.

    Attributes:
        declared: what the user wrote.
        takes: names of the plan arguments that only some formats have.
        by_request: arguments with a number for each request.
        batched: q and out are [batch, row, head, dim] with equally many rows each; else [row, ...].
        has_blocks: k and v begin with an axis of blocks: requests, or pages.
        block_name: what an entry of that axis is, and several of them.
        is_cache: tensors hold more than one batch reads, so that no run may copy large ones.
        joins_kv: k and v may be one tensor [blocks, 2, ...].
        plans_on_device: devices plan it where bounds are declared.
    """

    takes: ClassVar[tuple[str, ...]] = ()
    by_request: ClassVar[tuple[str, ...]] = ("kv_indptr", "last_page_len")
    batched: ClassVar[bool] = False
    has_blocks: ClassVar[bool] = False
    block_name: ClassVar[tuple[str, str]] = ("page", "pages")
    is_cache: ClassVar[bool] = False
    joins_kv: ClassVar[bool] = False
    plans_on_device: ClassVar[bool] = False

    def __init__(self, declared: Declared) -> None:
        self.declared = declared

    @property
    def name(self) -> str:
        """What users call it."""
        return type(self.declared).__name__

    # Plans

    def check_taken(self, given: Arguments, rows_name: str) -> None:
        """Raise ArgumentError for a plan argument that is not taken, or missing."""
        for name in ("kv_indices", "last_page_len", "kv_lens"):
            value = getattr(given, name)
            if value is not None and name not in self.takes:
                reason = f"the {self.name} format does not take it; {self.instead(name)}"
                raise ArgumentError(name=name, reason=reason)
            if value is None and name in self.takes:
                order = ", ".join((rows_name, "kv_indptr", *self.takes))
                hint = f"({order}); a decode's {rows_name} is range(requests + 1)"
                if name == "last_page_len":
                    hint += f"; {self.instead(name)}"
                raise ArgumentError(name=name, reason=f"the {self.name} format needs it: {hint}")

    def instead(self, name: str) -> str:
        """What to give in place of a plan argument that is not taken, or is missing."""
        if name == "kv_lens":
            return "kv_indptr tells the keys of each request"
        return "pages need kv_format=warploom.Paged(page_size)"

    def _refuse_unequal(self, rows_name: str, entries: int, given: Arguments) -> None:
        """Raise UnequalRequests where arrays are of unlike numbers of requests.

        Any of them may be the wrong one, so all are named.
        """
        names = [name for name in ("kv_indptr", *self.takes) if name in self.by_request]
        found = {name: len(host_int32(getattr(given, name), name)) for name in names}
        counts = {name: n - (name == "kv_indptr") for name, n in found.items()}
        if not all(found.values()) or set(counts.values()) == {entries - 1}:
            return  # something else is wrong
        others = (f"{name} has {found[name]}, of {counts[name]}" for name in names)
        raise UnequalRequests(
            name=rows_name, entries=entries, requests=entries - 1, others=", ".join(others)
        )

    def make_batch(self, given: Arguments, rows_name: str = "qo_indptr") -> HostBatch:
        """Check the plan arguments and lower them; see `formats.make_batch`."""
        self.check_taken(given, rows_name)
        qo = indptr(given.qo_indptr, rows_name)
        try:
            batch = self.lower(qo, given)
        except BadIndptr:
            self._refuse_unequal(rows_name, len(qo), given)
            raise
        for name, lengths in (("q_len", batch.q_lens), ("kv_len", batch.kv_lens)):
            refuse_lengths(lengths > MAX_LENGTH, lengths, name, f"at most {MAX_LENGTH}")
        rows, expected = int(qo[-1]), f"at most {MAX_LENGTH} query rows in all"
        if rows > MAX_LENGTH:
            raise BadLength(name=rows_name, index=len(batch.q_lens), value=rows, expected=expected)
        return batch

    @abstractmethod
    def lower(self, qo: Int32s, given: Arguments) -> HostBatch:
        """Check the plan arguments and make segments and a list of blocks of them.

        Args:
            qo: int32 [requests + 1], checked.
            given: the others; None unless taken.

        Raises:
            BadIndptr, BadLength, IndexOutOfRange, WrongShape, WrongDType, ArgumentError: see
                `warploom.errors`.
        """

    def most_blocks(self, bounds: Bounds) -> tuple[str, int] | None:
        """Entries of block lists that any batch within the bounds has at most, and how they are
        computed; None if there is no list.
        """
        return None

    @property
    def native_storage(self) -> int | None:
        """`warploom::Storage` of native planners on the host; None where NumPy plans."""
        return None

    @property
    def ring(self) -> tuple[int, int] | None:
        """Window and sinks of caches that lose tokens of the sequences that functors see."""
        return None

    @property
    def obstacle_to_pretransform(self) -> str | None:
        """Why no kernel of its own can transform the keys; None if one can."""
        return f"keys of the format {self.name} lie in blocks, of which requests may share some"

    @property
    def obstacle_to_appending(self) -> str | None:
        """Why `append` cannot write to it; None if it can."""
        return "is no paged cache"

    # Tensors

    @property
    def q_axes(self) -> tuple[str, ...]:
        """Names of the axes of q and out; those of lse are the same without `dim`."""
        if not self.batched:
            return ("row", "head", "dim")
        return ("batch", *self._ordered("row"), "dim")

    @property
    def kv_axes(self) -> tuple[str, ...]:
        """Names of the axes of k and v."""
        return (*(("block",) if self.has_blocks else ()), *self._ordered("token"), "dim")

    def _ordered(self, token: str) -> tuple[str, str]:
        return (token, "head") if self.declared.layout == "NHD" else ("head", token)

    def kv_sizes(self, batch: Batch) -> tuple[dict[str, int], dict[str, int]]:
        """Of k and v, by axis: exact sizes, and least sizes of the others; no heads and lanes."""
        return {}, {"token": batch.kv_extent}

    def check_extent(self, k: torch.Tensor, batch: Batch) -> None:
        """Raise IndexOutOfRange where a checked k has no block that the plan reads."""

    def kernel_strides(self, block: int, token: int, head: int) -> tuple[int, int, int]:
        """What kernels step by from block to block, token and head, from the tensor's strides."""
        return block, token, head

    def by_block_token_head(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view [block, token, head, lane] of k or v; storage without blocks is one block."""
        if not self.has_blocks:
            tensor = tensor.unsqueeze(0)
        return tensor.transpose(1, 2) if self.declared.layout == "HND" else tensor

    # The oracle, and random batches

    @abstractmethod
    def keys_of(self, segment: Any, batch: HostBatch) -> tuple[Ints, tuple[Ints, Ints]]:
        """kv_pos of each key of a segment's list, and its (block, token) in k and v."""

    @abstractmethod
    def store(self, drawn: Drawn) -> Stored:
        """Lay out the tokens of a random batch; what is left open, such as pages, is drawn."""


class Affine(Format[Declared]):
    """Formats without a list of blocks: a request's tokens lie a fixed distance apart."""

    def keys_of(self, segment: Any, batch: HostBatch) -> tuple[Ints, tuple[Ints, Ints]]:
        place = np.arange(int(segment["kv_count"]))
        return place, (np.full_like(place, segment["kv_block"]), place + int(segment["kv_row"]))


def whole_requests(drawn: Drawn) -> list[list[OracleSegment]]:
    """Segments of requests whose rows all have all keys listed, in the order of their positions."""
    places = [np.arange(n) for n in drawn.lengths]
    pairs = zip(drawn.q_lens, places, strict=True)
    return [[OracleSegment(slice(0, rows), place, place, len(place))] for rows, place in pairs]
