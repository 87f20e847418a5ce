"""Which tensor maps kernels get, in which order, and for which addresses."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.emulator import Driver

import warploom as wl
from warploom.codegen.abi import TENSOR_MAP_BYTES, TENSOR_MAPS
from warploom.codegen.source import TileConfig
from warploom.runtime.formats import format_of
from warploom.runtime.launching import tensor_map

ONE = TileConfig(64, 64, 4, 2, "hopper", 2)
ROLES = TileConfig(64, 64, 4, 2, "hopper", 2, decode=TileConfig(8, 96, 3, 2))


class Told(Driver):
    """Keeps of which address each map is, its boxes, and how much L2 fetches for it at once."""

    CUtensorMapL2promotion = SimpleNamespace(
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B=256, CU_TENSOR_MAP_L2_PROMOTION_L2_128B=128
    )

    def __init__(self) -> None:
        self.made: list[tuple[int, int, int, int]] = []

    def cuTensorMapEncodeTiled(self, *given: Any, **named: Any) -> Any:
        self.made.append((given[2], given[5][0], given[0], given[-2]))
        return super().cuTensorMapEncodeTiled(*given, **named)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("tile", [ONE, ROLES], ids=["one tile", "two roles"])
def test_decodes_have_maps_of_their_own_behind_those_of_prefills(
    monkeypatch: pytest.MonkeyPatch, tile: TileConfig, dtype: torch.dtype
) -> None:
    driver = Told()
    monkeypatch.setattr(tensor_map, "load_driver", lambda: driver)
    kv_format = wl.Paged(16)
    geometry: Any = SimpleNamespace(
        format=format_of(kv_format), kv_format=kv_format, head_dim_qk=128, head_dim_v=128,
        kv_dtype=dtype,
    )  # fmt: skip
    found = tensor_map.TensorMaps.of(geometry, tile)
    assert found is not None
    k, v = torch.zeros(2, 3, 16, 2, 128, dtype=dtype)
    maps = found.of_layout(k, v)
    names = [re.findall(r"TensorMap (\w+);", line)[0] for line in TENSOR_MAPS]
    assert names == ["k_map", "v_map", "k_once_map", "v_once_map"]
    at = k.data_ptr(), v.data_ptr()
    lanes, bytes_of_lane = 128 // dtype.itemsize, dtype.itemsize
    expected = [(address, lanes, bytes_of_lane, n) for n in (256, 128) for address in at]
    expected = expected[: 2 if tile.decode is None else 4]
    assert driver.made == expected
    made, others = maps(*at), maps(at[1], at[0])
    assert len(made) == len(expected) * TENSOR_MAP_BYTES and others != made
    assert len(driver.made) == 2 * len(expected)
    assert maps(*at) == made and maps(at[1], at[0]) == others  # each was made once
    assert len(driver.made) == 2 * len(expected)
