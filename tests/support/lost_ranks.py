"""Ranks that end, or are late, in the middle of what all do together."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from warploom import distributed as wld
from warploom.serving.distributed.decode import DecodeWrapper

HEADS, DIM = 4, 16
_OPTIONS: dict[str, Any] = {
    "num_q_heads": HEADS, "head_dim": DIM, "dtype": "float32", "device": "cpu",
    "backend": "reference",
}  # fmt: skip


def decode_without(lost: int, seconds: float | None, timeout: float | None) -> str:
    """Decode twice; before the second step a rank ends, or sleeps for some seconds.

    Returns the error's text and how long it took to come.
    """
    wrapper = wld.DecodeWrapper(timeout=timeout, **_OPTIONS)
    total = [8 * wrapper.world]
    wrapper.plan([0, 1], [0, 8], total_kv_lens=total)
    q, k = torch.randn(1, HEADS, DIM), torch.randn(8, HEADS, DIM)
    wrapper.run(q, (k, k))
    _lose(wrapper, lost, seconds)
    return _failure(lambda: wrapper.run(q, (k, k)))


def prefill_without(lost: int, method: str) -> str:
    """The same in a prefill."""
    wrapper = wld.PrefillWrapper(method=method, **_OPTIONS)
    wrapper.plan([64])
    rows = int(wrapper.layout.local_len(64, wrapper.rank))
    q = torch.randn(rows, HEADS, DIM)
    wrapper.run(q, (q, q))
    _lose(wrapper, lost, None)
    return _failure(lambda: wrapper.run(q, (q, q)))


def _lose(wrapper: Any, lost: int, seconds: float | None) -> None:
    if wrapper.rank == lost:
        if seconds is None:
            os._exit(9)
        time.sleep(seconds)


def _failure(call: Any) -> str:
    begin = time.monotonic()
    try:
        call()
    except wld.RankLost as error:
        return f"{error.facts['rank']} {time.monotonic() - begin:.1f} {error}"
    return "nothing was lost"


def options_refused() -> list[str]:
    """Messages of declarations and plans that do not fit the group."""
    found = []
    for made in (
        lambda: wld.DecodeWrapper(heads="own", **{**_OPTIONS, "num_q_heads": 3}),
        lambda: wld.DecodeWrapper(heads="some", **_OPTIONS),
        lambda: wld.DecodeWrapper(max_scores=True, **_OPTIONS),
        lambda: wld.DecodeWrapper(interleave=0, **_OPTIONS),
        lambda: wld.PrefillWrapper(method="tree", **_OPTIONS),
        lambda: wld.DecodeWrapper(**_OPTIONS).run(None, None),
        lambda: _planned([0, 1], [0, 8], [9]),
        lambda: _planned([0, 1], [0, 8], [9, 9]),
        lambda: wld.PrefillWrapper(**_OPTIONS).plan([3], [4, 4]),
        lambda: wld.PrefillWrapper(**_OPTIONS).plan([-3]),
    ):
        try:
            made()
            found.append("accepted")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def _planned(qo_indptr: Any, kv_indptr: Any, total: Any) -> DecodeWrapper:
    wrapper = wld.DecodeWrapper(**_OPTIONS)
    wrapper.plan(qo_indptr, kv_indptr, total_kv_lens=total)
    return wrapper
