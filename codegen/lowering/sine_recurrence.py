"""Angles that grow evenly from key to key: a rotation gives their sines from those of another row.

Where a hook takes the sine and cosine of `a * kv_pos + b`, whatever `a` and `b` are for a lane, d
keys further rotate the pair (cos, sin) by the angle a * d: few multiply-adds in place of a range
reduction and two operations of the special function unit. `sine_recurrence.cuh` does it.
"""

from __future__ import annotations

from dataclasses import dataclass

from warploom.codegen.lowering.lower import reachable
from warploom.dsl.graphs import build
from warploom.dsl.graphs.extents import Extents
from warploom.dsl.graphs.lanes import HEAD_DIM, LANE
from warploom.dsl.types.ir import REDUCTIONS, Kind, Node, const, var

_KV_POS = var("kv_pos")
# Angles of the vector itself are no more the same for all.
_OF_VECTORS = REDUCTIONS | {"element", "logits"}


@dataclass(frozen=True)
class SineRecurrence:
    """An angle of a vector hook that grows evenly.

    Attributes:
        angle: in radians.
        rate: its growth from one key to the next, the same for all keys.
        calls: C++ text of what takes its sine or cosine, as a format of the angle.
        owner: C++ text of a lane with the same angle: where it repeats, the first such lane.
    """

    angle: Node
    rate: Node
    calls: dict[Node, str]
    owner: str


def find_recurrence(root: Node) -> SineRecurrence | None:
    """The first angle of a key or value hook that grows evenly; a thread has room for one.

    Hooks that reduce have none: they need a whole row before its sines.
    """
    parts = list(reachable([root]))
    extents = Extents()
    if any(found.op in REDUCTIONS for found in parts):
        return None
    for found in parts:
        if not _is_sine(found):
            continue
        angle = found.args[0]
        rate = _rate(angle, extents)
        if rate is None or any(part.op in _OF_VECTORS for part in reachable([angle])):
            continue
        calls = {
            call: "x.%s(lane, {})" % ("sine" if call.op == "sin" else "cosine")
            for call in parts
            if _is_sine(call) and call.args[0] is angle
        }
        return SineRecurrence(angle, build.to_kind(rate, Kind.FLOAT), calls, _owner(angle))
    return None


def _is_sine(current: Node) -> bool:
    """Functions that are to be precise are left as exact as asked for."""
    return current.op in ("sin", "cos") and current.attr != ("precise",)


def _rate(current: Node, extents: Extents) -> Node | None:
    """What an expression of kv_pos grows by from one key to the next, if by the same for all."""
    if current is _KV_POS:
        return const(1)
    if current.kind is Kind.INT and extents.may_wrap(current):
        return None
    moving = [arg for arg in current.args if _reads_key(arg)]
    rates = {arg: rate for arg in moving if (rate := _rate(arg, extents)) is not None}
    if not moving or len(rates) < len(set(moving)):
        return None
    op, args = current.op, current.args
    if op == "neg":
        return build.negate(rates[args[0]])
    if op == "to_float":
        return build.to_kind(rates[args[0]], Kind.FLOAT)
    if op in ("add", "sub"):
        if len(moving) == 2:
            return build.arithmetic(op, *(rates[arg] for arg in args))
        rate = rates[moving[0]]
        return rate if op == "add" or moving[0] is args[0] else build.negate(rate)
    if op == "mul" and len(moving) == 1:
        factor = args[1] if args[0] is moving[0] else args[0]
        return _times(rates[moving[0]], factor)
    if op == "div" and moving == [args[0]]:
        return build.true_divide(rates[args[0]], args[1])
    return None


def _times(rate: Node, factor: Node) -> Node:
    is_one = rate.op == "const" and rate.attr == 1
    return build.to_kind(factor, rate.kind) if is_one else build.arithmetic("mul", rate, factor)


def _reads_key(root: Node) -> bool:
    return any(found is _KV_POS for found in reachable([root]))


def _owner(angle: Node) -> str:
    """The lane whose angle this one has: rotary frequencies are those of pairs of lanes."""
    readers = [found for found in reachable([angle]) if LANE in found.args]
    if len(readers) == 1 and readers[0].args[0] is LANE:
        (reader,) = readers
        divisor = reader.args[-1]
        if reader.op == "mod" and divisor.op == "const":
            return f"lane % {divisor.attr}"
        if reader.op == "mod" and divisor.op == "floordiv" and divisor.args[0] is HEAD_DIM:
            parts = divisor.args[1]
            return f"lane % (head_dim / {parts.attr})" if parts.op == "const" else "lane"
        if reader.op == "floordiv" and divisor.op == "const":
            return f"lane - lane % {divisor.attr}"
    return "lane"
