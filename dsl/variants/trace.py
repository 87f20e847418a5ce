"""Tracing: run a variant's functors on symbols and keep the graphs.

A variant is traced anew each time it is asked for, so that an edited helper or closure is never
stale; nodes are interned, so equal variants give equal results and later stages may cache by them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from warploom.dsl.graphs import rotations
from warploom.dsl.types import location
from warploom.dsl.types.ir import Kind, Node, const, node, var, walk
from warploom.dsl.types.spec import RECORDING_SEAT, SEATS, VECTOR_SEATS, Record, TracedVariant
from warploom.dsl.values.custom import recording
from warploom.dsl.values.position import symbolic
from warploom.dsl.values.symbols import Symbol, Value, refuse_foreign
from warploom.dsl.variants import check, purity
from warploom.dsl.variants.compose import Composed
from warploom.dsl.variants.fields import Field, misuse
from warploom.dsl.variants.outputs import Output
from warploom.dsl.variants.readings import TraceReading
from warploom.dsl.variants.variant import Variant
from warploom.errors import EndlessFunctor, ImpureFunctor, WarploomError

_LOGITS = node("logits", Kind.FLOAT)
_ELEMENT = node("element", Kind.FLOAT, (var("lane"),))


def trace(variant: Variant) -> TracedVariant:
    """Turn a variant's functors into graphs.

    Args:
        variant: an instance; values bound to its fields do not influence the result.

    Returns:
        Graphs of the seats that are not the identity, and the fields that they read.

    Raises:
        VariantError: a subclass names the mistake and the user's line.
    """
    for part in (*(variant.parts if isinstance(variant, Composed) else ()), variant):
        check.declaration(part)
    before = purity.snapshot(variant)
    seats, reading = _run(variant)
    purity.compare(variant, before)
    again, again_reading = _run(variant)
    for seat, root in seats.items():
        if again[seat] is not root:
            raise _impure(variant, seat)
    if reading.records != again_reading.records:
        raise _impure(variant, RECORDING_SEAT)
    kept = {seat: root for seat, root in seats.items() if root is not _identity(seat)}
    fields = variant.fields()
    records = _records(variant, fields, reading)
    roots = (*kept.values(), *(record.value for record in records))
    used = {found.attr for found in walk(*roots) if found.op in ("scalar", "load", "call")}
    used |= reading.records.keys()
    order = [name for name in fields if name in used]
    return TracedVariant(
        name=variant.name,
        softmax=variant.softmax,
        seats=kept,
        scalars=tuple(reading.scalars[name] for name in order if name in reading.scalars),
        tensors=tuple(reading.tensors[name] for name in order if name in reading.tensors),
        functions=tuple(
            reading.functions[name] for name in sorted(reading.functions.keys() & used)
        ),
        rotated=tuple((seat, dim) for seat, dim in reading.rotated.items() if seat in kept),
        records=records,
        unread=tuple(name for name in fields if name not in used),
    )


def _impure(variant: Variant, seat: str) -> ImpureFunctor:
    return ImpureFunctor(
        seat=seat,
        variant=variant.name,
        cause="what differs between calls: random numbers, clocks, tensors made inside",
        source=location.of_function(variant.functor(seat)),
    )


def _records(
    variant: Variant, fields: Mapping[str, Field], reading: TraceReading
) -> tuple[Record, ...]:
    """What is recorded, in order of declaration; an output that nothing is recorded in is refused.

    It would stay as the caller filled it, which looks like a row that sees nothing.
    """
    outputs = [name for name, field in fields.items() if isinstance(field, Output)]
    for name in outputs:
        if name not in reading.records:
            remedy = f"Call self.{name}.record(logits, at) in {RECORDING_SEAT}, or drop the field."
            raise misuse(variant.name, name, "nothing is recorded in it", remedy)
    return tuple(reading.records[name] for name in outputs)


def _run(variant: Variant) -> tuple[dict[str, Node], TraceReading]:
    reading = TraceReading(variant.name)
    shadow = variant.under(reading)
    seats: dict[str, Node] = {}
    with recording(reading.functions):
        for seat in SEATS:
            reading.seat = seat
            with rotations.recording() as widths:
                seats[seat] = check.result(shadow, seat, _called(shadow, seat))
            if widths:
                reading.rotated[seat] = max(widths)
    return seats, reading


def _called(shadow: Variant, seat: str) -> Value:
    functor: Callable[..., Value] = getattr(shadow, seat)
    given = () if seat == "logits_mask" else (Symbol(_identity(seat)),)
    try:
        return functor(*given, symbolic(seat))
    except RecursionError as error:
        place = location.source(location.recursing(error))
        raise EndlessFunctor(seat=seat, variant=shadow.name, source=place) from None
    except WarploomError:
        raise
    except Exception as error:
        refused = refuse_foreign(error)
        if refused is None:
            raise
        raise refused from error


def _identity(seat: str) -> Node:
    if seat in VECTOR_SEATS:
        return _ELEMENT
    return _LOGITS if seat == "logits_transform" else const(True)
