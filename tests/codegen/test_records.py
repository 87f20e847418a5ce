"""The function that stores recorded values: its text, and that kernels which call it compile."""

from __future__ import annotations

import re

import pytest
from support.recorded_variants import ROWS, VARIANTS, Dump, Rows, Terms

import warploom as wl
from warploom.codegen.abi import param_fields
from warploom.codegen.attention.templates import render_cpu, render_cuda
from warploom.codegen.compilers.arch import arch_named
from warploom.codegen.compilers.nvrtc import run_nvrtc
from warploom.codegen.lowering.functors import variant_struct
from warploom.codegen.lowering.specialize import only_hooks
from warploom.codegen.planner_source import PlannerSpec
from warploom.codegen.source import TileConfig
from warploom.dsl.types.dtypes import dtype
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace
from warploom.scheduler.model.layout import c_planning, c_structs


def spec(variant: wl.Variant, kv_format: KVFormat | None = None) -> AttentionSpec:
    return AttentionSpec(trace(variant), 64, 64, dtype("bfloat16"), kv_format or wl.Ragged())


def without_comments(text: str) -> str:
    return "\n".join(line.partition("  //@")[0] for line in text.splitlines())


@pytest.mark.parametrize("language", ["cuda", "cpp"])
def test_a_record_is_a_function_beside_the_others(language: str) -> None:
    text = variant_struct(trace(Dump() & wl.SoftCap(5.0)), language)  # type: ignore[arg-type]
    before, _, record = without_comments(text).partition("  static constexpr bool kRecords")
    plain = variant_struct(trace(wl.SoftCap(5.0)), language)  # type: ignore[arg-type]
    assert before.strip() == without_comments(plain).removesuffix("};").strip()
    assert "is_inside(v0, p.x_seen_n2) & is_inside(kv_pos, p.x_seen_n3)" in record
    assert "row.q_head * p.x_seen_s1" in record
    assert ", logits);" in record  # as it is, in both languages


def test_records_read_what_they_need_and_nothing_kept() -> None:
    text = variant_struct(trace(Terms() & wl.Alibi()), "cuda", shifts_rows=True)
    record = text[text.index("void record(") :]
    assert "load(p.x_weight" in record
    assert record.count("write_number(") == 2
    assert not re.search(r"\b(ts|rs|cs)\.", record)


def test_parameters_say_which_tensors_are_written() -> None:
    types = {field.name: field.c_type for field in param_fields(spec(Terms() & Rows()))}
    assert types["x_before"] == "float*"
    assert types["x_bias"] == "warploom::bfloat16_t*"
    assert types["x_rows"] == "warploom::half_t*"
    assert types["x_weight"] == "const float*"


def test_variants_without_outputs_have_no_word_of_it() -> None:
    tile = TileConfig(16, 64, 2, 2)
    for render in (render_cuda, render_cpu):
        text = render(spec(wl.Causal() & wl.Alibi()), tile, c_structs()).text
        assert "ecord(" not in text
        assert "kRecords" not in text


def test_other_kernels_record_nothing() -> None:
    turned = trace(wl.Rope() & Dump() & wl.Causal())
    kept = only_hooks(turned, ("key_transform",))
    assert kept.records == ()
    assert "seen" not in kept.input_names
    assert "seen" not in PlannerSpec(turned).render("cpp", c_planning()).text


@pytest.mark.some(3)
@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize(
    ("name", "kv_format", "tile", "arch"),
    [
        ("alone", wl.Paged(16), TileConfig(1, 64, 4, 1), "sm_80"),
        ("before a bias", wl.Paged(16), TileConfig(16, 64, 4, 3), "sm_80"),
        ("two parts", wl.Composed(16), TileConfig(16, 64, 4, 3), "sm_90a"),
        ("behind a bias", wl.Ragged(), TileConfig(128, 64, 4, 2), "sm_80"),
        ("documents", wl.BlockSparse(block=(64, 16)), TileConfig(64, 64, 4, 2), "sm_90a"),
        ("before a cap", wl.Paged(16), TileConfig(128, 128, 8, 2, "hopper", 2), "sm_90a"),
        ("two parts", wl.Ragged(), TileConfig(128, 64, 8, 2, "hopper", 1), "sm_90a"),
        ("no softmax", wl.Paged(1), TileConfig(64, 128, 4, 2, "hopper", 2), "sm_90a"),
    ],
)
def test_every_template_compiles(
    name: str, kv_format: KVFormat, tile: TileConfig, arch: str
) -> None:
    structs = c_structs(composed=kv_format.composed)
    source = render_cuda(spec(VARIANTS[name], kv_format), tile, structs)
    run_nvrtc(source.text, arch_named(arch), source.name)


@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
def test_16_bits_compile() -> None:
    source = render_cuda(spec(ROWS & Terms()), TileConfig(64, 64, 4, 2), c_structs())
    run_nvrtc(source.text, arch_named("sm_80"), source.name)
