"""Keys and values of a batch of 1 are those of every entry of q, as in FlexAttention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.emulator import Emulator
from support.parts import compiled
from torch.nn.attention.flex_attention import create_block_mask, flex_attention, noop_mask

import warploom as wl
from warploom import errors
from warploom.codegen.source import TileConfig

BATCH, ROWS, KEYS, DIM = 3, 6, 40, 32


def tensors(heads: int = 4, kv_heads: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In FlexAttention's layout: [batch, heads, tokens, dim]."""
    torch.manual_seed(0)
    q = torch.randn(BATCH, heads, ROWS, DIM)
    return q, torch.randn(1, kv_heads, KEYS, DIM), torch.randn(1, kv_heads, KEYS, DIM)


def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + 0.1 * b * h - 0.01 * (q_idx - kv_idx)


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx >= q_idx) & (kv_idx < q_idx + 10 + 5 * b)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize(("score_mod", "mask_mod"), [(biased, window), (None, noop_mask)])
def test_flex_attention_says_the_same(score_mod: Any, mask_mod: Any, backend: Any) -> None:
    q, k, v = tensors()
    mask = create_block_mask(mask_mod, BATCH, None, ROWS, KEYS, device="cpu")  # torch wants one
    expected, sums = flex_attention(  # type: ignore[misc]
        q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=True, return_lse=True
    )
    for given in (mask, mask_mod):
        variant = wl.flex(score_mod, given)
        found = wl.attention(
            q, k, v, variant=variant, layout="HND", return_lse=True, backend=backend
        )
        torch.testing.assert_close(found, (expected, sums), atol=1e-5, rtol=1e-5)


def test_it_is_what_expanded_keys_give() -> None:
    q, k, v = (x.transpose(1, 2).contiguous() for x in tensors())
    lens = [40, 7, 0]
    variant = wl.Causal() & wl.Rope()
    shared = wl.attention(q, k, v, variant=variant, kv_lens=lens, return_lse=True)
    copied = (x.expand(BATCH, -1, -1, -1).contiguous() for x in (k, v))
    expected = wl.attention(q, *copied, variant=variant, kv_lens=lens, return_lse=True)
    torch.testing.assert_close(shared, expected)
    assert (shared[0][2] == 0).all()
    # tensors that say so by their strides are read as they lie, too
    views = (x.expand(BATCH, -1, -1, -1) for x in (k, v))
    found = wl.attention(q, *views, variant=variant, kv_lens=lens, return_lse=True)
    torch.testing.assert_close(found, expected)


def test_one_kernel_and_no_copy() -> None:
    q, k, v = (x.transpose(1, 2).contiguous() for x in tensors())
    wrapper = wl.AttentionWrapper(
        kv_format=wl.Dense(shared=True), num_q_heads=4, num_kv_heads=2, head_dim=DIM,
        dtype="float32", device="cpu",
    )  # fmt: skip
    wrapper.plan([0, 6, 12, 18], [0, 40, 47, 87])
    out = wrapper.run(q, (k, v))
    assert compiled(wrapper).params.get("k") == k.data_ptr()
    assert compiled(wrapper).params.get("v") == v.data_ptr()
    assert out.shape == q.shape
    own = wl.AttentionWrapper(
        kv_format=wl.Dense(), num_q_heads=4, num_kv_heads=2, head_dim=DIM, dtype="float32",
        device="cpu",
    )  # fmt: skip
    with wl.forbid_compilation():
        own.plan([0, 6, 12, 18], [0, 40, 47, 87])
    with pytest.raises(errors.WrongShape, match=r"batch=1, token>=40"):
        wrapper.run(q, tuple(x.expand(BATCH, -1, -1, -1) for x in (k, v)))
    with pytest.raises(errors.WrongShape, match=r"batch>=3"):
        own.run(q, (k, v))


TILES = [
    TileConfig(64, 64, 4, 2),
    TileConfig(64, 64, 4, 2, "hopper", 2),
    TileConfig(128, 64, 8, 2, "hopper", 2),
]


@pytest.mark.some(1)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_kernels_of_gpus_read_one_sequence(emulator: Emulator, tile: TileConfig) -> None:
    q, k, v = (x.transpose(1, 2).contiguous().bfloat16() for x in tensors())
    results = []
    for shared in (True, False):
        wrapper = wl.AttentionWrapper(
            wl.Causal(), kv_format=wl.Dense(shared=shared), num_q_heads=4, num_kv_heads=2,
            head_dim=DIM, dtype="bfloat16", device="cpu", tile=tile,
        )  # fmt: skip
        wrapper.plan([0, 6, 12, 18], [0, 40, 47, 87])
        kv = [x if shared else x.expand(BATCH, -1, -1, -1).contiguous() for x in (k, v)]
        results.append(wrapper.run(q, tuple(kv), return_lse=True))
    torch.testing.assert_close(*results)


def test_compiled_functions_take_them() -> None:
    q, k, v = (x.transpose(1, 2).contiguous() for x in tensors())
    compiled = torch.compile(wl.attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), wl.attention(q, k, v))


@pytest.mark.parametrize(
    ("of_k", "of_v", "text"),
    [
        (2, 2, r"k has shape \(2, .* expected batch 3, as q, or 1"),
        (1, 3, r"v has shape \(3, 40, 2, 32\); expected \(1, 40, 2\) before"),
        (3, 1, r"v has shape \(1, 40, 2, 32\); expected \(3, 40, 2\) before"),
    ],
)
def test_other_batches_are_refused(of_k: int, of_v: int, text: str) -> None:
    q = torch.zeros(BATCH, ROWS, 4, DIM)
    k, v = (torch.zeros(n, KEYS, 2, DIM) for n in (of_k, of_v))
    with pytest.raises(errors.WrongShape, match=text):
        wl.attention(q, k, v)


def test_shared_is_a_truth() -> None:
    with pytest.raises(errors.BadFormat, match="shared=1 describes no KV format"):
        wl.Dense(shared=1)  # type: ignore[arg-type]


def test_shared_keys_are_transformed_in_attention() -> None:
    with pytest.raises(errors.ArgumentError, match="key_transform"):
        wl.AttentionWrapper(
            wl.Rope(), kv_format=wl.Dense(shared=True), num_q_heads=4, head_dim=DIM,
            dtype="float32", device="cpu", key_transform="before",
        )  # fmt: skip
