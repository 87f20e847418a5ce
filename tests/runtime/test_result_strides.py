"""Results lie in memory as queries do, and compilers are told so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import warploom as wl
from warploom import errors

HEADS, DIM = 4, 32


def dense() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 5, HEADS, DIM), *torch.randn(2, 2, 40, 2, DIM)  # type: ignore[return-value]


def last_apart(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((x, torch.full_like(x, float("nan"))), -1)[..., 0]


def column_major(x: torch.Tensor) -> torch.Tensor:
    return x.mT.contiguous().mT


def in_heads(x: torch.Tensor) -> torch.Tensor:
    """[batch, rows, heads, dim] in memory as [batch, heads, rows, dim]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def fused(x: torch.Tensor) -> torch.Tensor:
    """A part of wider rows, as of a projection of q, k and v at once."""
    return torch.cat((x, x), 2)[:, :, : x.shape[2]]


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("dim_v", [DIM, DIM // 2])
@pytest.mark.parametrize("move", [lambda x: x, in_heads, fused, last_apart, column_major])
@pytest.mark.filterwarnings("ignore::warploom.notices.CopyWarning")
def test_results_lie_as_queries_do(move: Callable[..., Any], dim_v: int, backend: Any) -> None:
    """As `torch.empty_like(q)`; calls with queries of other strides in between change nothing."""
    q, k, v = dense()
    v = v[..., :dim_v]
    variant = wl.Causal() & wl.SoftCap(5.0)
    expected = wl.attention(q, k, v, variant=variant)
    moved = move(q)
    for given in (moved, q, moved, in_heads(q), moved):
        found = wl.attention(given, k, v, variant=variant, backend=backend)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        like = torch.empty_like(given[..., :dim_v].clone() if dim_v < DIM else given)
        if like.stride(-1) == 1:
            assert found.stride() == like.stride()
        else:
            assert found.is_contiguous()


@pytest.mark.parametrize("move", [lambda x: x, in_heads, fused, column_major])
@pytest.mark.filterwarnings("ignore::warploom.notices.CopyWarning")
def test_compilers_are_told_how_results_lie(move: Callable[..., Any]) -> None:
    q, k, v = dense()
    moved, causal = move(q), wl.Causal()

    def computed(q: torch.Tensor) -> torch.Tensor:
        return wl.attention(q, k, v, variant=causal) * 2

    expected = computed(moved)
    for dynamic in (False, True):
        torch._dynamo.reset()
        found = torch.compile(computed, fullgraph=True, dynamic=dynamic, backend="aot_eager")(moved)
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()


@pytest.mark.parametrize("size", [0, 63])
def test_no_requests_are_refused_as_some_are(size: int) -> None:
    for batch in (0, 1):
        q, k, v = (torch.zeros(batch, 4, 2, size) for _ in range(3))
        with pytest.raises(errors.WarploomError, match="head_dim"):
            wl.attention(q, k, v)


class Refusing(torch.Tensor):
    """A subclass that knows nothing of making tensors."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.empty_like, torch.Tensor.new_empty_strided, torch.Tensor.new_empty):
            return NotImplemented
        return super().__torch_function__(func, types, args, kwargs or {})


def test_results_beside_subclasses() -> None:
    q, k, v = dense()
    expected = wl.attention(q, k, v)
    found = wl.attention(in_heads(q).as_subclass(Refusing), k, v)
    torch.testing.assert_close(found.as_subclass(torch.Tensor), expected)
