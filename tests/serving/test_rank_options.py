"""Options that ranks refuse when a wrapper is made, by the name under which they were given."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import warploom as wl
from warploom import distributed
from warploom.codegen.source import TileChoice, TileConfig
from warploom.errors import ArgumentError
from warploom.serving.distributed import prefill

OPTIONS: dict[str, Any] = {
    "num_q_heads": 2, "num_kv_heads": 1, "head_dim": 16, "dtype": "float32", "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A group of this process."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# gloo would call a rank lost at once, and a socket would not wait
@pytest.mark.parametrize(
    "timeout", [0, -1, 1e-4, float("nan"), float("inf"), "5", True, np.float32(0)]
)
def test_times_that_nobody_can_wait_are_refused(timeout: Any) -> None:
    for wrapper in (distributed.DecodeWrapper, distributed.PrefillWrapper):
        with pytest.raises(ArgumentError, match=r"timeout: is .*; expected seconds"):
            wrapper(wl.Causal(), timeout=timeout, **OPTIONS)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ArgumentError, match=r"timeout: is .*; expected seconds"):
        distributed.PageSender([torch.zeros(4, 16)], ours, timeout=timeout)


@pytest.mark.parametrize("timeout", [None, 1, 0.5, np.float32(3)])
def test_others_are_taken(timeout: Any) -> None:
    distributed.PrefillWrapper(wl.Causal(), timeout=timeout, **OPTIONS)


def test_interleave_is_called_so() -> None:
    with pytest.raises(ArgumentError, match="interleave: is 0"):
        distributed.DecodeWrapper(wl.Causal(), interleave=0, **OPTIONS)


def test_a_layout_in_place_of_what_makes_one() -> None:
    made = distributed.Interleaved(1, 64)
    with pytest.raises(ArgumentError, match=r"lambda world: Interleaved\(1, block=64\)"):
        distributed.PrefillWrapper(wl.Causal(), layout=made, **OPTIONS)  # type: ignore[arg-type]


def test_rings_leave_sms_to_messages_where_attention_fills_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus = [SimpleNamespace(num_sms=8), SimpleNamespace(num_sms=101)]
    monkeypatch.setattr(prefill, "cuda_facts", lambda index: gpus[index])
    tall, low = TileConfig(128, 128, 8, 2, "hopper"), TileConfig(16, 64, 2, 2)

    def room(*choices: TileChoice, device: str = "cuda:1") -> dict[str, int]:
        made: Any = SimpleNamespace(device=torch.device(device), choices=lambda: list(choices))
        return prefill.room_for_messages(made)

    assert room(TileChoice(low), TileChoice(tall)) == {"sm_limit": 93}
    assert room(TileChoice(tall), device="cuda:0") == {"sm_limit": 1}
    assert room(TileChoice(low)) == room() == room(TileChoice(tall), device="cpu") == {}
    assert room(TileChoice(tall), TileChoice(tall, pretransformed_keys=True)) == {}
