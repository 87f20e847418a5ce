"""A hook named in HOOKS is asked, chained, placed on ranks, and rendered: none is dropped."""

from __future__ import annotations

from typing import Any

import pytest

import warploom as wl
from warploom.codegen.attention.templates import CPU, render_cuda
from warploom.codegen.source import TileConfig
from warploom.dsl.types.dtypes import float16
from warploom.dsl.types.spec import HOOKS, AttentionSpec
from warploom.dsl.values.position import AVAILABLE
from warploom.dsl.variants.trace import trace
from warploom.errors import UnsupportedSpec
from warploom.scheduler.model.layout import c_structs
from warploom.serving.distributed.placed import Epilogue, Placed

MARK = 12345


def only(hook: str) -> wl.Variant:
    """A variant of this hook alone, which has MARK in it."""
    functors: dict[str, Any] = {
        "logits_mask": lambda self, at: at.kv_pos < MARK,
        "logits_transform": lambda self, logits, at: wl.tanh(logits) * float(MARK),
    }
    functor = functors.get(hook, lambda self, x, at: x + float(MARK))
    return type("Only", (wl.Variant,), {hook: functor})()


@pytest.mark.parametrize("hook", HOOKS)
def test_it_is_traced_alone_and_in_chains(hook: str) -> None:
    assert hook in AVAILABLE
    assert list(trace(only(hook)).hooks) == [hook]
    chained = trace(wl.Causal() & wl.SoftCap(30.0) & only(hook))
    assert {hook, "logits_mask", "logits_transform"} == set(chained.hooks)
    assert str(MARK) in repr(chained.hooks[hook])


@pytest.mark.parametrize("hook", HOOKS)
def test_ranks_compute_it_before_or_after_they_merge(hook: str) -> None:
    variant = only(hook)
    before = trace(Placed(variant, None, None)).hooks
    after = trace(Epilogue(variant, None, is_batched=False)).hooks
    assert [str(MARK) in repr(hooks.get(hook)) for hooks in (before, after)].count(True) == 1


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(
    "tile",
    [
        None, TileConfig(1, 64, 4), TileConfig(16, 64, 2), TileConfig(64, 64),
        TileConfig(128, 128, 8, 2, "hopper"),
    ],
    ids=["cpu", "one row", "16 rows", "portable", "hopper"],
)  # fmt: skip
def test_each_template_has_it_in_the_text(hook: str, tile: TileConfig | None) -> None:
    spec = AttentionSpec(trace(only(hook)), 128, 128, float16, wl.Ragged())
    if tile is not None and tile.rows == 1 and hook in ("key_transform", "value_transform"):
        with pytest.raises(UnsupportedSpec):
            render_cuda(spec, tile, c_structs())
        return
    if tile is None:
        text = CPU.render(spec, TileConfig(48, 64, 1, 1), c_structs()).text
    else:
        text = render_cuda(spec, tile, c_structs()).text
    flag = "".join(map(str.capitalize, hook.split("_")))
    assert f"kHas{flag} = true" in text
    assert str(MARK) in text
