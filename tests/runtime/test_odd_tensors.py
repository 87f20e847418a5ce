"""Tensors whose memory does not hold their values plainly, or holds two of them at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import warploom as wl
from warploom.errors import ArgumentError, WrongShape, WrongStride

torch.manual_seed(0)
Q, K, V = torch.randn(3, 1, 8, 4, 32)


def negative(x: torch.Tensor) -> torch.Tensor:
    """The same values, of which the memory holds the negatives."""
    found = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert found.is_neg()
    return found


def test_lazy_negatives_are_worked_out() -> None:
    slopes = torch.rand(4)
    expected = wl.attention(Q, K, V, variant=wl.Alibi(slopes))
    for q, k, v, bound in (
        (negative(Q), K, V, slopes),
        (Q, negative(K), negative(V), slopes),
        (Q, K, V, negative(slopes)),
    ):
        torch.testing.assert_close(wl.attention(q, k, v, variant=wl.Alibi(bound)), expected)
    lazy = negative(slopes)
    variant = wl.flex(lambda s, b, h, i, j: s + lazy[h] * (j - i))
    plain = wl.flex(lambda s, b, h, i, j: s + slopes[h] * (j - i))
    found = wl.attention(Q, K, V, variant=variant)
    torch.testing.assert_close(found, wl.attention(Q, K, V, variant=plain))


def test_a_wrapper_that_knows_a_tensor_sees_that_the_next_is_a_lazy_negative() -> None:
    wrapper = wl.AttentionWrapper(num_q_heads=4, head_dim=32, dtype="float32", device="cpu")
    wrapper.plan([0, 8], [0, 8])
    q, k, v = Q[0], K[0], V[0]
    expected = wrapper.run(q, (k, v))
    torch.testing.assert_close(wrapper.run(negative(q).contiguous(), (k, v)), expected)
    turned = torch._neg_view(-q)  # pyright: ignore
    assert turned.stride() == q.stride()
    torch.testing.assert_close(wrapper.run(turned, (k, v)), expected)
    with pytest.raises(ArgumentError, match="negative view"):
        wrapper.run(q, (k, v), out=turned)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_sparse_and_nested_tensors_are_told_what_to_do() -> None:
    with pytest.raises(ArgumentError, match="to_dense"):
        wl.attention(Q.to_sparse(), K, V)
    with pytest.raises(ArgumentError, match="nested"):
        wl.attention(torch.nested.nested_tensor([Q[0]]), K, V)


def test_caches_that_share_memory_are_not_written() -> None:
    new, table = torch.ones(1, 2, 32), ([0, 1], [0, 1], [7], [1])
    with pytest.raises(WrongStride, match="expanded"):
        wl.append(new, new, torch.zeros(1, 2, 4, 2, 32).expand(10, 2, 4, 2, 32), *table)
    cache = torch.zeros(10, 4, 2, 32)
    with pytest.raises(ArgumentError, match="its own memory"):
        wl.append(new, new, (cache, cache), *table)
    assert not cache.any()


@pytest.mark.parametrize("block", [4, (0, 4), (4,), ("a", 4)])
def test_blocks_of_no_size_are_refused(block: Any) -> None:
    with pytest.raises(ArgumentError, match="block"):
        wl.block_rows(torch.ones(8, 8, dtype=torch.bool), block)


def test_additive_masks_are_no_rows_of_blocks() -> None:
    with pytest.raises(ArgumentError, match="mask > -inf"):
        wl.block_rows(torch.zeros(8, 8), (4, 4))


def test_page_tables_have_all_pages_and_one_page_size() -> None:
    with pytest.raises(WrongShape, match="at least 4 entries"):
        wl.compose([wl.Level([0, 2], [0, 4], [1, 2, 3])], page_size=4)
    tree = wl.RadixTree.from_tokens([[1, 2, 3]], page_size=2)
    with pytest.raises(ArgumentError, match="pages of 2"):
        wl.compose(tree, page_size=4)
    assert wl.compose(tree, page_size=2)["kv_indptr"].tolist() == [0, 2]


def test_lists_of_lists_are_no_indices() -> None:
    wrapper = wl.AttentionWrapper(
        kv_format=wl.Paged(4), num_q_heads=1, head_dim=32, dtype="float32", device="cpu"
    )
    with pytest.raises(ArgumentError, match="kv_indices"):
        wrapper.plan([0, 1, 2], [0, 2, 3], [[7, 2], [4]], [4, 4])


def test_a_mask_of_another_width_is_not_read_as_padding() -> None:
    wide = torch.ones(8, 12, dtype=torch.bool).tril()
    with pytest.raises(ArgumentError, match="8 rows of 8"):
        wl.attention(Q, K, V, variant=wl.PackedMask(*wl.pack_masks([wide])))
