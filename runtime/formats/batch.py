"""The lengths of one batch, as planners and the checks of `run` ask for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from warploom.runtime.tensors.index_arrays import IndexArrays
from warploom.scheduler.model.bounds import Bounds
from warploom.scheduler.model.layout import Records
from warploom.scheduler.model.tiles import key_bounds
from warploom.scheduler.model.visibility import Visibility


class Arrays(NamedTuple):
    """A batch in the form of planners.

    Attributes:
        segments: `layout.SEGMENT` records; a segment is a request, or a block row of one.
        indices: int32 block list of all segments; empty if storage is affine.
        q_lens, kv_lens: int32 [requests], query rows and keys of each request.
    """

    segments: Records
    indices: npt.NDArray[np.int32]
    q_lens: npt.NDArray[np.int32]
    kv_lens: npt.NDArray[np.int32]


class Arguments(NamedTuple):
    """Arguments of `AttentionWrapper.plan`, as they were given."""

    qo_indptr: Any
    kv_indptr: Any
    kv_indices: Any = None
    last_page_len: Any = None
    kv_lens: Any = None
    q_rows: int | None = None


class Sizes(NamedTuple):
    """Numbers by which tiles and sizes are chosen.

    Attributes:
        segment_rows, total_q_rows: query rows of all segments, and of all requests.
        busy_rows: mean number of query rows of the segments that have some; 1 if none has.
        longest_q, max_kv_len: query rows and keys of the longest request.
        num_blocks: entries of the block list.
    """

    num_requests: int
    num_segments: int
    segment_rows: int
    busy_rows: float
    total_q_rows: int
    longest_q: int
    max_kv_len: int
    num_blocks: int

    @classmethod
    def of(cls, arrays: Arrays) -> Sizes:
        """Counts a batch."""
        rows, q_lens = arrays.segments["num_q"], arrays.q_lens
        total, busy = int(rows.sum(dtype=np.int64)), int(np.count_nonzero(rows))
        return cls(
            len(q_lens), len(rows), total, total / busy if busy else 1.0, int(q_lens.sum()),
            int(q_lens.max(initial=0)), int(arrays.kv_lens.max(initial=0)), len(arrays.indices),
        )  # fmt: skip


class RoleSizes(NamedTuple):
    """Sizes of the tiles of two roles.

    Attributes:
        few_rows: fused query rows that a request which decodes has at most.
        rows, keys: of a tile of prefills.
        decode_keys: of a tile of decodes, which has all rows of a request.
    """

    few_rows: int
    rows: int
    keys: int
    decode_keys: int


class RoleTiles(NamedTuple):
    """Key tiles of one head, of each role."""

    prefills: int
    decodes: int

    @classmethod
    def of(
        cls, segments: Records, sizes: RoleSizes, group_size: int, visibility: Visibility
    ) -> RoleTiles:
        """Counts a batch by the keys between those that a query tile sees first and last.

        Of the query tiles of a prefill the first and the last are asked; the others count as if
        they lay evenly between them, as under causal masks they do. C++: measure.hpp.

        Args:
            segments: SEGMENT records.
            sizes: of both roles.
            group_size: query heads per key/value head.
            visibility: the mask's answers.
        """
        fused = segments["num_q"].astype(np.int64) * group_size
        is_tall = fused > sizes.few_rows
        found = []
        for mine, rows, keys in (
            (np.flatnonzero(is_tall), sizes.rows, sizes.keys),
            (np.flatnonzero((fused > 0) & ~is_tall), sizes.few_rows, sizes.decode_keys),
        ):
            end = fused[mine]
            tiles = -(-end // rows)
            spans = np.zeros(len(mine), np.int64)
            for where in ((mine, mine * 0, np.minimum(rows, end)), (mine, (tiles - 1) * rows, end)):
                kv_begin, kv_end = key_bounds(visibility, segments, where, keys)
                spans += -((kv_begin - kv_end) // keys)
            found.append(int((tiles * spans // 2).sum()))
        return cls(*found)


@dataclass(eq=False)
class Batch:
    """The lengths of one batch, of which some know more than others; it never changes.

    (Not frozen: making one that is takes three times as long, and each plan makes one.)

    Attributes:
        q_rows: rows that a ragged q must have; for dense storage, rows of each batch entry.
        kv_extent: what k and v must at least have: tokens (ragged, block-sparse), tokens of each
            batch entry (dense), or pages (paged).
        sizes: numbers by which tiles and sizes are chosen.
    """

    q_rows: int
    kv_extent: int
    sizes: Sizes

    @property
    def least_bounds(self) -> Bounds:
        """The smallest bounds that admit this batch."""
        sizes = self.sizes
        requests, longest, blocks = sizes.num_requests, sizes.max_kv_len, sizes.num_blocks
        return Bounds(requests, sizes.total_q_rows, longest, blocks, requests)

    @property
    def on_host(self) -> HostBatch:
        """The batch with its arrays; raises RuntimeError if only the device can read them."""
        raise RuntimeError("the lengths lie on the device")

    @property
    def num_requests(self) -> int:
        return self.sizes.num_requests

    @property
    def num_segments(self) -> int:
        return self.sizes.num_segments


@dataclass(eq=False)
class HostBatch(Batch):
    """A batch whose lengths were read on the host, and checked.

    Attributes:
        arrays: its lengths and block lists.
    """

    arrays: Arrays
    sizes: Sizes = field(init=False)

    def __post_init__(self) -> None:
        self.sizes = Sizes.of(self.arrays)

    @property
    def on_host(self) -> HostBatch:
        return self

    @property
    def least_bounds(self) -> Bounds:
        return Bounds.of(self.segments, len(self.indices))

    @property
    def segments(self) -> Records:
        return self.arrays.segments

    @property
    def indices(self) -> npt.NDArray[np.int32]:
        return self.arrays.indices

    @property
    def q_lens(self) -> npt.NDArray[np.int32]:
        return self.arrays.q_lens

    @property
    def kv_lens(self) -> npt.NDArray[np.int32]:
        return self.arrays.kv_lens


class Lowering(Protocol):
    """What of a format makes batches: `Format` of base.py, which is made of what stands here."""

    def make_batch(self, given: Arguments) -> HostBatch:
        """Check the arguments of `plan` and lower them."""
        ...


@dataclass(eq=False)
class Measured(Batch):
    """A batch that a native planner has measured on the host; one segment for each request.

    Attributes:
        lengths: qo_indptr, kv_indptr and, if paged, last_page_len and kv_indices.
        kv_format: of which they are the lengths.
    """

    lengths: IndexArrays
    kv_format: Lowering

    @cached_property
    def _lowered(self) -> HostBatch:
        qo, kv, last, indices = (*self.lengths.kept, None, None)[:4]
        return self.kv_format.make_batch(Arguments(qo, kv, indices, last))

    @property
    def on_host(self) -> HostBatch:
        """With its arrays, which are made, and checked once more, when they are first asked for."""
        return self._lowered


@dataclass(eq=False)
class OnDevice(Batch):
    """A batch whose lengths only the device knows; the bounds stand for them.

    Attributes:
        tensors: qo_indptr, kv_indptr, last_page_len and kv_indices.
        bounds: the largest batch.
    """

    tensors: tuple[torch.Tensor | None, ...]
    bounds: Bounds

    @classmethod
    def of(
        cls, tensors: tuple[torch.Tensor | None, ...], requests: int, q_rows: int, bounds: Bounds
    ) -> OnDevice:
        """The lengths as `plan` was given them, which nobody can read before they are planned."""
        mean = max(1.0, bounds.max_q_rows / max(1, bounds.segments))
        sizes = Sizes(  # of segments as the bounds have, so that all batches are planned alike
            requests, bounds.segments, bounds.max_q_rows, mean, q_rows,
            bounds.max_q_rows, bounds.max_kv_len, 0,
        )  # fmt: skip
        return cls(q_rows, 0, sizes, tensors, bounds)
