"""StreamingLLM: the cache keeps keys unrotated, and RoPE uses the place in the cache.

A rolling cache holds the first tokens (sinks) and the latest ones. Rotating by the place in the
cache keeps distances small however long the stream runs; here that happens while the kernel reads
the keys.
"""

import numpy as np
import torch

import warploom as wl

# kernels for GPUs compute in 16-bit types, those for CPUs in float32 too
DEVICE, DTYPE = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)

HEADS, DIM, PAGE = 4, 64, 16
SINKS, RECENT, STREAM = 4, 60, 1000  # tokens kept at the start, kept at the end, seen in all


def rotate(x: torch.Tensor, position: torch.Tensor, base: float = 10000.0) -> torch.Tensor:
    """Llama's RoPE in plain torch; x is [tokens, heads, dim]."""
    frequency = base ** (-torch.arange(0, DIM, 2, device=x.device) / DIM)
    angle = (position[:, None] * frequency).repeat(1, 2)[:, None]
    x1, x2 = x.chunk(2, dim=-1)
    return x * angle.cos() + torch.cat([-x2, x1], dim=-1) * angle.sin()


def main() -> None:
    torch.manual_seed(0)
    kept = torch.cat([torch.arange(SINKS), torch.arange(STREAM - RECENT, STREAM)])
    keys, values = torch.randn(2, STREAM, HEADS, DIM, device=DEVICE, dtype=DTYPE)[:, kept]
    q = torch.randn(1, HEADS, DIM, device=DEVICE, dtype=DTYPE)

    pages = -(-len(kept) // PAGE)
    k_cache, v_cache = (
        torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pages * PAGE - len(kept))).view(
            pages, PAGE, HEADS, DIM
        )
        for x in (keys, values)
    )
    attention = wl.AttentionWrapper(
        wl.Causal() & wl.Rope(),  # positions count keys in the cache, so they are cache positions
        kv_format=wl.Paged(PAGE),
        num_q_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=DIM,
        dtype=DTYPE,
        device=DEVICE,
    )
    last = (len(kept) - 1) % PAGE + 1
    attention.plan([0, 1], [0, pages], np.arange(pages, dtype=np.int32), [last])
    out = attention.run(q, (k_cache, v_cache))

    place = torch.arange(len(kept), device=DEVICE)
    rotated_q, rotated_k = rotate(q.float(), place[-1:]), rotate(keys.float(), place)
    logits = torch.einsum("qhd,khd->hqk", rotated_q, rotated_k) * DIM**-0.5
    expected = torch.einsum("hqk,khd->qhd", logits.softmax(-1), values.float())
    error = (out - expected).abs().max().item()
    print(f"{len(kept)} of {STREAM} tokens kept; RoPE at cache positions: difference {error:.1e}")
    assert error < 5e-3


if __name__ == "__main__":
    main()
