"""The ways around torch's dispatcher do what the public ways do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from warploom.runtime.tensors import shortcuts

A = torch.zeros(3, 4, 8)
B = torch.zeros(5, 2, 8, dtype=torch.float16)
COMPARED: list[tuple[Any, ...]] = [
    (A, B),
    (A.clone(), B + 1),
    (A, B.float()),
    (A[:2], B),
    (A.transpose(0, 1).contiguous().transpose(0, 1), B),
    (A, B.to("meta")),
    (torch.nn.Parameter(A, requires_grad=False), B),
    (A.clone().requires_grad_(), B),
    (A, None),
    (A, [1.0]),
]


@pytest.mark.parametrize("like", [shortcuts.like, shortcuts.slow_like])
@pytest.mark.parametrize("tensors", COMPARED, ids=range(len(COMPARED)))
def test_tensors_are_alike_in_all_but_addresses_and_values(like: Any, tensors: Any) -> None:
    same = like(A, B)
    assert same(*tensors) is any(tensors is x for x in COMPARED[:2])
    if all(isinstance(x, torch.Tensor) for x in tensors):
        assert like(*tensors)(*tensors)


@pytest.mark.parametrize("like", [shortcuts.like, shortcuts.slow_like])
def test_tensors_of_any_size_are_alike_in_all_else(like: Any) -> None:
    same = like(A[0, 0], B[0, 0], any_size=True)
    assert same(A[0, 0, :3], B[0, 0, :0])
    assert not same(A[0, 0, ::2], B[0, 0])
    assert not same(A[0], B[0, 0])
    assert not same(A[0, 0], A[0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_tensors_have_shape_strides_and_dtype(dtype: torch.dtype) -> None:
    made = shortcuts.allocator(torch.device("cpu"))((3, 0, 8), (8, 8, 1), dtype)
    assert (made.shape, made.stride(), made.dtype) == ((3, 0, 8), (8, 8, 1), dtype)


def test_what_torch_lacks_is_done_by_public_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortcuts, "_guards", None)
    same = shortcuts.like(A, B)
    assert same(A, B)
    assert not same(A, B[:1])
    made = shortcuts.allocator(torch.device("cpu"))((2, 8), (8, 1), torch.float16)
    assert (made.shape, made.stride(), made.dtype) == ((2, 8), (8, 1), torch.float16)
