"""Functions that torch.compile calls while it traces, taking their results for constants.

Marking a function so imports torch._dynamo, which takes seconds. Eager calls never need it, so
nothing imports this module but code that is being traced.
"""

from __future__ import annotations

import torch

from warploom.dsl.variants.variant import ALIVE, as_variant
from warploom.errors import ArgumentError, CannotTrace
from warploom.runtime.declaring.structure import traced_once
from warploom.runtime.inputs.outputs import recorded_by, refuse_recording
from warploom.runtime.operators.custom_op import register_variant


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def handle_of(identity: int) -> int:
    """A handle for the variant with this `id`.

    Before torch 2.13 only numbers and strings can go in, so the object is looked up.

    Raises:
        CannotTrace: no variant was made in the ordinary way under this id.
        ArgumentError: its functors record values.
    """
    variant = ALIVE.get(identity)
    if variant is None:
        raise CannotTrace(
            what="the variant of this call of attention()",
            remedy="Make it once, outside of the compiled function.",
        )
    refuse_recording(recorded_by(variant))
    traced_once(as_variant(variant))  # so that it knows what its functions have captured
    return register_variant(variant)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def refuse_input(name: str, kind: str) -> None:
    """Raise from where torch.compile lets errors through."""
    raise ArgumentError(name=name, reason=f"a {kind} cannot be given under torch.compile")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def refuse_recorded(name: str) -> None:
    """Raise, as `refuse_input`, for an output of the variant."""
    refuse_recording((name,))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def refuse_result(name: str) -> None:
    """Raise, as `refuse_input`, for a result's tensor."""
    expected = {
        "out": "q's device and type, and its shape with head_dim_v",
        "lse": "q's device, float32, and its shape without head_dim",
        "max_scores": "q's device, float32, and its shape without head_dim",
    }
    raise ArgumentError(name=name, reason=f"expected {expected[name]}")
