"""Tensors of any framework, seen as torch's without a copy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from warploom.errors import ArgumentError
from warploom.runtime.tensors.tensors import as_torch, host_int32


class Producer:
    """An array of another framework: it offers DLPack and nothing else."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack__(self, **options: object) -> object:
        return self._array.__dlpack__(**options)  # type: ignore[arg-type]

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._array.__dlpack_device__()
        return device


def test_torch_tensors_are_themselves() -> None:
    tensor = torch.zeros(3)
    assert as_torch(tensor, "q") is tensor


@pytest.mark.parametrize("wrap", [np.asarray, Producer])
def test_producers_share_their_memory(wrap: type[Producer]) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::2]
    tensor = as_torch(wrap(array), "q")
    array[1, 1] = 7.0
    assert tensor.tolist() == array.tolist()
    assert tensor.stride() == (3, 2)


def test_read_only_arrays_are_copied() -> None:
    array = np.arange(3, dtype=np.float32)
    array.flags.writeable = False
    assert as_torch(array, "q").tolist() == [0, 1, 2]


def test_what_exports_no_tensor_is_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match="kv: a dict is neither"):
        as_torch({}, "kv")
    with pytest.raises(ArgumentError, match="k: an int is neither"):
        as_torch(1, "k")
    with pytest.raises(ArgumentError, match="q: its DLPack export failed"):
        as_torch(np.array(["a"]), "q")


def test_indices_come_to_the_host_as_int32() -> None:
    for value in ([0, 3], np.array([0, 3], np.uint8), Producer(np.array([0, 3]))):
        found = host_int32(value, "kv_indptr")
        assert found.dtype == np.int32
        assert found.tolist() == [0, 3]
    assert host_int32([], "kv_indices").dtype == np.int32


def test_arrays_that_run_backwards_are_copied_or_refused() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    for turned in (array[::-1], array[:, ::-1]):
        assert as_torch(turned, "q").tolist() == turned.tolist()
        with pytest.raises(ArgumentError, match="out: runs backwards"):
            as_torch(turned, "out", shared=True)


def test_what_has_no_values_is_refused() -> None:
    with pytest.raises(ArgumentError, match="kv_lens: is a meta tensor"):
        host_int32(torch.zeros(2, dtype=torch.int32, device="meta"), "kv_lens")


def test_arrays_with_bytes_in_the_other_order_are_told_how_to_turn_them() -> None:
    array = np.arange(3, dtype=np.float32)
    other = array.astype(array.dtype.newbyteorder())
    with pytest.raises(ArgumentError, match=r"q: has bytes .*newbyteorder\('='\)\)"):
        as_torch(other, "q")
    assert as_torch(other.astype(other.dtype.newbyteorder("=")), "q").tolist() == [0, 1, 2]
    assert host_int32(np.arange(3, dtype=">i8"), "kv_indptr").tolist() == [0, 1, 2]


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_an_index_beyond_int32_is_shown_with_its_place(value: int) -> None:
    held = r"which holds -2147483648 to 2147483647"
    with pytest.raises(ArgumentError, match=rf"qo_indptr: its value {value} at \[1\] .* {held}"):
        host_int32([0, value, 2 * value], "qo_indptr")
