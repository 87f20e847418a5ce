"""Kernels of one query head per key/value head: the head is the same for a whole tile."""

from __future__ import annotations

import torch

import warploom as wl
from warploom.codegen.attention.templates import render_cuda
from warploom.codegen.choice.tile_choice import choose_tile
from warploom.codegen.compilers.arch import ARCHS
from warploom.codegen.lowering.functors import variant_struct
from warploom.codegen.lowering.logits_hooks import column_state_bytes
from warploom.codegen.lowering.specialize import for_group_size
from warploom.dsl.types.dtypes import float16
from warploom.dsl.types.formats import Ragged
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.trace import trace
from warploom.scheduler.model.layout import c_structs


class HeadMask(wl.Variant):
    kept = wl.Tensor("int32", ("q_head", "kv_pos"))

    def logits_mask(self, at: Position) -> Value:
        return self.kept[at.q_head, at.kv_pos] != 0


def spec(variant: wl.Variant) -> AttentionSpec:
    return AttentionSpec(trace(variant), 128, 128, float16, Ragged())


def test_a_tensor_of_heads_and_keys_is_read_once_for_a_column() -> None:
    grouped = spec(HeadMask(kept=torch.ones(4, 8, dtype=torch.int32)))
    assert column_state_bytes(grouped.variant) == 0  # each row of a tile has its own head
    alone = for_group_size(grouped, 1)
    assert column_state_bytes(alone.variant) == 4  # a truth, kept as a number
    text = variant_struct(alone.variant, "cuda")
    assert "struct ColState { int c0; };" in text
    assert "kHasColState = true" in text
    assert "tile.kv_head" in text.split("TileClass classify")[0]
    assert "row.q_head" not in text


def test_groups_of_heads_keep_their_spec() -> None:
    grouped = spec(wl.Causal() & wl.Alibi())
    assert for_group_size(grouped, 4) is grouped


def test_variants_that_read_no_head_stay_the_same() -> None:
    causal = spec(wl.Causal() & wl.SoftCap(30.0))
    assert for_group_size(causal, 1) == causal


def test_states_of_columns_are_padded_as_in_c() -> None:
    class Mixed(wl.Variant):
        bias = wl.Tensor("float32", ("kv_pos",))
        kept = wl.Tensor("int32", ("kv_pos",))

        def logits_transform(self, logits: Value, at: Position) -> Value:
            return logits + self.bias[at.kv_pos]

        def logits_mask(self, at: Position) -> Value:
            return (self.kept[at.kv_pos] != 0) & (at.kv_pos <= at.q_pos)

    mixed = Mixed(bias=torch.zeros(8), kept=torch.ones(8, dtype=torch.int32))
    assert column_state_bytes(spec(mixed).variant) == 8  # a float and a truth
    assert column_state_bytes(spec(mixed).variant, bytes_of_columns=True) == 8


def test_wide_heads_keep_a_truth_of_a_column_in_a_byte() -> None:
    mask = HeadMask(kept=torch.ones(4, 8, dtype=torch.int32))
    wide = for_group_size(AttentionSpec(trace(wl.Causal() & mask), 256, 256, float16, Ragged()), 1)
    assert column_state_bytes(wide.variant, bytes_of_columns=True) == 1
    tile = choose_tile(wide, ARCHS["sm_90a"], 8192).tile
    assert tile.template == "hopper"  # three tiles of numbers would not fit beside its keys
    text = render_cuda(wide, tile, c_structs()).text
    assert "struct ColState { bool c0; };" in text
    assert "struct ColState { int c0; };" in variant_struct(wide.variant, "cuda")
