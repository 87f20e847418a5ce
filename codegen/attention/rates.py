"""What recorded sweeps tell of a template's tiles; models of costs read it (`codegen/choice/`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class Rates:
    """One kind of tile on one architecture.

    Attributes:
        flops: millions of operations in a microsecond.
        launch: microseconds of a batch that has next to nothing to do.
        item: of a query tile, beside its keys. Where a template streams on to the next, it shows
            once.
        merge: of the parts of 64 rows x 128 lanes.
    """

    flops: float
    launch: float
    item: float
    merge: float


@dataclass(frozen=True)
class ComposedRates:
    """One tile of composed plans: microseconds of an SM.

    Attributes:
        launch: of a batch that has next to nothing to do, merging included.
        read, walk: of 1000 keys.
        item: of a work item.
    """

    launch: float
    read: float
    walk: float
    item: float


class TileSizes(NamedTuple):
    """Of a tile."""

    rows: int
    keys: int
    warps: int


@dataclass(frozen=True)
class Recorded:
    """One template on one architecture, by sweeps of 16-bit keys that nothing transforms.

    Attributes:
        small_heads: for heads up to `template.SMALL_HEADS` lanes, which have fewer products for
            each exponential, rates by the kind of a tile (`CudaTemplate.kind`).
        wide_heads: for all others.
        composed: tiles of composed plans with heads of 128 lanes.
    """

    small_heads: Mapping[str, Rates] = field(default_factory=dict)
    wide_heads: Mapping[str, Rates] = field(default_factory=dict)
    composed: Mapping[TileSizes, ComposedRates] = field(default_factory=dict)
