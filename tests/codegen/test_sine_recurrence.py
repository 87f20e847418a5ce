"""Angles that grow evenly from key to key: where they are found, and how exact their sines stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import warploom as wl
from warploom.codegen.append import AppendSpec, key_value_hooks
from warploom.codegen.attention.hopper import Hopper
from warploom.codegen.attention.templates import render_cuda
from warploom.codegen.lowering.functors import variant_struct
from warploom.codegen.lowering.sine_recurrence import SineRecurrence, find_recurrence
from warploom.codegen.source import TileConfig
from warploom.dsl.library.rope_scaling import Llama3Scaling, YarnScaling
from warploom.dsl.types.dtypes import dtype
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.values.functions import cos, sin
from warploom.dsl.values.functions import sum as sum_lanes
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.fields import Scalar, Tensor
from warploom.dsl.variants.trace import trace
from warploom.dsl.variants.variant import Variant
from warploom.scheduler.model.layout import c_structs

RAGGED, ROPE = wl.Ragged(), wl.Rope()
HOPPER = TileConfig(128, 128, 8, 2, "hopper", 2)


def recurrence_of(variant: Variant) -> SineRecurrence | None:
    return find_recurrence(trace(variant).hooks["key_transform"])


def recurrence_by(
    angle: Callable[[Any, Position], Any], precise: bool = False
) -> SineRecurrence | None:
    class Rotating(wl.Variant):
        speed = Scalar("float32")
        shift = Scalar("int32", default=0)
        phases = Tensor("float32", ("kv_pos",))

        def key_transform(self, k: Value, at: Position) -> Value:
            return k * sin(angle(self, at), precise=precise)

    return recurrence_of(Rotating(speed=1.0))


@pytest.mark.parametrize(
    ("rope", "owner"),
    [
        (wl.Rope(), "lane % (head_dim / 2)"),
        (wl.Rope(dim=64), "lane % 32"),
        (wl.Rope(interleaved=True), "lane - lane % 2"),
        (wl.Rope(scaling=Llama3Scaling()), "lane % (head_dim / 2)"),
        (wl.Rope(interleaved=True, scaling=YarnScaling(4.0, 4096)), "lane - lane % 2"),
    ],
)
def test_rotary_angles_grow_evenly(rope: Variant, owner: str) -> None:
    found = recurrence_of(rope)
    assert found is not None and found.owner == owner
    assert set(found.calls.values()) == {"x.sine(lane, {})", "x.cosine(lane, {})"}
    assert found.rate is found.angle.args[1]  # the frequency


def test_positions_that_are_read_do_not_grow_evenly() -> None:
    assert recurrence_of(wl.Rope(positions="sequence")) is None


def test_growth_of_sums_and_products() -> None:
    assert recurrence_by(lambda v, at: 0.5 * (3 * at.kv_pos - at.lane) / v.speed + 1.0) is not None
    assert recurrence_by(lambda v, at: v.speed - at.kv_pos * v.speed) is not None
    assert recurrence_by(lambda v, at: (at.kv_pos - wl.maximum(v.shift, 0)) * v.speed) is not None
    assert recurrence_by(lambda v, at: (at.kv_len - at.kv_pos - (at.kv_pos + 1)) / 7.0) is not None


def test_what_does_not_grow_evenly_is_computed() -> None:
    for angle in (
        lambda v, at: at.kv_pos * at.kv_pos * 0.1,
        lambda v, at: 1.0 / (1.0 + at.kv_pos),
        lambda v, at: (at.kv_pos // 2) * v.speed,
        lambda v, at: v.phases[at.kv_pos],
        lambda v, at: v.speed * at.lane,
        lambda v, at: (at.kv_pos + v.shift) * v.speed,  # which may wrap from one key to the next
    ):
        assert recurrence_by(angle) is None
    assert recurrence_by(lambda v, at: 0.1 * at.kv_pos, precise=True) is None


def test_angles_of_the_vector_itself_are_computed() -> None:
    class OfVector(wl.Variant):
        def key_transform(self, k: Value, at: Position) -> Value:
            return k * cos(at.kv_pos * sum_lanes(k * k)) + sin(at.kv_pos * 0.1 + k)

    assert recurrence_of(OfVector()) is None


def text_of(
    tile: TileConfig,
    kv_format: KVFormat = RAGGED,
    variant: Variant = ROPE,
    dim: int = 128,
) -> str:
    spec = AttentionSpec(trace(variant), dim, dim, dtype("bfloat16"), kv_format)
    return render_cuda(spec, tile, c_structs(kv_format.composed)).text


def test_only_keys_and_values_have_recurrences() -> None:
    text = text_of(HOPPER)
    assert "kKeySineRecurrence = true" in text and "x.sine(lane, v0)" in text
    assert "query_angle_lane" not in text and "kQuerySineRecurrence" not in text


def test_only_kernels_that_use_recurrences_are_told_of_them() -> None:
    assert "SineRecurrence" not in text_of(TileConfig(128, 64, 4, 2))
    assert "SineRecurrence" not in text_of(HOPPER, wl.Composed(16))
    assert "SineRecurrence" not in text_of(HOPPER, wl.BlockSparse(block=(16, 16)))
    assert "SineRecurrence" not in text_of(HOPPER, dim=192)  # consumers transform wide heads
    assert "SineRecurrence" not in text_of(HOPPER, variant=wl.QKNorm() & wl.Rope())
    rope = AttentionSpec(trace(ROPE), 128, 128, dtype("bfloat16"), RAGGED)
    assert "SineRecurrence" not in Hopper("group").render(rope, HOPPER, c_structs()).text
    assert "SineRecurrence" not in Hopper("consumers").render(rope, HOPPER, c_structs()).text
    assert "SineRecurrence" not in variant_struct(trace(wl.Rope()), "cpp")
    bf16 = dtype("bfloat16")
    keys = AppendSpec(key_value_hooks(trace(wl.Rope())), 128, 128, bf16, bf16, 16)
    assert "SineRecurrence" not in keys.render("cuda").text


def fma(a: Any, b: Any, c: Any) -> Any:
    return np.float32(np.float64(a) * np.float64(b) + np.float64(c))


@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_sines_by_recurrence_are_as_exact_as_computed_ones(theta: float) -> None:
    """As in sine_recurrence.cuh: runs of 8 rows, 8 keys apart, at positions up to 131072."""
    frequency = np.float32(theta ** (-2.0 / 128 * np.arange(64)))
    position = np.random.default_rng(0).integers(0, 131072, (4000, 1))
    step = np.float64(frequency) * 8
    cos_step, sin_step = np.float32(np.cos(step)), np.float32(np.sin(step))
    angle = np.float64(np.float32(np.float32(position) * frequency))
    c, s = [np.float32(np.cos(angle))], [np.float32(np.sin(angle))]
    c.append(fma(c[0], cos_step, -np.float32(s[0] * sin_step)))
    s.append(fma(s[0], cos_step, np.float32(c[0] * sin_step)))
    for row in range(2, 8):
        for x in (c, s):
            x.append(fma(2 * cos_step, x[row - 1], -x[row - 2]))
    from_recurrence = from_angles = 0.0
    for row in range(8):
        exact = (position + 8 * row) * np.float64(frequency)
        computed = np.float32(np.float32(position + 8 * row) * frequency)
        drift = np.hypot(c[row] - np.cos(angle + row * step), s[row] - np.sin(angle + row * step))
        assert drift.max() < 3e-6  # a sine of the special function unit: about 5e-7; fp16: 5e-4
        from_recurrence += np.hypot(c[row] - np.cos(exact), s[row] - np.sin(exact)).mean()
        from_angles += np.hypot(
            np.cos(np.float64(computed)) - np.cos(exact),
            np.sin(np.float64(computed)) - np.sin(exact),
        ).mean()
    assert from_recurrence < 1.01 * from_angles  # the rounding of large angles
