"""Biases that grow evenly from key to key, and what kernels make of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.disassembly import disassembled

import warploom as wl
from warploom.codegen.attention.templates import TALL, cuda_launch, render_cuda, template_of
from warploom.codegen.build import build
from warploom.codegen.choice.tile_choice import choose_tile
from warploom.codegen.compilers.arch import ARCHS
from warploom.codegen.lowering.functors import variant_struct
from warploom.codegen.lowering.linear_bias import LinearBias, without_linear_bias
from warploom.codegen.lowering.logits_hooks import column_state_bytes, logits_hooks
from warploom.codegen.source import TileConfig
from warploom.dsl.types.dtypes import dtype
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.ir import Kind, Node, const, node, var
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.values.evaluate import evaluate
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.trace import trace
from warploom.dsl.variants.variant import Variant
from warploom.scheduler.model.layout import c_structs

Transform = Callable[[Any, Value, Position], Value]
LOGITS = node("logits", Kind.FLOAT)


def made(transform: Transform, mask: Any = None) -> Variant:
    fields: dict[str, Any] = {
        "rate": wl.Scalar("float32", default=0.3),
        "far": wl.Scalar("int32", default=5),
        "slope": wl.Tensor("float32", ("q_head",)),
        "bias": wl.Tensor("float32", ("kv_pos",)),
        "logits_transform": transform,
    }
    if mask is not None:
        fields["logits_mask"] = mask
    return type("Made", (Variant,), fields)()


def bias_of(variant: Variant) -> LinearBias | None:
    return logits_hooks(trace(variant), shifts_rows=True).bias


FORMS: dict[str, Transform] = {
    "alibi": lambda self, x, at: x + self.slope[at.q_head] * (at.kv_pos - at.q_pos),
    "the bias first": lambda self, x, at: (at.kv_pos - at.q_pos) * self.slope[at.q_head] + x,
    "decay": lambda self, x, at: x - self.rate * (at.q_pos - at.kv_pos),
    "negated": lambda self, x, at: x + -self.rate * -(at.kv_pos - at.q_pos),
    "a negated sum": lambda self, x, at: -(self.rate * (at.q_pos - at.kv_pos) - x),
    "the distance itself": lambda self, x, at: x + (at.kv_pos - at.q_pos),
    "its opposite": lambda self, x, at: x - (at.kv_pos - at.q_pos),
    "floats": lambda self, x, at: x + 0.5 * (wl.to_float(at.kv_pos) - wl.to_float(at.q_pos)),
    "divided": lambda self, x, at: x - (at.q_pos - at.kv_pos) / self.rate,
    "several factors": lambda self, x, at: x + 0.5 * ((at.kv_pos - at.q_pos) * self.rate),
    "from the end": lambda self, x, at: x + self.rate * (at.kv_pos + 1 - at.kv_len),
    "from an input": lambda self, x, at: x + self.rate * (at.kv_pos - wl.maximum(self.far, 0)),
    "no origin": lambda self, x, at: x + self.rate * at.kv_pos,
    "of query rows": lambda self, x, at: x + self.rate * (at.kv_pos - at.q_idx),
    "scaled together": lambda self, x, at: 2.0 * (x + self.rate * (at.kv_pos - at.q_pos)),
    "after a cap": lambda self, x, at: 4.0 * wl.tanh(x / 4.0) + self.rate * (at.kv_pos - at.q_pos),
    "beside a bias": lambda self, x, at: (
        x + self.bias[at.kv_pos] - self.rate * (at.q_pos - at.kv_pos)
    ),
    "a choice of slopes": lambda self, x, at: (
        x + wl.where(at.q_head < 2, 0.1, self.rate) * (at.kv_pos - at.q_pos)
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_that_are_linear(name: str) -> None:
    hooks = logits_hooks(trace(made(FORMS[name])), shifts_rows=True)
    assert hooks.bias is not None
    column = 4 if name == "beside a bias" else 0
    assert column_state_bytes(trace(made(FORMS[name])), shifts_rows=True) == column
    is_all = name not in ("after a cap", "beside a bias")
    assert ("logits_transform" in hooks.roots) != is_all


OTHERS: dict[str, Transform] = {
    "of a size": lambda self, x, at: x - self.rate * abs(at.kv_pos - at.q_pos),
    "before a cap": lambda self, x, at: wl.tanh(x + self.rate * (at.kv_pos - at.q_pos)),
    "clamped": lambda self, x, at: x + self.rate * wl.minimum(at.kv_pos - at.q_pos, 9),
    "squared": lambda self, x, at: x + self.rate * (at.kv_pos - at.q_pos) ** 2,
    "a slope of columns": lambda self, x, at: x + self.bias[at.kv_pos] * (at.kv_pos - at.q_pos),
    "a slope of logits": lambda self, x, at: x + x * (at.kv_pos - at.q_pos),
    "steps": lambda self, x, at: x + self.rate * ((at.kv_pos - at.q_pos) // 4),
    "for some": lambda self, x, at: wl.where(at.kv_pos < 4, x, x + self.rate * at.kv_pos),
    "no logits": lambda self, x, at: self.rate * (at.kv_pos - at.q_pos),
    "no bias": lambda self, x, at: x + self.slope[at.q_head],
    "a float between": lambda self, x, at: x + self.rate * ((at.kv_pos - at.q_pos) + 0.5),
    "a sum that may overflow": lambda self, x, at: (
        x + (wl.to_float(at.kv_pos) + wl.to_float(self.far))
    ),
    "a sum that may overflow, and a position": lambda self, x, at: (
        x + ((at.kv_pos - self.far) * 1.0 - at.q_pos)
    ),
    "a distance that may wrap": lambda self, x, at: x + self.rate * (at.kv_pos - self.far),
    "doubled": lambda self, x, at: x + self.rate * (2 * at.kv_pos - at.q_pos),
}


@pytest.mark.parametrize("name", OTHERS)
def test_forms_that_stay_as_they_are(name: str) -> None:
    variant = trace(made(OTHERS[name]))
    assert bias_of(made(OTHERS[name])) is None
    assert variant_struct(variant, "cuda", shifts_rows=True) == variant_struct(variant, "cuda")


def f(op: str, *args: Node) -> Node:
    return node(op, Kind.FLOAT, args)


def floats_of(position: str) -> Node:
    return f("to_float", var(position))


DISTANCE = node("sub", Kind.INT, (var("kv_pos"), var("q_pos")))
LEAVES = st.sampled_from(
    [
        LOGITS,
        LOGITS,
        const(0.5),
        const(-1.0),
        node("scalar", Kind.FLOAT, attr="rate"),
        floats_of("q_head"),
        floats_of("q_pos"),
        floats_of("kv_pos"),
        f("to_float", DISTANCE),
        f("to_float", node("neg", Kind.INT, (DISTANCE,))),
        f("to_float", node("add", Kind.INT, (const(3), DISTANCE))),
    ]
)


def grown(parts: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    return st.one_of(
        st.builds(f, st.sampled_from(["add", "sub", "mul"]), parts, parts),
        st.builds(f, st.sampled_from(["neg", "tanh"]), parts),
    )


@settings(max_examples=300, deadline=None)
@given(root=st.recursive(LEAVES, grown, max_leaves=8))
def test_the_terms_are_the_transform(root: Node) -> None:
    rest, bias = without_linear_bias(root)
    if bias is None:
        assert rest is root
        return
    positions = {
        "q_pos": np.arange(5)[:, None],
        "kv_pos": np.arange(7)[None, :],
        "q_head": np.full((5, 1), 2),
    }
    logits = np.random.default_rng(3).standard_normal((5, 7))
    wanted, left, value, slope = evaluate(
        (root, rest, bias.node(), bias.slope), positions, {"rate": 0.7}, {}, logits=logits
    )
    wanted, left, value, slope = (np.broadcast_to(x, (5, 7)) for x in (wanted, left, value, slope))
    np.testing.assert_allclose(left + value, wanted, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(np.diff(value), slope[:, 1:], rtol=1e-9, atol=1e-9)


def test_shared_parts_and_long_sums_are_looked_at_once() -> None:
    doubled, summed = floats_of("kv_pos"), f("add", LOGITS, floats_of("kv_pos"))
    for _ in range(40):  # 2 ** 40 paths
        doubled = f("add", doubled, f("neg", doubled))
    for i in range(3000):
        summed = f("add", summed, f("mul", floats_of("q_pos"), const(float(i))))
    assert without_linear_bias(f("add", LOGITS, doubled))[1] is None
    assert without_linear_bias(summed)[1] is not None


def test_the_text_of_a_bias() -> None:
    text = variant_struct(trace(wl.Alibi("input")), "cuda", shifts_rows=True)
    assert "kHasLinearBias = true" in text
    assert "kHasLogitsTransform" not in text and "float logits(" not in text
    assert "struct ColState" not in text
    assert "return rs.r0;" in text
    assert "return rs.r0 * float(kv_pos - row.q_pos);" in text


def test_a_mask_keeps_its_columns_to_itself() -> None:
    variant = made(
        lambda self, x, at: x + self.rate * (at.kv_pos - at.kv_len),
        lambda self, at: (at.kv_pos - at.kv_len > -9) | (at.q_pos == 3),
    )
    text = variant_struct(trace(variant), "cuda", shifts_rows=True)
    assert "struct ColState" in text
    assert "cs.c" not in text.split("float linear_bias(")[1].split("}")[0]


def spec(variant: Variant, kv_format: KVFormat, head_dim: int = 128) -> AttentionSpec:
    return AttentionSpec(trace(variant), head_dim, head_dim, dtype("float16"), kv_format)


@pytest.mark.parametrize(
    ("kv_format", "rows", "shifts"),
    [
        (wl.Ragged(), 128, True),
        (wl.Paged(1), 16, True),
        (wl.Dense(), 64, True),
        (wl.Ragged(), 1, False),
        (wl.Composed(16), 16, False),
        (wl.BlockSparse(block=(16, 8)), 64, False),
    ],
)
def test_kernels_whose_columns_follow_each_other_have_it(
    kv_format: KVFormat, rows: int, shifts: bool
) -> None:
    of, tile = spec(wl.Alibi(), kv_format), TileConfig(rows, 64, 4, 2)
    assert template_of(tile).shifts_rows(of) == shifts
    text = render_cuda(of, tile, c_structs(kv_format.composed)).text
    assert ("kHasLinearBias = true" in text) == shifts


def test_without_a_softmax_nothing_can_be_shifted() -> None:
    class Plain(wl.Alibi):
        softmax = False

    assert not TALL.shifts_rows(spec(Plain(), wl.Ragged()))


@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
def test_an_element_gets_one_multiply_add_with_a_constant() -> None:
    arch = ARCHS["sm_90a"]
    of = spec(wl.Causal() & wl.Alibi(), wl.Ragged())
    tile = choose_tile(of, arch, 1000).tile
    assert (tile.template, tile.rows, tile.keys) == ("hopper", 128, 128)
    artifact = build(render_cuda(of, tile, c_structs()), arch)
    assert artifact.resources is not None and artifact.resources.local_bytes == 0
    sass = disassembled(artifact.path)
    constants = re.findall(r"FFMA R\d+, R\d+(?:\.reuse)?, (\d+), R", sass)
    # Of the first tile and of the others, in two rows; a thread's first column lacks nothing.
    wanted = Counter(str(8 * block + j) for block in range(16) for j in (0, 1) if block or j)
    assert Counter(constants) == Counter({j: 4 * count for j, count in wanted.items()})


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_hopper_stages_no_columns_for_it(head_dim: int) -> None:
    of, arch = spec(wl.Causal() & wl.Alibi(), wl.Paged(16), head_dim), ARCHS["sm_90a"]
    causal = spec(wl.Causal(), wl.Paged(16), head_dim)
    tile = choose_tile(of, arch, 1000).tile
    assert tile.template == "hopper"
    assert cuda_launch(of, tile, arch) == cuda_launch(causal, tile, arch)
