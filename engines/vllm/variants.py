"""Who chooses the variant of a layer: a function that the user names, or nobody.

vLLM runs models in processes of their own, which see the environment and not the objects of the one
that started them. So the choice is a name, in `VLLM_WARPLOOM_VARIANT`, and the call in Python
writes it there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

from warploom import env
from warploom.dsl.variants.variant import Variant, as_variant
from warploom.engine_errors import BadVariantChoice
from warploom.engines.layers import Fault, fault_of, tells_requests_apart
from warploom.engines.vllm.layers import Layer

Choice = Callable[[Layer], "Variant | type[Variant] | None"]


def use_variant(choose: Choice | None) -> None:
    """Let a function choose the variant of each layer, in this process and those that it starts.

    Args:
        choose: given a `Layer`, returns its variant, or None for `layer.variant`. It must lie in a
            module that other processes can import. None: vLLM's own description holds again.

    Raises:
        BadVariantChoice: a function that no other process would find.
    """
    if choose is None:
        os.environ.pop(env.VLLM_VARIANT, None)
        return
    where, name = getattr(choose, "__module__", None), getattr(choose, "__qualname__", "")
    spec = f"{where}:{name}"
    if where in (None, "__main__") or "<" in name:
        reason = "vLLM's processes import it, and cannot from there"
        raise BadVariantChoice(spec=spec, reason=reason, expected="a function of a module")
    os.environ[env.VLLM_VARIANT] = spec


def chosen(layer: Layer) -> Variant:
    """The variant of a layer.

    Raises:
        BadVariantChoice: VLLM_WARPLOOM_VARIANT names no function, or it returned no variant. What
            it raises is passed on.
    """
    spec = env.vllm_variant()
    if spec is None:
        return layer.variant
    made = _named(spec)(layer)
    if made is None:
        return layer.variant
    fault = fault_of(made, layer)
    if fault is None:
        variant = as_variant(made)
        if not tells_requests_apart(variant):
            return variant
        fault = Fault("reads at.batch, and steps hold any requests", "one that is alike for all")
    reason = f"what it returned for {layer.name} {fault.reason}"
    raise BadVariantChoice(spec=spec, reason=reason, expected=fault.expected)


def _named(spec: str) -> Choice:
    where, _, path = spec.partition(":")
    expected = "module:function in VLLM_WARPLOOM_VARIANT"
    if not (where and path):
        raise BadVariantChoice(spec=spec, reason="it is no pair with a colon", expected=expected)
    try:
        found: Any = import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{where}.".startswith(f"{error.name}."):
            raise  # of something that the module imports
        reason = f"there is no module {where} on the path of Python"
        raise BadVariantChoice(spec=spec, reason=reason, expected=expected) from error
    for name in path.split("."):
        found = getattr(found, name, None)
    if not callable(found):
        reason = f"{where} has no function {path}"
        raise BadVariantChoice(spec=spec, reason=reason, expected=expected)
    return cast("Choice", found)
