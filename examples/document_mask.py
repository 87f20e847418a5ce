"""Packed documents: several texts share one row of tokens and must not see each other."""

import torch
import torch.nn.functional as F

import warploom as wl

# kernels for GPUs compute in 16-bit types, those for CPUs in float32 too
DEVICE, DTYPE = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)


def main() -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([70, 200, 31, 99])
    number = torch.arange(4, dtype=torch.int32)
    document = torch.repeat_interleave(number, lengths).to(DEVICE)  # [400]
    q, k, v = torch.randn(3, 1, len(document), 4, 64, device=DEVICE, dtype=DTYPE)

    variant = wl.Causal() & wl.DocumentMask(document[None])
    out = wl.attention(q, k, v, variant=variant)

    parts = [x.squeeze(0).float().split(lengths.tolist()) for x in (q, k, v)]
    alone = [
        F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in part), is_causal=True)
        for part in zip(*parts, strict=True)
    ]
    expected = torch.cat(alone, dim=1).transpose(0, 1)
    error = (out[0] - expected).abs().max().item()
    print(f"4 documents in one row equal 4 separate calls: max difference {error:.1e}")
    assert error < 5e-3


if __name__ == "__main__":
    main()
