"""Tables of shared memory: where regions begin, and that no two of a kernel's lie in each other."""

from __future__ import annotations

import pytest

import warploom as wl
from warploom.codegen.attention.shared_memory import Overlay, Region, SharedMemory
from warploom.codegen.attention.templates import template_of
from warploom.codegen.compilers.arch import arch_named
from warploom.codegen.source import TileConfig
from warploom.dsl.types.dtypes import bfloat16
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace
from warploom.errors import UnsupportedSpec


def test_regions_lie_behind_each_other_at_what_they_are_aligned_to() -> None:
    memory = SharedMemory(Region("a", 5), Region("b", 20, 4), Region("c_d", 1, 64))
    assert memory.places == {"a": 0, "b": 8, "c_d": 64} and memory.bytes == 65
    assert "kB = 8, kBBytes = 20;" in memory.struct() and "kCD = 64, kCDBytes" in memory.struct()
    assert "kBytes = 65;" in memory.struct()


@pytest.mark.parametrize(("walked", "end"), [(48, 48), (16, 40)])
def test_what_takes_the_place_of_others_begins_where_they_do(walked: int, end: int) -> None:
    later = [Region("slabs", 32), Region("sums", 8)]
    memory = SharedMemory(
        Region("head", 16), Overlay([Region("keys", walked)], later), Region("items", 4, 8)
    )
    assert memory.places["keys"] == memory.places["slabs"] == 16
    assert memory.places["sums"] == 48 and memory.places["items"] == 16 + end


@pytest.mark.parametrize("tile", [TileConfig(16, 64, 2, 2), TileConfig(64, 64, 4, 2)])
def test_only_tall_tiles_write_rows_over_keys(tile: TileConfig) -> None:
    of = AttentionSpec(trace(wl.Causal()), 128, 128, bfloat16, wl.Paged(16))
    places = template_of(tile).memory(of, tile).places
    assert (places["slabs"] > places["addresses"] > 0) == (tile.rows == 16)
    assert places["items"] >= max(places.values())


def test_a_tile_that_no_multiprocessor_holds_is_refused_before_it_is_compiled() -> None:
    of = AttentionSpec(trace(wl.Causal()), 128, 128, bfloat16, wl.Paged(16))
    tile = TileConfig(64, 64, 4, 2)
    kernel = template_of(tile).kernel(of, tile)
    assert kernel.launch(arch_named("sm_86")).shared_bytes <= arch_named("sm_86").shared_per_cta
    larger = TileConfig(64, 128, 4, 3)
    kernel = template_of(larger).kernel(of, larger)
    assert kernel.launch(arch_named("sm_90a")).ctas_per_sm == 1
    with pytest.raises(UnsupportedSpec, match=r"64x128, .* on sm_86 .* 216.9 KiB .* of 99\. Give"):
        kernel.launch(arch_named("sm_86"))
