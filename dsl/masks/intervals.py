"""Tile analysis: what a mask can say in a box of positions, without looking at its elements.

The analysis makes four graphs of the mask's graph, once per variant. `TileAnalysis` runs them in
NumPy for the planner; `codegen.lowering.interval_cpp` lowers the same graphs for the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.dsl.graphs import fold
from warploom.dsl.graphs.box import Box
from warploom.dsl.graphs.interval_rules import Range
from warploom.dsl.masks.kv_region import visible_range
from warploom.dsl.types.ir import Kind, Node, const, node, var, walk
from warploom.dsl.types.spec import TracedVariant
from warploom.dsl.values.evaluate import evaluate
from warploom.errors import MissingInput

SKIP, PARTIAL, FULL = 0, 1, 2  # TileClass of the C++ headers

# Positions that are one value for a whole tile, and positions that run over a range in it. The
# graphs read `<name>_first` and `<name>_last` of the latter.
FIXED = ("batch", "kv_head", "q_len", "kv_len", "num_q_heads", "num_kv_heads")
RANGED = ("q_pos", "kv_pos", "q_head")


@dataclass(frozen=True)
class TileGraphs:
    """Graphs over the corners of a box.

    Attributes:
        may_see: BOOL, some element of the tile may be visible.
        may_hide: BOOL, some element may be invisible.
        kv_begin: INT, first key that the box of queries may see.
        kv_end: INT, one past the last.
    """

    may_see: Node
    may_hide: Node
    kv_begin: Node
    kv_end: Node


def tile_box(tensors: frozenset[str], **others: Range) -> Box:
    """A box whose corners are variables, but for the positions that are given."""
    positions = {name: Range(var(name), var(name)) for name in FIXED}
    for name in RANGED:
        first, last = (node("var", Kind.INT, attr=f"{name}_{end}") for end in ("first", "last"))
        positions[name] = Range(first, last)
    return Box({**positions, **others}, tensors)


@lru_cache(maxsize=256)
def tile_graphs(mask: Node, tensors: frozenset[str]) -> TileGraphs:
    """Analyse a mask.

    Args:
        mask: BOOL graph of `logits_mask`.
        tensors: names of tensors whose values can be read where the graphs run.
    """
    box = tile_box(tensors)
    truth = box.truth(mask)
    unknown = box.has_nan()
    sequence = Range(const(0), fold.arithmetic("sub", var("kv_len"), const(1)))
    kv_begin, kv_end = visible_range(mask, tile_box(tensors, kv_pos=sequence))
    return TileGraphs(
        fold.either(truth.may_hold, unknown),
        fold.either(truth.may_fail, unknown),
        kv_begin,
        kv_end,
    )


class TileAnalysis:
    """Classes of tiles and bounds of keys, for many tiles at once.

    Args:
        traced: the variant.
        scalars: values of its scalar fields; a field with a default may be left out.
        tensors: values of tensor fields, as far as they are known here; a tile whose class depends
            on others is PARTIAL.

    Raises:
        MissingInput: the mask reads a scalar that has no value.
    """

    def __init__(
        self,
        traced: TracedVariant,
        scalars: Mapping[str, bool | int | float],
        tensors: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        mask = traced.hooks.get("logits_mask", fold.TRUE)
        read = {str(found.attr) for found in walk(mask) if found.op == "scalar"}
        self.mask_scalars = frozenset(read)  #: run() must get these as they were when planned
        self._scalars: dict[str, bool | int | float] = {}
        for field in traced.scalars:
            value = scalars.get(field.name, field.default)
            if value is not None:
                self._scalars[field.name] = value
            elif field.name in read:
                raise MissingInput(
                    variant=traced.name, name=field.name, expected=f"a number, {field.dtype.name}"
                )
        self._tensors = dict(tensors or {})
        self._graphs = tile_graphs(mask, frozenset(self._tensors))

    def classify(self, **positions: Any) -> NDArray[np.int8]:
        """Class of each tile: SKIP (no element visible), FULL (all), or PARTIAL (perhaps some).

        Args:
            **positions: int arrays of equal shape for the names in `FIXED`, pairs (begin, end) of
                them, half open and not empty, for those in `RANGED`.
        """
        see, hide = self._run((self._graphs.may_see, self._graphs.may_hide), positions)
        return np.where(see, np.where(hide, PARTIAL, FULL), SKIP).astype(np.int8)

    def kv_bounds(self, **positions: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Range [begin, end) inside [0, kv_len) that holds every key visible to a box of queries.

        Args:
            **positions: as for `classify`, without kv_pos.
        """
        begin, end = self._run((self._graphs.kv_begin, self._graphs.kv_end), positions)
        return begin, end

    def _run(self, roots: tuple[Node, ...], positions: Mapping[str, Any]) -> list[NDArray[Any]]:
        values: dict[str, NDArray[Any]] = {}
        for name, value in positions.items():
            if name in RANGED:
                begin, end = value
                values[f"{name}_first"] = np.asarray(begin, np.int64)
                values[f"{name}_last"] = np.asarray(end, np.int64) - 1
            else:
                values[name] = np.asarray(value, np.int64)
        shape = np.broadcast_shapes(*(value.shape for value in values.values()))
        found = evaluate(roots, values, self._scalars, self._tensors, wide=True)
        return [np.broadcast_to(array, shape).copy() for array in found]
