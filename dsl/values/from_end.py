"""Indices that count from the end where they are negative, as torch and NumPy read them."""

from __future__ import annotations

import numpy as np

from warploom.dsl.graphs import build
from warploom.dsl.graphs.box import Box
from warploom.dsl.graphs.interval_rules import Range
from warploom.dsl.types.ir import POSITIONS, Kind, Node, const, substitute, var, walk
from warploom.dsl.types.limits import MAX_LENGTH
from warploom.dsl.types.number_types import SMALL
from warploom.dsl.values.evaluate import evaluate
from warploom.dsl.values.functions import to_int, where
from warploom.dsl.values.position import symbolic
from warploom.dsl.values.symbols import Symbol, Value, as_node

_ANY_PLACE = {
    name: Range(const(0), const(MAX_LENGTH)) for name, kind in POSITIONS.items() if kind is Kind.INT
}
# Where there are more queries than keys, the first of them lie before the first key.
_ANY_PLACE["q_pos"] = Range(const(-MAX_LENGTH), const(MAX_LENGTH))
# A row's number within its request is an expression of positions whose ranges hide its sign.
_ROW_NUMBER = {as_node(symbolic("logits_mask").q_idx): var("q_row")}


def from_end(index: Value, size: int) -> Value:
    """The same index where it is not negative, and `index + size` where it is.

    Args:
        index: a symbol, an array or a number; what is no integer is returned as it is.
        size: of the dimension.
    """
    index = _whole(index)  # before the size is added, which a small type may not hold
    if isinstance(index, Symbol):
        wraps = index.kind is Kind.INT and may_be_negative(index.node)
        return where(index < 0, index + size, index) if wraps else index
    if isinstance(index, (np.ndarray, np.generic)) and np.asarray(index).dtype.kind == "i":
        index = index if isinstance(index, np.ndarray) else np.asarray(index)
        return where(index < 0, index + size, index)
    return index + size if isinstance(index, int) and index < 0 else index


def _whole(index: Value) -> Value:
    """An int of a small type as one of 32 bits; others as they are."""
    if isinstance(index, Symbol):
        return Symbol(build.of_type(index.node, "int32")) if index.node.type in SMALL else index
    name = np.asarray(index).dtype.name if isinstance(index, np.ndarray) else ""
    return to_int(index) if name in SMALL else index


def may_be_negative(index: Node) -> bool:
    """False only for an expression that is 0 or more wherever its positions are."""
    box = Box(_ANY_PLACE, ())
    least = box.range(substitute(index, _ROW_NUMBER)).least
    if least is None:
        return True
    unknown = box.has_nan()
    if any(found.op in ("var", "scalar", "load", "call") for found in walk(least, unknown)):
        return True
    bound, is_nan = evaluate((least, unknown), {}, {}, {}, wide=True)
    return bool(is_nan) or int(bound) < 0
