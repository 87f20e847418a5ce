"""Context parallelism on two processes: a prefill by ring attention, then a step of decoding."""

import multiprocessing
import tempfile

import numpy as np
import torch
import torch.distributed as dist

import warploom as wl
import warploom.distributed as wld

WORLD, HEADS, KV_HEADS, DIM, PAGE = 2, 4, 2, 32, 16
LENGTHS = [150, 41]  # tokens of two requests
VARIANT = wl.Causal() & wl.Rope() & wl.SlidingWindow(60)
OPTIONS = {
    "num_q_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "dtype": "float32",
    "device": "cpu",
}  # fmt: skip


def whole_batch() -> list[torch.Tensor]:
    """q, k and v of both requests; a rank keeps its own tokens of them."""
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(sum(LENGTHS), n, DIM, generator=rng) for n in (HEADS, KV_HEADS, KV_HEADS)]


def prefill() -> tuple[np.ndarray, torch.Tensor]:
    """This rank's rows of the batch, and their output."""
    attention = wld.PrefillWrapper(VARIANT, timeout=60, **OPTIONS)
    rows = attention.layout.indices(LENGTHS, attention.rank)  # zig-zag: the same work for all
    q, k, v = (x[rows] for x in whole_batch())
    attention.plan(LENGTHS)
    return rows, attention.run(q, (k, v))


def decode() -> torch.Tensor:
    """The last row of each request again, over keys that lie interleaved in pages of the ranks."""
    attention = wld.DecodeWrapper(VARIANT, kv_format=wl.Paged(PAGE), timeout=60, **OPTIONS)
    rows = attention.layout.indices(LENGTHS, attention.rank)
    own = attention.layout.local_len(LENGTHS, attention.rank)
    pages = -(-own // PAGE)
    indptr = np.cumsum([0, *pages])
    cache = torch.zeros(2, indptr[-1], PAGE, KV_HEADS, DIM)
    q, *kv = whole_batch()
    for tokens, to in zip(kv, cache, strict=True):
        for begin, x in zip(indptr, tokens[rows].split(own.tolist()), strict=False):
            to[begin:].flatten(0, 1)[: len(x)] = x
    table = (indptr, np.arange(indptr[-1]), (own - 1) % PAGE + 1)
    attention.plan([0, 1, 2], *table, total_kv_lens=LENGTHS)
    return attention.run(q[np.cumsum(LENGTHS) - 1], cache.unbind())


def work(rank: int, meeting: str) -> None:
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=WORLD)
    (rows, out), last = prefill(), decode()
    exact = wl.reference_batch(VARIANT, *(x.split(LENGTHS) for x in whole_batch()))[0]
    errors = [np.abs(out.numpy() - np.concatenate(exact)[rows]).max()]
    errors.append(np.abs(last.numpy() - [request[-1] for request in exact]).max())
    print(f"rank {rank}: {len(rows)} rows off by {errors[0]:.1e}, a decode by {errors[1]:.1e}")
    assert max(errors) < 1e-5
    dist.destroy_process_group()


def main() -> None:
    context = multiprocessing.get_context("fork")  # nothing runs yet that a fork could break
    with tempfile.TemporaryDirectory() as folder:
        given = [(rank, f"{folder}/meeting") for rank in range(WORLD)]
        ranks = [context.Process(target=work, args=each) for each in given]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * WORLD


if __name__ == "__main__":
    main()
