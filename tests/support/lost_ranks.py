"""Ranks that end, or are late, in the middle of what all do together."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from warploom import distributed as wld
from warploom.serving.distributed.decode import DecodeWrapper

HEADS, DIM = 4, 16
OPTIONS: dict[str, Any] = {
    "num_q_heads": HEADS, "head_dim": DIM, "dtype": "float32", "device": "cpu",
    "backend": "reference",
}  # fmt: skip


def decode_without(lost: int, seconds: float | None, timeout: float | None) -> str:
    """Decode twice; before the second step a rank ends, or sleeps for some seconds.

    Returns the rank that the error names, how many seconds it took to come, and its text.
    """

    def prepared(seconds: float | None) -> Any:
        wrapper = wld.DecodeWrapper(timeout=seconds, **OPTIONS)
        wrapper.plan([0, 1], [0, 8], total_kv_lens=[8 * wrapper.world])
        q, k = torch.randn(1, HEADS, DIM), torch.randn(8, HEADS, DIM)
        return lambda: wrapper.run(q, (k, k))

    prepared(None)()  # however long a busy machine takes to start
    return _failure(prepared(timeout), lost, seconds)


def prefill_without(lost: int, method: Any, timeout: float | None) -> str:
    """The same in a prefill, before which a rank ends."""

    def prepared(seconds: float | None) -> Any:
        wrapper = wld.PrefillWrapper(method=method, timeout=seconds, **OPTIONS)
        wrapper.plan([64])
        q = torch.randn(int(wrapper.layout.local_len(64, wrapper.rank)), HEADS, DIM)
        return lambda: wrapper.run(q, (q, q))

    prepared(None)()
    return _failure(prepared(timeout), lost, None)


def _failure(call: Any, lost: int, seconds: float | None) -> str:
    if dist.get_rank() == lost:
        if seconds is None:
            os._exit(9)
        time.sleep(seconds)
    begin = time.monotonic()
    try:
        call()
    except wld.RankLost as error:
        return f"{error.facts['rank']} {time.monotonic() - begin:.1f} {error}"
    return "nothing was lost"


def repeated(kind: str) -> tuple[list[str], bool]:
    """A run that one rank refuses twice and repeats, and whether it gives what another run gave."""
    run, q, kv = _prepared(kind)[1:]
    expected, said = run(q, kv), []
    if dist.get_rank() == 0:
        for wrong in ((q[..., :-1], kv, {}), (q.double(), kv, {}), (q, kv, {"none": 1})):
            try:
                run(*wrong[:2], **wrong[2])
            except Exception as error:
                said.append(type(error).__name__)
    return said, torch.equal(run(q, kv), expected)


def broken(kind: str) -> list[str]:
    """What the runs after one say that fails when something was sent already; on rank 0 alone."""
    wrapper, run, q, kv = _prepared(kind)
    last = wrapper._parts[-1] if hasattr(wrapper, "_parts") else wrapper.local

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    original = last.run
    if dist.get_rank() == 0:
        last.run = fails
    said = []
    for _ in range(3 if dist.get_rank() == 0 else 1):
        try:
            run(q, kv)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        if dist.get_rank() == 0:
            last.run = original
    return said


def _prepared(kind: str) -> tuple[Any, ...]:
    rank, world = dist.get_rank(), dist.get_world_size()
    rng = torch.Generator().manual_seed(rank)
    if kind == "own":
        wrapper: Any = wld.DecodeWrapper(heads="own", **OPTIONS)
        wrapper.plan([0, 1], [0, 8], total_kv_lens=[8 * world])
        rows, tokens, heads = 1, 8, HEADS // world
    else:
        prefill: Any = wld.PrefillWrapper
        wrapper = prefill(method=kind, **OPTIONS)
        wrapper.plan([61])  # not as many rows on each rank
        rows = tokens = int(wrapper.layout.local_len(61, rank))
        heads = HEADS
    q, k, v = (torch.randn(n, h, DIM, generator=rng)
               for n, h in ((rows, heads), (tokens, HEADS), (tokens, HEADS)))  # fmt: skip
    return wrapper, wrapper.run, q, (k, v)


def options_refused() -> list[str]:
    """Messages of declarations and plans that do not fit the group."""
    found = []
    decode: Any = wld.DecodeWrapper  # wrong arguments are wrong types, too
    prefill: Any = wld.PrefillWrapper
    for made in (
        lambda: wld.DecodeWrapper(heads="own", **{**OPTIONS, "num_q_heads": 3}),
        lambda: decode(heads="some", **OPTIONS),
        lambda: wld.DecodeWrapper(max_scores=True, **OPTIONS),
        lambda: wld.DecodeWrapper(interleave=0, **OPTIONS),
        lambda: prefill(method="tree", **OPTIONS),
        lambda: wld.DecodeWrapper(**OPTIONS).run(None, None),
        lambda: _planned([0, 1], [0, 8], [9]),
        lambda: _planned([0, 1], [0, 8], [9, 9]),
        lambda: wld.PrefillWrapper(**OPTIONS).plan([3], [4, 4]),
        lambda: wld.PrefillWrapper(**OPTIONS).plan([-3]),
        lambda: wld.PrefillWrapper(cuda_graph=True, **OPTIONS),
    ):
        try:
            made()
            found.append("accepted")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def _planned(qo_indptr: Any, kv_indptr: Any, total: Any) -> DecodeWrapper:
    wrapper = wld.DecodeWrapper(**OPTIONS)
    wrapper.plan(qo_indptr, kv_indptr, total_kv_lens=total)
    return wrapper
