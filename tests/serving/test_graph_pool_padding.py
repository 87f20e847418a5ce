"""Padding of graph pools: what a type holds, and what the step cannot take."""

from __future__ import annotations

import dataclasses
import math
import sys

import pytest
import torch

import warploom as wl

BOUNDS = wl.Bounds(max_requests=8, max_q_rows=8, max_kv_len=8)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_padding_that_the_step_cannot_take_is_noted() -> None:
    table = torch.randn(50, 4)
    inputs = {"tokens": wl.GraphInput(torch.int64, pad=57)}
    pool = wl.GraphPool(lambda tokens: table[tokens], inputs, BOUNDS, device="cpu")
    with pytest.raises(IndexError) as raised:
        pool.warm_up()
    assert "rows of padding, tokens=57: pad of" in raised.value.__notes__[0]  # type: ignore[attr-defined]
    tokens = torch.tensor([3, 4])  # as many as a bucket has: none of padding
    assert torch.equal(pool.run({"tokens": tokens}), table[tokens])
    with pytest.raises(IndexError) as raised:
        pool.run({"tokens": torch.tensor([3, 4, 5])})
    note = raised.value.__notes__[0]  # type: ignore[attr-defined]
    assert note.startswith("GraphPool.run() called the step with 1 rows of padding, tokens=57: pad")
    with pytest.raises(IndexError) as raised:
        pool.run({"tokens": torch.tensor([3, 90, 5, 6])})  # the batch itself, without padding
    assert not hasattr(raised.value, "__notes__")


def test_types_have_their_names() -> None:
    one = wl.GraphInput("int64", (2,), 7)
    assert one == wl.GraphInput(torch.int64, (2,), 7) == wl.GraphInput("torch.int64", (2,), 7)
    assert dataclasses.replace(one, pad=3) == wl.GraphInput(torch.int64, (2,), 3)
    pool = wl.GraphPool(lambda x: x * 2, {"x": wl.GraphInput("float32")}, BOUNDS, device="cpu")
    assert pool.run({"x": torch.ones(3)}).tolist() == [2.0] * 3


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [
        (torch.float32, 0.1), (torch.bfloat16, 0.1), (torch.float8_e4m3fn, 0.1),
        (torch.float16, -math.inf), (torch.float32, math.nan), (torch.int64, 2**40),
        (torch.int32, 3.0), (torch.bool, True), (torch.uint8, 255), (torch.complex64, 0.5),
    ],
)  # fmt: skip
def test_padding_that_a_type_holds_is_taken(dtype: torch.dtype, pad: float) -> None:
    inputs = {"x": wl.GraphInput(dtype, pad=pad)}
    pool = wl.GraphPool(lambda x: x * 2, inputs, BOUNDS, device="cpu")
    kept = pool._inputs.buffers["x"].to(torch.complex128)
    wanted = torch.full_like(kept, pad)
    torch.testing.assert_close(kept, wanted, equal_nan=True, rtol=0.05, atol=0)
