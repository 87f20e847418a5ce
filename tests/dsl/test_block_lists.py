"""The lists of a `BlockMask` mean what they mean in torch, whatever its mask_mod says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import warploom as wl
from warploom.dsl.reference import reference_attention
from warploom.dsl.variants.trace import trace
from warploom.errors import ArgumentError, WrongShape

BATCH, Q_HEADS, KV_HEADS, ROWS, KEYS, DIM = 2, 4, 2, 150, 290, 16
SIZES = 32, 64


def shifted(b, h, q_idx, kv_idx):
    return q_idx + 100 >= kv_idx


def by_head(b, h, q_idx, kv_idx):
    return (q_idx + kv_idx + h + b) % 3 != 0


def listed(states: torch.Tensor, state: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts and indices of the blocks in a state, as torch keeps them."""
    named = states == state
    order = torch.argsort(named.int(), dim=-1, descending=True, stable=True)
    return named.sum(-1).int(), order.int()


def block_mask(
    states: torch.Tensor, mask_mod: Any, lengths: tuple[int, int] = (ROWS, KEYS)
) -> BlockMask:
    """A BlockMask of blocks that are absent (0), partial (1) or full (2)."""
    whole = listed(states, 2) if bool((states == 2).any()) else (None, None)
    return BlockMask.from_kv_blocks(
        *listed(states, 1), *whole, BLOCK_SIZE=SIZES, mask_mod=mask_mod, seq_lengths=lengths
    )


def random_states(batch: int, heads: int, most: int) -> torch.Tensor:
    torch.manual_seed(batch + 10 * heads)
    shape = batch, heads, -(-ROWS // SIZES[0]), -(-KEYS // SIZES[1])
    states = torch.randint(0, most + 1, shape)
    states[..., 1, :] = 0  # rows that see nothing
    return states


def dense(states: torch.Tensor, mask_mod: Any) -> torch.Tensor:
    """[batch, heads, rows, keys] bool, by torch."""
    rows, keys = torch.arange(ROWS)[:, None], torch.arange(KEYS)
    batch, head = torch.arange(BATCH)[:, None, None, None], torch.arange(Q_HEADS)[:, None, None]
    seen = torch.ones(ROWS, KEYS, dtype=torch.bool)
    seen = seen if mask_mod is None else mask_mod(batch, head, rows, keys)
    state = states[:, :, rows // SIZES[0], keys // SIZES[1]]
    return ((state == 2) | ((state == 1) & seen)).expand(BATCH, Q_HEADS, ROWS, KEYS)


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    q = torch.randn(BATCH, Q_HEADS, ROWS, DIM)
    k, v = (torch.randn(BATCH, KV_HEADS, KEYS, DIM) for _ in range(2))
    return q, k, v


CASES = [
    (BATCH, Q_HEADS, 2, by_head),
    (1, 1, 2, None),
    (BATCH, 1, 1, None),
    (1, Q_HEADS, 2, shifted),
    (1, 1, 1, by_head),
]


@pytest.mark.some(3)
@pytest.mark.parametrize(("batch", "heads", "most", "mask_mod"), CASES)
def test_lists_and_mask_mod_together_say_what_is_visible(batch, heads, most, mask_mod) -> None:
    states = random_states(batch, heads, most)
    q, k, v = tensors()
    variant = wl.flex(None, block_mask(states, mask_mod))
    found = wl.attention(q, k, v, variant=variant, layout="HND")
    seen = dense(states, mask_mod)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.double() for x in (q, k, v)), attn_mask=seen, enable_gqa=True
    ).nan_to_num()
    torch.testing.assert_close(found, expected.float(), atol=2e-5, rtol=2e-5)
    for b in range(BATCH):
        given = (x[b].transpose(0, 1) for x in (q, k, v))
        out, _ = reference_attention(variant, *given, batch=b)
        np.testing.assert_allclose(out, expected[b].transpose(0, 1), atol=1e-9)


def test_they_agree_with_compiled_flex_attention() -> None:
    mask = block_mask(random_states(BATCH, Q_HEADS, 2), by_head)
    q, k, v = tensors()
    compiled = torch.compile(torch_flex.flex_attention)
    expected = compiled(q, k, v, block_mask=mask, enable_gqa=True)
    found = wl.attention(q, k, v, variant=wl.flex(block_mask=mask), layout="HND")
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("length", [128, 300])
@pytest.mark.parametrize(
    ("mask_mod", "sizes"),
    [
        (lambda b, h, q, k: q >= k, (None, None)),
        (lambda b, h, q, k: (q >= k) & (q - k < 70), (None, None)),
        (lambda b, h, q, k: (q >= k) | (h < 2), (None, Q_HEADS)),
        (lambda b, h, q, k: (q >= k) & (k >= 40 * b), (BATCH, None)),
    ],
)
def test_lists_that_say_what_the_mask_says_are_dropped(
    mask_mod: Any, sizes: Any, length: int
) -> None:
    made = create_block_mask(
        mask_mod, sizes[0], sizes[1], length, length, device="cpu", BLOCK_SIZE=32
    )
    assert trace(wl.flex(None, made)) == trace(wl.flex(None, mask_mod))


def test_lists_that_a_longer_mask_would_not_give_are_kept() -> None:
    states = torch.ones(1, 1, 5, 5)
    states[0, 0, 4, 0] = 0  # which a causal mask shows
    for heads, mask_mod in ((1, shifted), (1, by_head), (Q_HEADS, None)):
        variant = wl.flex(None, block_mask(states.expand(1, heads, 5, 5), mask_mod))
        assert [field.dtype.name for field in trace(variant).tensors] == ["uint8"]


def test_a_mask_of_captured_tensors_keeps_the_lists_it_was_given() -> None:
    document = torch.arange(ROWS) // 50

    def same_document(b, h, q_idx, kv_idx):
        return document[q_idx] == document[kv_idx]

    sizes = 1, 1, ROWS, ROWS
    mask = create_block_mask(same_document, *sizes, device="cpu", BLOCK_SIZE=32)
    variant = wl.flex(None, mask)
    assert len(trace(variant).tensors) == 2
    q, k, v = (x[:, :KV_HEADS, :ROWS] for x in tensors())
    found = wl.attention(q, k, v, variant=variant, layout="HND")
    seen = document[:, None] == document
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.some(3)
@pytest.mark.parametrize("mask_mod", [by_head, shifted, None])
@pytest.mark.parametrize(
    ("rows", "keys"),
    [(ROWS, KEYS + 1), (ROWS + 1, KEYS), (40, KEYS), (ROWS, 40), (40, 40), (300, 40), (40, 300)],
)
def test_other_lengths_are_refused_as_in_torch(rows: int, keys: int, mask_mod: Any) -> None:
    q, k, v = (torch.randn(BATCH, Q_HEADS, n, DIM) for n in (rows, keys, keys))
    given = mask_mod or torch_flex.noop_mask
    mask = create_block_mask(given, None, None, ROWS, KEYS, device="cpu", BLOCK_SIZE=32)
    for one in (mask, block_mask(random_states(1, 1, 2), mask_mod)):
        with pytest.raises((ValueError, AssertionError)):
            torch_flex.flex_attention(q, k, v, block_mask=one)
        variant = wl.flex(block_mask=one)
        with pytest.raises(
            ArgumentError, match=rf"lists of {ROWS} .* {rows} rows and {keys} k"
        ) as e:
            wl.attention(q, k, v, variant=variant, layout="HND")
        assert ("_adjust(q_len, kv_len)" in str(e.value)) == (rows <= ROWS and keys <= KEYS)
        with pytest.raises(ArgumentError, match=r"mask_mod=block_mask\.mask_mod"):
            wl.attention(q, k, v, variant=variant & wl.SoftCap(5.0), layout="HND")
    alone = wl.flex(mask_mod=mask.mask_mod)
    assert wl.attention(q, k, v, variant=alone, layout="HND").shape == q.shape


def test_masks_are_cropped_and_made_anew_as_in_torch() -> None:
    q, k, v = tensors()
    mask = create_block_mask(shifted, None, None, 2 * ROWS, 2 * KEYS, device="cpu", BLOCK_SIZE=32)
    cropped = wl.flex(block_mask=mask._adjust(ROWS, KEYS))
    found = wl.attention(q, k, v, variant=cropped, layout="HND")
    expected = wl.attention(q, k, v, variant=wl.flex(mask_mod=shifted), layout="HND")
    torch.testing.assert_close(found, expected)


def test_slices_of_masks_need_a_mask_mod_and_lengths_as_in_torch() -> None:
    q, k, v = tensors()
    row = torch.tensor(33)
    whole = create_block_mask(shifted, None, None, ROWS, KEYS, device="cpu", BLOCK_SIZE=32)
    sliced: Any = whole[:, :, 1]
    with pytest.raises(ArgumentError, match=r"is a slice .* q_idx \+ offset, kv_idx\), and sliced"):
        wl.flex(block_mask=sliced)
    sliced.mask_mod = lambda b, h, q_idx, kv_idx: shifted(b, h, q_idx + row, kv_idx)
    with pytest.raises(ArgumentError, match=r"block_mask\.seq_lengths = .* that was sliced"):
        wl.attention(q[:, :, :1], k, v, variant=wl.flex(block_mask=sliced), layout="HND")
    sliced.seq_lengths = (1, KEYS)
    found = wl.attention(q[:, :, 33:34], k, v, variant=wl.flex(block_mask=sliced), layout="HND")
    expected = wl.attention(q, k, v, variant=wl.flex(mask_mod=shifted), layout="HND")
    torch.testing.assert_close(found, expected[:, :, 33:34])


def test_the_mask_for_no_mask_fits_every_length() -> None:
    q, k, v = tensors()
    none = torch_flex._create_empty_block_mask(
        q[:, :, :3], k[:, :, :5]
    )  # what torch takes for None
    found = wl.attention(q, k, v, variant=wl.flex(block_mask=none), layout="HND")
    torch.testing.assert_close(found, wl.attention(q, k, v, layout="HND"))


def test_rows_read_by_position_need_lists_that_are_long_enough() -> None:
    q, k, v = tensors()
    for lengths, is_refused in (((KEYS, KEYS), False), ((ROWS, KEYS), True)):
        states = torch.ones(1, 1, -(-lengths[0] // 32), -(-lengths[1] // 64))
        states[0, 0, 0, 0] = 0
        mask = block_mask(states, by_head, lengths)
        variant = wl.flex(block_mask=mask, q_idx="position")
        if is_refused:
            with pytest.raises(ArgumentError, match="290 keys and positions of rows"):
                wl.attention(q, k, v, variant=variant, layout="HND")
        else:
            wl.attention(q[:, :, :1], k[:, :, :200], v[:, :, :200], variant=variant, layout="HND")
    causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, 64, 64, device="cpu")
    variant = wl.flex(block_mask=causal, q_idx="position")  # needs no lists
    wl.attention(q, k, v, variant=variant, layout="HND")


def test_lists_of_other_batches_and_heads_are_refused() -> None:
    q, k, v = tensors()
    three = wl.flex(None, block_mask(random_states(3, 1, 2), None))
    same = create_block_mask(shifted, 3, None, ROWS, KEYS, device="cpu", BLOCK_SIZE=32)
    for variant in (three, wl.flex(None, same)):
        with pytest.raises(ArgumentError, match=r"of 3 requests; the batch has 2\. .* B=2, or B=N"):
            wl.attention(q, k, v, variant=variant, layout="HND")
    wide = wl.flex(None, block_mask(random_states(1, 8, 2), None))
    with pytest.raises(WrongShape, match=r"^block_mask has shape \(1, 8, .*H=4, or H=None"):
        wl.attention(q, k, v, variant=wide, layout="HND")


def test_lists_of_blocks_that_are_not_there_are_refused() -> None:
    counts, indices = listed(random_states(1, 1, 1), 1)
    for bad in ((counts + 9, indices), (counts, indices + 9)):
        mask = BlockMask.from_kv_blocks(
            *bad, BLOCK_SIZE=SIZES, seq_lengths=(ROWS, KEYS), compute_q_blocks=False
        )
        with pytest.raises(ArgumentError, match="kv_indices name blocks that are not there"):
            wl.flex(None, mask)


def test_one_of_mask_mod_and_block_mask_is_given() -> None:
    mask = block_mask(random_states(1, 1, 2), None)
    with pytest.raises(ArgumentError, match="give one of both"):
        wl.flex(None, shifted, block_mask=mask)
    with pytest.raises(ArgumentError, match=r"block_mask: is .*no BlockMask"):
        wl.flex(block_mask=shifted)


def of_requests(variant: wl.Variant) -> wl.AttentionWrapper:
    """A wrapper for q, k and v of requests one after another."""
    return wl.AttentionWrapper(
        variant,
        kv_format=wl.Ragged(),
        num_q_heads=Q_HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype="float32",
        device="cpu",
    )


def test_a_wrapper_reads_the_lists() -> None:
    states = random_states(1, 1, 2)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in tensors())
    variant = wl.flex(None, block_mask(states, shifted))
    wrapper = of_requests(variant)
    wrapper.plan([0, ROWS], [0, KEYS])
    expected, _ = reference_attention(variant, q, k, v)
    np.testing.assert_allclose(wrapper.run(q, (k, v)).numpy(), expected, atol=2e-5)
    with pytest.raises(ArgumentError, match="block_mask: has lists of 150"):
        wrapper.plan([0, ROWS + 1], [0, KEYS])
    wrapper.plan([0, 3, ROWS + 3], [0, 7, KEYS + 7])  # torch would pad to the longest


def test_a_wrapper_refuses_other_lengths_without_lists_too() -> None:
    mask = create_block_mask(shifted, None, None, ROWS, KEYS, device="cpu", BLOCK_SIZE=32)
    wrapper = of_requests(wl.flex(block_mask=mask))
    wrapper.plan([0, ROWS], [0, KEYS])
    with pytest.raises(ArgumentError, match="40 rows and 290 keys"):
        wrapper.plan([0, 40], [0, KEYS])


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_heads_taken_for_tokens_are_told_the_layout(layout: Any) -> None:
    mask = create_block_mask(shifted, None, None, ROWS, ROWS, device="cpu", BLOCK_SIZE=32)
    other = {"HND": "NHD", "NHD": "HND"}[layout]
    q, k, v = (x[:, :, :ROWS] for x in tensors())
    if other == "NHD":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    text = f"layout: is '{layout}', .* {Q_HEADS} rows .*'{other}' they have {ROWS} and {ROWS}, as"
    with pytest.raises(ArgumentError, match=text):
        wl.attention(q, k, v, variant=wl.flex(block_mask=mask), layout=layout, backend="reference")
