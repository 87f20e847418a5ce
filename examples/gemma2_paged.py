"""Gemma-2's attention over a paged cache; one plan mixes prefill, a chunk and decodes."""

from pathlib import Path

import numpy as np
import torch
from rich import print

import warploom as wl

Q_HEADS, KV_HEADS, DIM, PAGE, WINDOW = 8, 4, 64, 16, 256
# query rows and keys of each request: a prefill, a chunk of a longer one, three decodes
Q_LENS = np.array([300, 128, 1, 1, 1])
KV_LENS = np.array([300, 700, 1000, 37, 512])
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_cache() -> tuple[list[torch.Tensor], list[np.ndarray]]:
    """Keys and values in pages that lie in random order, and the page table."""
    pages = -(-KV_LENS // PAGE)
    indices = np.random.default_rng(0).permutation(2 * pages.sum())[: pages.sum()]
    shape = (2 * pages.sum(), PAGE, KV_HEADS, DIM)
    cache = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    table = [np.append(0, pages.cumsum()), indices, (KV_LENS - 1) % PAGE + 1]
    return cache, [array.astype(np.int32) for array in table]


def gathered(cache: torch.Tensor, indptr: np.ndarray, indices: np.ndarray) -> list[torch.Tensor]:
    """Each request's tokens in order, for the oracle."""
    pages = np.split(indices, indptr[1:-1])
    tokens = [cache[torch.from_numpy(p).to(DEVICE).long()].flatten(0, 1) for p in pages]
    return [x[:length].float() for x, length in zip(tokens, KV_LENS, strict=True)]


def main(folder: str = "build/demo") -> None:
    torch.manual_seed(0)
    variant = wl.Causal() & wl.SlidingWindow(WINDOW) & wl.SoftCap(50.0)
    attention = wl.AttentionWrapper(
        variant,
        kv_format=wl.Paged(PAGE),
        num_q_heads=Q_HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype="bfloat16",
        device=DEVICE,
    )
    cache, table = make_cache()
    qo_indptr = np.append(0, Q_LENS.cumsum()).astype(np.int32)
    attention.plan(qo_indptr, *table)
    q = 4 * torch.randn(Q_LENS.sum(), Q_HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
    out, lse = attention.run(q, tuple(cache), return_lse=True)
    print(attention.explain())

    parts = [q.float().split(Q_LENS.tolist()), *(gathered(x, *table[:2]) for x in cache)]
    exact, exact_lse = wl.reference_batch(variant, *parts)
    naive, _ = wl.reference_batch(variant, *parts, round_to="bfloat16")
    expected = np.concatenate(exact)
    error = np.abs(out.float().cpu().numpy() - expected).max()
    careless = np.abs(np.concatenate(naive) - expected).max()
    lse_error = np.abs(lse.cpu().numpy() - np.concatenate(exact_lse)).max()
    print(f"against your functors on NumPy float64: output within {error:.1e}, lse {lse_error:.1e}")
    print(f"(a plain bfloat16 computation is off by {careless:.1e})")
    assert error <= 2 * careless + 1e-3 and lse_error < 1e-2

    picture = wl.draw_mask(
        variant, Path(folder) / "gemma2-mask.png", q_len=300, kv_len=700, tile=(64, 64)
    )
    print(f"mask and tile classes of a prefill of 300 rows: {picture}")


if __name__ == "__main__":
    main()
