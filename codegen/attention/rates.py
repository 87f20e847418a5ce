"""Rates of a template's tiles from recorded sweeps, for the cost models in `codegen/choice/`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class Rates:
    """Rates of one kind of tile on one architecture.

    Attributes:
        flops: millions of operations per microsecond.
        launch: microseconds of a batch that has almost no work.
        item: microseconds of a query tile, beside its keys. In a template that streams from item
            to item, this time shows only once.
        merge: microseconds to merge the parts of 64 rows x 128 lanes.
    """

    flops: float
    launch: float
    item: float
    merge: float


@dataclass(frozen=True)
class ComposedRates:
    """Rates of one tile of composed plans, in microseconds of an SM.

    Attributes:
        launch: time of a batch that has almost no work, including merges.
        read, walk: time of 1000 keys.
        item: time of a work item.
    """

    launch: float
    read: float
    walk: float
    item: float


class TileSizes(NamedTuple):
    """Sizes of a tile."""

    rows: int
    keys: int
    warps: int


@dataclass(frozen=True)
class Recorded:
    """Rates of one template on one architecture, from sweeps with untransformed 16-bit keys.

    Attributes:
        small_heads: rates by the kind of a tile (`CudaTemplate.kind`), for heads up to
            `template.SMALL_HEADS` lanes, which have fewer products for each exponential.
        wide_heads: the same for all other heads.
        composed: rates of tiles of composed plans with heads of 128 lanes.
    """

    small_heads: Mapping[str, Rates] = field(default_factory=dict)
    wide_heads: Mapping[str, Rates] = field(default_factory=dict)
    composed: Mapping[TileSizes, ComposedRates] = field(default_factory=dict)
