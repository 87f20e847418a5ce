"""Helpers for the tests of the language."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from warploom.dsl.types.ir import Kind, Node, Source, walk
from warploom.errors import WarploomError

_BINARY: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.true_divide,
    "floordiv": np.floor_divide,
    "mod": np.mod,
    "min": np.minimum,
    "max": np.maximum,
    "pow": np.power,
    "atan": np.arctan,
    "is_nan": np.isnan,
    "is_inf": np.isinf,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
    "not": np.logical_not,
    "bitand": np.bitwise_and,
    "bitor": np.bitwise_or,
    "bitxor": np.bitwise_xor,
    "shl": np.left_shift,
    "shr": np.right_shift,
    "select": np.where,
    "neg": np.negative,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "erf": lambda x: np.vectorize(math.erf, otypes=[float])(x),
    "sum_lanes": lambda x: np.sum(x, axis=-1, keepdims=True),
    "max_lanes": lambda x: np.max(x, axis=-1, keepdims=True),
}
_TYPES = {Kind.BOOL: np.bool_, Kind.INT: np.int64, Kind.FLOAT: np.float64}


def run_graph(
    root: Node,
    positions: Mapping[str, Any],
    *,
    value: Any = None,
    fields: Mapping[str, Any] | None = None,
) -> Any:
    """Evaluate a graph on arrays: `value` is the logits, or the vector [rows, head_dim]."""
    done: dict[Node, Any] = {}
    for node in walk(root):
        args = [done[arg] for arg in node.args]
        if node.op == "const":
            found: Any = node.attr
        elif node.op == "var":
            found = positions[str(node.attr)]
        elif node.op == "scalar":
            found = (fields or {})[str(node.attr)]
        elif node.op == "logits":
            found = value
        elif node.op == "element":
            lanes = np.broadcast_to(args[0], np.shape(value))
            found = np.take_along_axis(value, lanes, axis=-1)
        elif node.op == "load":
            found = (fields or {})[str(node.attr)][tuple(args)]
        elif node.op == "to_int":
            found = np.trunc(args[0])
        elif node.op == "to_float":
            found = args[0]
        else:
            found = (_BINARY.get(node.op) or getattr(np, node.op))(*args)
        done[node] = np.asarray(found).astype(_TYPES[node.kind])
    return done[root]


def points_at(error: WarploomError, text: str) -> bool:
    """True if the error names this test's line holding `text`, with the caret under it."""
    source = error.source
    if source is None or text not in source.text or not source.file.endswith(".py"):
        return False
    if source.column and not source.text[source.column - 1 :].startswith(text):
        return False
    return str(error).count(source.text.strip()) >= 1


@pytest.fixture(scope="session")
def graph() -> Callable[..., Any]:
    return run_graph


def source_of(error: WarploomError) -> Source:
    """Where the error points; it must point somewhere."""
    assert error.source is not None
    return error.source


@pytest.fixture(scope="session")
def source() -> Callable[[WarploomError], Source]:
    return source_of


@pytest.fixture(scope="session")
def placed() -> Callable[[WarploomError, str], bool]:
    return points_at
