"""FlexAttention's score_mod and mask_mod are used as they are; no block mask has to be built."""

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import warploom as wl

# kernels for GPUs compute in 16-bit types, those for CPUs in float32 too
DEVICE, DTYPE = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)

BATCH, HEADS, LENGTH, DIM, WINDOW = 2, 4, 256, 64, 64

torch.manual_seed(0)
head_bias = torch.randn(HEADS, device=DEVICE)


def score_mod(score, b, h, q_idx, kv_idx):
    return score + head_bias[h] * torch.tanh((kv_idx - q_idx) / 16.0)


def mask_mod(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= WINDOW)


VARIANT = wl.flex(score_mod, mask_mod)  # once, since it is traced here; it serves all calls


def main() -> None:
    q, k, v = torch.randn(3, BATCH, HEADS, LENGTH, DIM, device=DEVICE, dtype=DTYPE)

    block_mask = create_block_mask(mask_mod, None, None, LENGTH, LENGTH, device=DEVICE)
    theirs = flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask)

    ours = wl.attention(q, k, v, variant=VARIANT, layout="HND")

    error = (ours - theirs).abs().max().item()
    print(f"flex_attention and warploom on the same functions: max difference {error:.1e}")
    assert error < 5e-3


if __name__ == "__main__":
    main()
