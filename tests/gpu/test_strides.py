"""A GPU serves tensors of any strides and addresses: it copies what its kernels cannot reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import warploom as wl
from warploom import errors, notices
from warploom.notices import CopyWarning
from warploom.runtime.tensors import strides

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::warploom.notices.CopyWarning")]

SHAPE: dict[str, Any] = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128, "dtype": "bfloat16"}
DIM = 128


def last_apart(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((x, torch.full_like(x, float("nan"))), -1)[..., 0]


def shifted(x: torch.Tensor) -> torch.Tensor:
    flat = x.new_empty(x.numel() + 1)
    return flat[1:].view(x.shape).copy_(x)


def odd_rows(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, 1), value=float("nan"))[..., :-1]


MOVES = {"last": last_apart, "address": shifted, "rows": odd_rows}
LENGTHS = [(1, 300), (40, 300), (300, 700)]  # rows and keys: decode to tensor copies


def ragged(rows: int, keys: int, device: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.randn(rows, 8, DIM, device=device, dtype=torch.bfloat16)
    k, v = torch.randn(2, keys, 2, DIM, device=device, dtype=torch.bfloat16)
    return q, k, v


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("variant", [wl.Causal(), wl.Causal() & wl.Rope()], ids=["plain", "rope"])
def test_runs_of_any_strides(
    cuda: Any, variant: wl.Variant, lengths: tuple[int, int], move: Callable[..., Any]
) -> None:
    rows, keys = lengths
    attention = wl.AttentionWrapper(variant, device=cuda, **SHAPE)
    attention.plan([0, rows], [0, keys])
    tensors = ragged(rows, keys, cuda)
    expected, sums = attention.run(tensors[0], tensors[1:], return_lse=True)
    for moved in range(8):
        q, k, v = (move(x) if moved >> i & 1 else x for i, x in enumerate(tensors))
        assert torch.equal(attention.run(q, (k, v)), expected)
        out = move(torch.zeros_like(expected))
        lse = torch.empty(8, rows, device=cuda).mT
        attention.run(q, (k, v), out=out, lse=lse)
        assert torch.equal(out, expected) and torch.equal(lse, sums)


@pytest.mark.parametrize("axis", [0, 1], ids=["tokens", "heads"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_expanded_keys(cuda: Any, lengths: tuple[int, int], axis: int) -> None:
    rows, keys = lengths
    attention = wl.AttentionWrapper(wl.Causal(), device=cuda, **SHAPE)
    attention.plan([0, rows], [0, keys])
    q, *kv = ragged(rows, keys, cuda)
    expanded = tuple(x.narrow(axis, 0, 1).expand_as(x) for x in kv)
    expected = attention.run(q, tuple(x.contiguous() for x in expanded))
    assert torch.equal(attention.run(q, expanded), expected)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_results_lie_as_queries_do(cuda: Any, lengths: tuple[int, int]) -> None:
    """Heads between rows, as a projection leaves them, and the result back without a copy."""
    rows, keys = lengths
    q = torch.randn(2, rows, 8, DIM, device=cuda, dtype=torch.bfloat16).transpose(1, 2)
    k, v = torch.randn(2, 2, 2, keys, DIM, device=cuda, dtype=torch.bfloat16)
    found, expected = (
        wl.attention(x, k, v, variant=wl.Causal(), layout="HND") for x in (q, q.contiguous())
    )
    assert torch.equal(found, expected)
    assert found.stride() == q.stride() and expected.is_contiguous()
    assert found.transpose(1, 2).is_contiguous()


def test_dense_calls_of_any_strides(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(2, 200, 8, 64, device=cuda, dtype=torch.float16)
    k, v = torch.randn(2, 2, 300, 2, 64, device=cuda, dtype=torch.float16)
    expected = wl.attention(q, k, v, variant=wl.Causal())
    for move in MOVES.values():
        monkeypatch.setattr(notices, "_told", set())  # each line is told once
        with pytest.warns(CopyWarning, match="is copied at each call from here"):
            found = wl.attention(move(q), move(k), move(v), variant=wl.Causal())
        assert torch.equal(found, expected)


def test_copies_are_captured(cuda: Any) -> None:
    """A replay copies again, so that it sees what the tensors hold then."""
    attention = wl.AttentionWrapper(wl.Causal(), device=cuda, **SHAPE)
    attention.plan([0, 40], [0, 300])
    q, k, v = ragged(40, 300, cuda)
    moved = odd_rows(q), last_apart(k), shifted(v)
    out = odd_rows(torch.zeros_like(q))
    attention.run(moved[0], moved[1:], out=out)
    graph = torch.cuda.CUDAGraph()
    with wl.forbid_compilation(), torch.cuda.graph(graph):
        attention.run(moved[0], moved[1:], out=out)
    for _ in range(2):
        new = ragged(40, 300, cuda)
        for held, values in zip(moved, new, strict=True):
            held.copy_(values)
        out.zero_()
        graph.replay()
        assert torch.equal(out, attention.run(new[0], new[1:]))


def test_paged_caches(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = wl.AttentionWrapper(wl.Causal(), kv_format=wl.Paged(16), device=cuda, **SHAPE)
    attention.plan([0, 1, 9], [0, 2, 5], [7, 4, 1, 0, 9], [16, 3])
    q = torch.randn(9, 8, DIM, device=cuda, dtype=torch.bfloat16)
    cache = torch.randn(10, 2, 16, 2, DIM, device=cuda, dtype=torch.bfloat16)
    expected = attention.run(q, cache)
    for move in MOVES.values():
        assert torch.equal(attention.run(q, move(cache)), expected)
    monkeypatch.setattr(strides, "LARGEST_CACHE_COPIED", 0)
    for move in MOVES.values():
        with pytest.raises(errors.ArgumentError, match="not copied by every run"):
            attention.run(q, move(cache))
    assert torch.equal(attention.run(q, cache), expected)


def test_appends_of_any_strides(cuda: Any) -> None:
    k, v = torch.randn(2, 3, 2, DIM, device=cuda, dtype=torch.bfloat16)
    table = [0, 3], [0, 1], [1], [3]
    expected, found = torch.zeros(2, 2, 2, 16, 2, DIM, device=cuda, dtype=torch.bfloat16)
    wl.append(k, v, expected, *table)
    for move in MOVES.values():
        found.zero_()
        wl.append(move(k), move(v), found, *table)
        assert torch.equal(found, expected)
        with pytest.raises(errors.WrongStride, match="k cache"):
            wl.append(k, v, move(found), *table)
