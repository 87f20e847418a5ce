"""An expression as a person would write it, cut where it goes deep: for what `print` shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from warploom.dsl.types.ir import Node

# What a plain function calls its arguments, while it runs; None in functors of classes.
_ARGUMENTS: ContextVar[Mapping[Node, str] | None] = ContextVar("arguments", default=None)

_DEPTH = 4  # a graph shares its parts, so that the whole text may be endless
_INFIX = {
    **{"add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%", "pow": "**"},
    **{"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="},
    **{"and": "&", "or": "|", "xor": "^", "bitand": "&", "bitor": "|", "bitxor": "^"},
    **{"shl": "<<", "shr": ">>"},
}
_NAMES = {"select": "where", "min": "minimum", "max": "maximum", "cast": "to"}
_NAMES |= {"sum_lanes": "sum", "max_lanes": "max", "is_nan": "isnan", "is_inf": "isinf"}


@contextmanager
def showing(arguments: Mapping[Node, str]) -> Iterator[None]:
    """Within the context, expressions are shown by these names, and fields without `self`."""
    token = _ARGUMENTS.set(arguments)
    try:
        yield
    finally:
        _ARGUMENTS.reset(token)


def shown(node: Node) -> str:
    """Such as `where(at.kv_pos > at.q_pos, logits * 2.5, tanh(...))`."""
    return _bare(node, _DEPTH)


def _bare(node: Node, depth: int) -> str:
    """Without parentheses around it."""
    text = _shown(node, depth)
    return text[1:-1] if text.startswith("(") else text


def _shown(node: Node, depth: int) -> str:
    named = _ARGUMENTS.get()
    if named is not None and node in named:
        return named[node]
    of = "self." if named is None else ""
    if node.op == "const":
        return repr(node.attr)
    if node.op == "var":
        return f"at.{node.attr}"
    if node.op == "scalar":
        return f"{of}{node.attr}"
    if node.op == "logits":
        return "logits"
    if node.op == "element" and node.args[0].op == "var":
        return "vector[at.lane]"
    if not depth:
        return "..."
    if node.op in _INFIX:
        left, right = (_shown(arg, depth - 1) for arg in node.args)
        return f"({left} {_INFIX[node.op]} {right})"
    args = [_bare(arg, depth - 1) for arg in node.args]
    if node.op in ("load", "element"):
        return f"{'vector' if node.op == 'element' else f'{of}{node.attr}'}[{', '.join(args)}]"
    name = str(node.attr) if node.op == "call" else _NAMES.get(node.op, node.op)
    return f"{name}({', '.join(args)})"
