"""Registers that the groups of a Hopper kernel exchange: all shares add up to what there is."""

from __future__ import annotations

from itertools import product

import pytest

import warploom as wl
from warploom.codegen.attention.hopper import Hopper
from warploom.codegen.attention.hopper_registers import SHARES, Registers, split
from warploom.codegen.attention.templates import HOPPER, render_cuda
from warploom.codegen.source import TileConfig
from warploom.dsl.types.dtypes import bfloat16
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace
from warploom.errors import UnsupportedSpec
from warploom.scheduler.model.layout import c_structs


def test_no_split_of_registers_gives_more_than_was_launched_with() -> None:
    for consumers, hardest, column_states in product((1, 2, 3), SHARES, (False, True)):
        found = split(consumers, hardest, column_states)
        groups = consumers + 1 + hardest.startswith("transforms")
        if consumers == 3 or groups == 2:
            continue  # three groups leave none to transform, two keep what they have
        launched = 168 if groups == 3 else 128
        given = found.producer + found.transformer + consumers * found.consumer
        assert given <= groups * launched, hardest
        assert found.consumer > launched > found.producer  # one side gives, the other takes
        assert all(count % 8 == 0 for count in (found.producer, found.transformer, found.consumer))
        assert (found.transformer > 0) == (groups == consumers + 2) and found.consumer <= 240
    assert split(1, "copies", False) == Registers()
    assert split(3, "copies", True) == Registers(80, 0, 144)


@pytest.mark.parametrize(
    ("variant", "dim", "kv_format", "registers"),
    [
        (wl.Variant(), 128, wl.Ragged(), (72, 0, 216)),
        (wl.DocumentMask(), 128, wl.Ragged(), (88, 0, 208)),
        (wl.Variant(), 256, wl.Ragged(), (56, 0, 224)),
        (wl.Variant(), 160, wl.Paged(1), (88, 0, 208)),
        (wl.DocumentMask(), 160, wl.Paged(1), (88, 0, 208)),
        (wl.Rope(), 128, wl.Ragged(), (56, 72, 192)),
        (wl.Rope(), 64, wl.Ragged(), (56, 104, 176)),
        (wl.Rope(), 72, wl.Ragged(), (64, 96, 176)),
        (wl.Rope(), 64, wl.Paged(1), (64, 96, 176)),
    ],
)
def test_kernels_have_the_recorded_split(
    variant: wl.Variant, dim: int, kv_format: KVFormat, registers: tuple[int, ...]
) -> None:
    of = AttentionSpec(trace(variant), dim, dim, bfloat16, kv_format)
    tile = TileConfig(128, 64, 8, 2, "hopper", 1)
    assert HOPPER.registers(of, tile) == Registers(*registers)
    text = render_cuda(of, tile, c_structs()).text
    for role, count in zip(("Producer", "Transformer", "Consumer"), registers, strict=True):
        assert f"k{role}Registers = {count};" in text


def test_transforms_may_be_left_to_those_that_compute() -> None:
    of = AttentionSpec(trace(wl.QKNorm()), 128, 128, bfloat16, wl.Ragged())
    tile = TileConfig(128, 128, 8, 2, "hopper", 1)
    consumers, group = Hopper("consumers"), Hopper("group")
    assert consumers.threads(of, tile) == group.threads(of, tile) - 128
    assert consumers.registers(of, tile).transformer == 0
    assert "kTransformer = false;" in consumers.render(of, tile, c_structs()).text


def test_a_group_that_no_registers_are_left_for_is_refused() -> None:
    of = AttentionSpec(trace(wl.Rope()), 192, 192, bfloat16, wl.Ragged())
    tile = TileConfig(128, 64, 8, 2, "hopper", 1)
    HOPPER.check(of, tile)
    with pytest.raises(UnsupportedSpec, match="no group of its own"):
        Hopper("group").check(of, tile)
