"""What a kernel is made of that is less than its declaration, or knows more."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from warploom.dsl.types.ir import Kind, node, substitute, walk
from warploom.dsl.types.spec import AttentionSpec, TracedVariant

_Q_HEAD = node("var", Kind.INT, attr="q_head")
_KV_HEAD = node("var", Kind.INT, attr="kv_head")


def for_group_size(spec: AttentionSpec, group_size: int) -> AttentionSpec:
    """The spec that kernels are made of, for this many query heads per key/value head.

    Rows of a tile belong to different query heads of one key/value head. With one query head each,
    the two numbers are equal, and what reads the head is the same for a whole tile.
    """
    if group_size != 1:
        return spec
    hooks = {
        hook: substitute(root, {_Q_HEAD: _KV_HEAD}) for hook, root in spec.variant.hooks.items()
    }
    return replace(spec, variant=replace(spec.variant, hooks=hooks))


def only_hooks(traced: TracedVariant, kept: Collection[str]) -> TracedVariant:
    """The part of a variant that has these hooks alone, with the fields that they read.

    What attention records is no part of it.
    """
    hooks = {hook: root for hook, root in traced.hooks.items() if hook in kept}
    read = {found.attr for found in walk(*hooks.values()) if found.op in ("scalar", "load", "call")}
    return replace(
        traced,
        softmax=True,
        hooks=hooks,
        records=(),
        scalars=tuple(field for field in traced.scalars if field.name in read),
        tensors=tuple(field for field in traced.tensors if field.name in read),
        functions=tuple(one for one in traced.functions if one.name in read),
    )


def for_prepared_keys(spec: AttentionSpec) -> AttentionSpec:
    """The spec of a kernel whose keys another has transformed before it.

    All fields stay, so that both ways to attend have the same `Params`.
    """
    hooks = {hook: root for hook, root in spec.variant.hooks.items() if hook != "key_transform"}
    name = f"{spec.variant.name} of prepared keys"
    return replace(spec, variant=replace(spec.variant, name=name, hooks=hooks))
