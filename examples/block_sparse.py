"""Block-sparse attention: each block of queries visits the blocks of keys that a list names."""

import numpy as np
import torch

import warploom as wl

# kernels for GPUs compute in 16-bit types, those for CPUs in float32 too
DEVICE, DTYPE = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)

HEADS, LENGTH, DIM = 4, 512, 64
BLOCK = (32, 16)  # queries x keys; any sizes


def main() -> None:
    generator = np.random.default_rng(0)
    wanted = generator.random((LENGTH // BLOCK[0], LENGTH // BLOCK[1])) < 0.2
    wanted[:, 0] = True  # everybody sees the first block
    visible = np.kron(wanted, np.ones(BLOCK, bool))

    attention = wl.AttentionWrapper(
        wl.Causal(),  # a variant's mask holds inside the visited blocks
        kv_format=wl.BlockSparse(block=BLOCK),
        num_q_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=DIM,
        dtype=DTYPE,
        device=DEVICE,
    )
    attention.plan(**wl.block_rows(visible, BLOCK))  # or kv_indptr, kv_indices by hand
    torch.manual_seed(0)
    q, k, v = torch.randn(3, LENGTH, HEADS, DIM, device=DEVICE, dtype=DTYPE)
    out = attention.run(q, (k, v))

    mask = torch.from_numpy(visible).to(DEVICE).tril()
    q, k, v = (x.float() for x in (q, k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) * DIM**-0.5
    weights = logits.masked_fill(~mask, -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, v)
    error = (out - expected).abs().max().item()
    print(f"{wanted.mean():.0%} of the blocks, {mask.float().mean():.0%} of the pairs: ", end="")
    print(f"max difference {error:.1e}")
    assert error < 5e-3


if __name__ == "__main__":
    main()
