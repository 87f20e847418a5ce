"""The lengths of one batch, as the planner and the checks of `run` ask for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from warploom.runtime.tensors.index_arrays import IndexArrays
from warploom.scheduler.bounds import Bounds
from warploom.scheduler.layout import Records


@dataclass  # not frozen: subclasses set the numbers that they know
class Batch:
    """The lengths of one batch, in the planner's form.

    Attributes:
        segments: `layout.SEGMENT` records; a segment is a request, or a block row of one.
        indices: int32 block list of all segments; empty if storage is affine.
        q_lens: int32 [requests], query rows of each request.
        kv_lens: int32 [requests], keys of each request.
        q_rows: rows that a ragged q must have; for dense storage, rows of each batch entry.
        kv_extent: what k and v must at least have: tokens (ragged, block-sparse), tokens of each
            batch entry (dense), or pages (paged).

    What follows from these is worked out when first asked for; a subclass may know it before.
    """

    segments: np.ndarray
    indices: np.ndarray
    q_lens: np.ndarray
    kv_lens: np.ndarray
    q_rows: int
    kv_extent: int

    @classmethod
    def of(cls, segments: Records, indices: npt.NDArray[np.int32]) -> Batch:
        """The batch of a plan with one segment for each request, for questions about lengths."""
        return cls(segments, indices, segments["q_len"], segments["kv_len"], 0, 0)

    @cached_property
    def num_requests(self) -> int:
        return len(self.q_lens)

    @cached_property
    def num_segments(self) -> int:
        return len(self.segments)

    @cached_property
    def total_q_rows(self) -> int:
        """Query rows of all requests."""
        return int(self.q_lens.sum())

    @cached_property
    def longest_q(self) -> int:
        """Query rows of the longest request."""
        return int(self.q_lens.max(initial=0))

    @cached_property
    def segment_rows(self) -> int:
        """Query rows of all segments."""
        return int(self.segments["num_q"].sum(dtype=np.int64))

    @cached_property
    def busy_rows(self) -> float:
        """Mean number of query rows of the segments that have some; 1 if none has."""
        rows = self.segments["num_q"]
        return float(rows[rows > 0].mean()) if (rows > 0).any() else 1.0

    @cached_property
    def max_kv_len(self) -> int:
        return int(self.kv_lens.max(initial=0))

    @cached_property
    def least_bounds(self) -> Bounds:
        """The smallest bounds that admit this batch."""
        return Bounds.of(self.segments, len(self.indices))


class SizesOnly(Batch):
    """A batch of which sizes are known; its arrays are made when first asked for.

    Planning does not ask for them.

    Attributes:
        arrays: makes the whole batch.
    """

    arrays: Callable[[], Batch]
    num_blocks: int = 0

    @cached_property
    def _full(self) -> Batch:
        return self.arrays()

    @cached_property
    def segments(self) -> Records:  # type: ignore[override]
        return self._full.segments

    @cached_property
    def indices(self) -> npt.NDArray[np.int32]:  # type: ignore[override]
        return self._full.indices

    @cached_property
    def q_lens(self) -> npt.NDArray[np.int32]:  # type: ignore[override]
        return self._full.q_lens

    @cached_property
    def kv_lens(self) -> npt.NDArray[np.int32]:  # type: ignore[override]
        return self._full.kv_lens


class Measured(SizesOnly):
    """A batch that a planner measured on the host; one segment for each request.

    Attributes:
        lengths: qo_indptr, kv_indptr and, if paged, last_page_len and kv_indices.
        num_blocks: entries of the block list.
    """

    lengths: IndexArrays
    _busy: int

    def __init__(
        self,
        arrays: Callable[[], Batch],
        lengths: IndexArrays,
        num_requests: int,
        busy_requests: int,
        q_rows: int,
        total_q_rows: int,
        longest_q: int,
        max_kv_len: int,
        num_blocks: int,
        kv_extent: int,
    ) -> None:
        """Take what a planner measured; see `Batch` for the names."""
        self.arrays = arrays
        self.lengths = lengths
        self.num_requests = self.num_segments = num_requests
        self._busy = busy_requests
        self.q_rows = q_rows
        self.total_q_rows = self.segment_rows = total_q_rows
        self.longest_q = longest_q
        self.max_kv_len = max_kv_len
        self.num_blocks = num_blocks
        self.kv_extent = kv_extent

    @cached_property
    def busy_rows(self) -> float:
        return self.total_q_rows / self._busy if self._busy else 1.0

    @cached_property
    def least_bounds(self) -> Bounds:
        requests = self.num_requests
        return Bounds(requests, self.total_q_rows, self.max_kv_len, self.num_blocks, requests)


class OnDevice(SizesOnly):
    """A batch whose lengths only the device knows; the bounds stand for them.

    Attributes:
        tensors: qo_indptr, kv_indptr, last_page_len and kv_indices.
        bounds: the largest batch.
        arrays: reads the whole batch back from the plan; set once there is one.
    """

    tensors: tuple[torch.Tensor | None, ...]
    bounds: Bounds

    def __init__(
        self,
        tensors: tuple[torch.Tensor | None, ...],
        num_requests: int,
        q_rows: int,
        bounds: Bounds,
    ) -> None:
        """Take the lengths as `plan` was given them; see `Batch` for the names."""
        self.tensors = tensors
        self.bounds = bounds
        self.num_requests = num_requests
        self.q_rows = self.total_q_rows = self.segment_rows = q_rows
        self.kv_extent = 0
        self.num_segments = bounds.segments  # so that all batches choose the same tile
        self.busy_rows = max(1.0, bounds.max_q_rows / max(1, bounds.segments))
        self.longest_q = bounds.max_q_rows
        self.max_kv_len = bounds.max_kv_len
        self.least_bounds = bounds
