"""When each work item of a mixed batch was computed, as a table, a picture and a trace."""

import os
from pathlib import Path

import numpy as np
import torch

import warploom as wl

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# kernels for GPUs compute in 16-bit types; the two roles of Hopper's have heads of 128
DTYPE, DIM, CONTEXT = (torch.bfloat16, 128, 16384) if ON_GPU else (torch.float32, 64, 1024)
# a CPU takes two tiles if it is told which: 48 rows by 128 keys, and 12 by 64 for decodes
TILE = None if ON_GPU else wl.TileConfig(48, 128, decode=wl.TileConfig(12, 64))
Q_HEADS, KV_HEADS = (32, 8) if ON_GPU else (4, 2)
# query rows of each request: a chunk of a prompt, and decodes
Q_LENS = np.array([2048 if ON_GPU else 256] + [1] * 24)


def make() -> wl.AttentionWrapper:
    os.environ["WARPLOOM_TRACE"] = "1"  # read when the wrapper is made
    return wl.AttentionWrapper(
        wl.Causal(),
        kv_format=wl.Ragged(),
        num_q_heads=Q_HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype=DTYPE,
        device=DEVICE,
        tile=TILE,
    )


def main(folder: str = "build/demo") -> None:
    rng = np.random.default_rng(0)
    kv_lens = np.maximum(Q_LENS, rng.integers(CONTEXT // 2, CONTEXT + 1, len(Q_LENS)))
    attention = make()
    attention.plan(*(np.append(0, np.cumsum(x)).astype(np.int32) for x in (Q_LENS, kv_lens)))
    q = torch.randn(Q_LENS.sum(), Q_HEADS, DIM, device=DEVICE, dtype=DTYPE)
    k, v = torch.randn(2, kv_lens.sum(), KV_HEADS, DIM, device=DEVICE, dtype=DTYPE)
    for _ in range(3):  # the first one finds nothing in any cache
        attention.run(q, (k, v))

    found = wl.trace(
        attention, Path(folder) / "where-time-goes.png", Path(folder) / "where-time-goes.json"
    )
    print(found)
    longest = found.items[np.argmax(found.items["end_us"] - found.items["begin_us"])]
    print(
        f"the longest item: {longest['role']} of request {longest['request']}, rows "
        f"{longest['q_begin']} to {longest['q_end'] - 1}, keys {longest['kv_begin']} to "
        f"{longest['kv_end'] - 1}, {longest['end_us'] - longest['begin_us']:.0f} us"
    )
    print(f"open {folder}/where-time-goes.json in https://ui.perfetto.dev")


if __name__ == "__main__":
    main()
