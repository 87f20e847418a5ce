"""StreamingLLM: the cache keeps keys unrotated, and RoPE uses the place in the cache.

A rolling cache holds the first tokens (sinks) and the latest ones, whose slots it uses again and
again. Rotating by the place in the cache keeps distances small however long the stream runs; here
that happens while the kernel reads the keys.
"""

import torch

import warploom as wl

# kernels for GPUs compute in 16-bit types, those for CPUs in float32 too
DEVICE, DTYPE = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)

HEADS, DIM = 4, 64
SINKS, RECENT, STREAM = 4, 60, 1000  # tokens kept at the start, kept at the end, seen in all


def rotate(x: torch.Tensor, position: torch.Tensor, base: float = 10000.0) -> torch.Tensor:
    """Llama's RoPE in plain torch; x is [tokens, heads, dim]."""
    frequency = base ** (-torch.arange(0, DIM, 2, device=x.device) / DIM)
    angle = (position[:, None] * frequency).repeat(1, 2)[:, None]
    x1, x2 = x.chunk(2, dim=-1)
    return x * angle.cos() + torch.cat([-x2, x1], dim=-1) * angle.sin()


def main() -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, STREAM, HEADS, DIM, device=DEVICE, dtype=DTYPE)
    ring = wl.Rolling(RECENT, SINKS, positions="cache")
    k_cache, v_cache = torch.zeros(2, 1, ring.slots, HEADS, DIM, device=DEVICE, dtype=DTYPE)
    attention = wl.AttentionWrapper(
        wl.Causal() & wl.Rope(),  # positions are those in the cache
        kv_format=ring,
        num_q_heads=HEADS,
        head_dim=DIM,
        dtype=DTYPE,
        device=DEVICE,
    )
    error, steps = 0.0, 0
    for position in range(STREAM):
        k_cache[0, ring.slot_of(position)] = keys[position]
        v_cache[0, ring.slot_of(position)] = values[position]
        if position % 111:
            continue  # the others would do the same
        q = torch.randn(1, HEADS, DIM, device=DEVICE, dtype=DTYPE)
        attention.plan([0, 1], [0, position + 1])  # lengths of the whole stream
        out = attention.run(q, (k_cache, v_cache))

        seen = torch.arange(position + 1, device=DEVICE)
        kept = seen[(seen < SINKS) | (seen > position - RECENT)]
        place = torch.arange(len(kept), device=DEVICE)
        rotated_q, rotated_k = rotate(q.float(), place[-1:]), rotate(keys[kept].float(), place)
        logits = torch.einsum("qhd,khd->hqk", rotated_q, rotated_k) * DIM**-0.5
        expected = torch.einsum("hqk,khd->qhd", logits.softmax(-1), values[kept].float())
        error, steps = max(error, (out - expected).abs().max().item()), steps + 1
    print(f"{ring.slots} of {STREAM} tokens kept, {steps} steps compared: difference {error:.1e}")
    assert error < 5e-3


if __name__ == "__main__":
    main()
