"""Tracing: run a variant's functors on symbols, which records their graphs.

`trace` does not cache. A cache of traces, as in `declaring/structure.py`, must detect when
something that the functors read has changed (`fingerprint.py`). Nodes are interned, so equal
variants give equal results, and later stages may cache by them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from warploom.dsl.graphs import rotations
from warploom.dsl.graphs.growth import power
from warploom.dsl.types import location
from warploom.dsl.types.ir import Kind, Node, const, node, var, walk
from warploom.dsl.types.spec import HOOKS, RECORDING_HOOK, VECTOR_HOOKS, Record, TracedVariant
from warploom.dsl.values.custom import recording
from warploom.dsl.values.position import symbolic
from warploom.dsl.values.symbols import Symbol, Value, refusing_foreign
from warploom.dsl.variants import check, purity
from warploom.dsl.variants.chain import ChainedVariant
from warploom.dsl.variants.fields import Field, misuse
from warploom.dsl.variants.outputs import Output
from warploom.dsl.variants.readings import TraceReading
from warploom.dsl.variants.variant import Variant
from warploom.error_base import gathered
from warploom.errors import (
    EndlessFunctor,
    ImpureFunctor,
    ScaleBehind,
    UnscaledTransform,
)

_LOGITS = node("logits", Kind.FLOAT)
_ELEMENT = node("element", Kind.FLOAT, (var("lane"),))


def trace(variant: Variant) -> TracedVariant:
    """Turn a variant's functors into graphs.

    Args:
        variant: an instance; values bound to its fields do not influence the result.

    Returns:
        Graphs of the hooks that are not the identity, and the fields that they read.

    Raises:
        VariantError: the subclass shows the kind of mistake; it names the user's line.
    """
    for part in (*(variant.links if isinstance(variant, ChainedVariant) else ()), variant):
        check.declaration(part)
    before = purity.snapshot(variant)
    hooks, reading = _run(variant)
    purity.compare(variant, before)
    again, again_reading = _run(variant)
    for hook, root in hooks.items():
        if again[hook] is not root:
            raise _impure(variant, hook)
    if reading.records != again_reading.records:
        raise _impure(variant, RECORDING_HOOK)
    kept = {hook: root for hook, root in hooks.items() if root is not _identity(hook)}
    _check_scaled_behind(variant, kept)
    if isinstance(variant, ChainedVariant):
        _check_scaled_first(variant)
    fields = variant.fields()
    records = _records(variant, fields, reading)
    roots = (*kept.values(), *(record.value for record in records))
    used = {found.attr for found in walk(*roots) if found.op in ("scalar", "load", "call")}
    used |= reading.records.keys()
    order = [name for name in fields if name in used]
    return TracedVariant(
        name=variant.name,
        softmax=variant.softmax,
        hooks=kept,
        scalars=tuple(reading.scalars[name] for name in order if name in reading.scalars),
        tensors=tuple(reading.tensors[name] for name in order if name in reading.tensors),
        functions=tuple(
            reading.functions[name] for name in sorted(reading.functions.keys() & used)
        ),
        rotated=tuple((hook, dim) for hook, dim in reading.rotated.items() if hook in kept),
        records=records,
        unread=tuple(name for name in fields if name not in used),
    )


def _check_scaled_behind(variant: Variant, hooks: Mapping[str, Node]) -> None:
    """Raise UnscaledTransform if scaling behind a transform does not equal scaling before it."""
    for link in variant.links if isinstance(variant, ChainedVariant) else (variant,):
        for hook in link.scaled_behind:
            if hook in hooks and power(hooks[hook]) != 1:
                source = location.of_function(variant.functor(hook))
                raise UnscaledTransform(scale=link.name, hook=hook, source=source)


def _check_scaled_first(chain: ChainedVariant) -> None:
    """Raise ScaleBehind for a scale behind a link whose hook needs the scaled value."""
    for at, scale in enumerate(chain.links):
        for before in chain.links[:at] if scale.scaled_first else ():
            hooks, _ = _run(before)
            for hook in scale.scaled_first:
                if power(hooks[hook]) != 1:
                    source = location.of_function(before.functor(hook))
                    facts = {"scale": scale.name, "before": before.name, "hook": hook}
                    raise ScaleBehind(**facts, source=source)


def _impure(variant: Variant, hook: str) -> ImpureFunctor:
    cause = "what differs between calls: random numbers, clocks, tensors made inside"
    return ImpureFunctor(
        hook=variant.shown_hook(hook),
        variant=variant.name,
        cause=f"{cause} (make them before, outside)",
        source=location.of_function(variant.functor(hook)),
    )


def _records(
    variant: Variant, fields: Mapping[str, Field], reading: TraceReading
) -> tuple[Record, ...]:
    """The records in order of declaration; an output without a record is refused.

    Such an output would keep the caller's values, which looks like rows that see no key.
    """
    outputs = [name for name, field in fields.items() if isinstance(field, Output)]
    for name in outputs:
        if name not in reading.records:
            remedy = f"Call self.{name}.record(logits, at) in {RECORDING_HOOK}, or drop the field."
            raise misuse(variant.name, name, "nothing is recorded in it", remedy)
    return tuple(reading.records[name] for name in outputs)


def _run(variant: Variant) -> tuple[dict[str, Node], TraceReading]:
    reading = TraceReading(variant.name)
    shadow = variant.under(reading)
    hooks: dict[str, Node] = {}
    with recording(reading.functions):
        for hook in HOOKS:
            reading.hook = hook
            with rotations.recording() as widths:
                hooks[hook] = check.result(shadow, hook, _called(shadow, hook))
            if widths:
                reading.rotated[hook] = max(widths)
    return hooks, reading


def _called(shadow: Variant, hook: str) -> Value:
    functor: Callable[..., Value] = getattr(shadow, hook)
    given = () if hook == "logits_mask" else (Symbol(_identity(hook)),)
    with gathered() as refusals:
        made = _result(shadow, hook, functor, *given, symbolic(hook))
    if refusals:  # the functor caught the error, and continued
        first = refusals[0]
        refusals.clear()
        try:
            raise first
        finally:
            del first  # else the error and its traceback would refer to each other
    return made


def _result(shadow: Variant, hook: str, functor: Callable[..., Value], *given: Value) -> Value:
    """A functor's result; errors of other libraries become warploom's errors."""
    try:
        with refusing_foreign():
            return functor(*given)
    except RecursionError as error:
        place = location.source(location.recursing(error))
        shown = shadow.shown_hook(hook)
        raise EndlessFunctor(hook=shown, variant=shadow.name, source=place) from None


def _identity(hook: str) -> Node:
    if hook in VECTOR_HOOKS:
        return _ELEMENT
    return {"logits_transform": _LOGITS, "logits_mask": const(True)}[hook]
