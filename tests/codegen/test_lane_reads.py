"""Reads of vector hooks that come in whole vectors."""

from __future__ import annotations

from warploom.codegen.lowering.functors import variant_struct
from warploom.codegen.lowering.lane_reads import lane_reads
from warploom.dsl.library.rope import Rope
from warploom.dsl.values.functions import rotate_half, rotate_pairs
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.trace import trace
from warploom.dsl.variants.variant import Variant


def reads(variant: Variant) -> tuple[int, set[str]]:
    halves, text = lane_reads(trace(variant).hooks["key_transform"])
    return halves, set(text.values())


def test_partners_of_whole_and_partial_rotations() -> None:
    assert reads(Rope()) == (-1, {"x.own(lane)", "x.half(lane, head_dim, head_dim)"})
    assert reads(Rope(dim=64)) == (64, {"x.own(lane)", "x.half(lane, 64, head_dim)"})
    assert reads(Rope(interleaved=True)) == (0, {"x.own(lane)", "x.pair(lane)"})


def test_only_one_width_is_paired_in_vectors() -> None:
    class Twice(Variant):
        def key_transform(self, k: Value, at: Position) -> Value:
            return rotate_half(k, 64) + rotate_half(k, 32) + rotate_pairs(k)

    halves, text = reads(Twice())
    assert halves in (32, 64)
    assert text == {"x.own(lane)", "x.pair(lane)", f"x.half(lane, {halves}, head_dim)"}


def test_the_cpu_reads_lane_by_lane() -> None:
    text = variant_struct(trace(Rope()), "cpp")
    assert "x.own" not in text
    assert "Halves" not in text
    assert "kKeyHalves = -1" in variant_struct(trace(Rope()), "cuda")
