"""Planners: rendered text is shared where masks are, and compiles for every architecture."""

from __future__ import annotations

from itertools import cycle

import pytest

import warploom as wl
from warploom.codegen.compilers.arch import ARCHS
from warploom.codegen.compilers.nvrtc import run_nvrtc
from warploom.codegen.planner_source import PlannerSpec
from warploom.dsl.variants.trace import trace
from warploom.scheduler.model.layout import c_planning


def test_variants_without_a_mask_share_one_planner() -> None:
    plain, capped = (
        PlannerSpec(trace(variant)).render("cpp", c_planning())
        for variant in (wl.Variant(), wl.SoftCap(20.0) & wl.Alibi())
    )
    assert plain.text == capped.text
    masked = PlannerSpec(trace(wl.Causal())).render("cpp", c_planning())
    assert masked.code != plain.code


def test_only_inputs_of_the_mask_are_parameters() -> None:
    names = {field.name for field in PlannerSpec(trace(wl.PrefixLM() & wl.Alibi())).fields}
    assert {name for name in names if name.startswith("x_")} == {
        "x_prefix_len",
        "x_prefix_len_s0",
        "x_prefix_len_n0",
    }


MASKS = (wl.Variant(), wl.SlidingWindow(500), wl.PrefixLM())


@pytest.mark.some(6)
@pytest.mark.nvrtc
@pytest.mark.parametrize("has_roles", [False, True], ids=["one role", "two roles"])
@pytest.mark.parametrize(("arch", "variant"), list(zip(ARCHS, cycle(MASKS))))
def test_planners_compile_without_spills(arch: str, variant: wl.Variant, has_roles: bool) -> None:
    source = PlannerSpec(trace(variant), has_roles).render("cuda", c_planning(has_roles))
    assert run_nvrtc(source.text, ARCHS[arch], source.name).spill_bytes == 0
