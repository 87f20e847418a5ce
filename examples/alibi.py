"""ALiBi: every head subtracts its own slope times the distance. Slopes are data, not code."""

import torch
import torch.nn.functional as F

import warploom as wl

# kernels for GPUs compute in 16-bit types, those for CPUs in float32 too
DEVICE, DTYPE = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)

HEADS, LENGTH, DIM = 8, 300, 64


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor):
    """The same in plain torch, with the bias written out as a tensor."""
    position = torch.arange(LENGTH, device=q.device)
    distance = position[None, :] - position[:, None]
    bias = slopes[:, None, None] * distance
    bias = bias.masked_fill(distance > 0, -torch.inf)
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)


def main() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, LENGTH, HEADS, DIM, device=DEVICE, dtype=DTYPE)
    for steepness in (8.0, 4.0):  # other slopes: same kernel
        slopes = 2.0 ** (-steepness * torch.arange(1, HEADS + 1, device=DEVICE) / HEADS)
        out = wl.attention(q, k, v, variant=wl.Causal() & wl.Alibi(slopes))
        error = (out - expected(q, k, v, slopes)).abs().max().item()
        print(f"slopes from {slopes[0]:.3f} to {slopes[-1]:.5f}: max difference {error:.1e}")
        assert error < 5e-3


if __name__ == "__main__":
    main()
