"""Attention sinks: a learned logit per head joins the softmax's denominator and has no value."""

import torch

import warploom as wl

# kernels for GPUs compute in 16-bit types, those for CPUs in float32 too
DEVICE, DTYPE = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)

HEADS, DIM = 8, 64


def main() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 128, HEADS, DIM, device=DEVICE, dtype=DTYPE)
    sinks = torch.randn(HEADS, device=DEVICE)
    out = wl.attention(q, k, v, variant=wl.AttentionSink(sinks))

    q, k, v = (x.float() for x in (q, k, v))
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * DIM**-0.5
    column = sinks.view(1, HEADS, 1, 1).expand(1, HEADS, 128, 1)
    weights = torch.cat([logits, column], dim=-1).softmax(-1)[..., :-1]  # the sink has no value
    expected = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    error = (out - expected).abs().max().item()
    print(f"attention sink: weights sum to {weights.sum(-1).mean():.3f} on average, ", end="")
    print(f"max difference {error:.1e}")
    assert error < 5e-3


if __name__ == "__main__":
    main()
