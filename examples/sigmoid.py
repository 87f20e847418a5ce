"""Attention without softmax: out = sum of sigmoid(q.k * scale + bias) * v (FlashSigmoid)."""

import torch

import warploom as wl

# kernels for GPUs compute in 16-bit types, those for CPUs in float32 too
DEVICE, DTYPE = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)


def main() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 200, 4, 64, device=DEVICE, dtype=DTYPE)
    bias = -5.3  # about -log(keys): keeps the sums near 1
    out = wl.attention(q, k, v, variant=wl.FlashSigmoid(bias=bias))

    q, k, v = (x.float() for x in (q, k, v))
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * 64**-0.5 + bias
    expected = torch.einsum("bhqk,bkhd->bqhd", logits.sigmoid(), v)
    error = (out - expected).abs().max().item()
    print(f"sigmoid attention: max difference {error:.1e}")
    assert error < 5e-3


if __name__ == "__main__":
    main()
