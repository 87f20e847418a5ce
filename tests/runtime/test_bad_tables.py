"""What describes no page table, no rows and no input is refused with what was expected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom import errors


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"page_size": 0}, "page_size: is 0; expected an int of at least 1"),
        ({"page_size": 4.0}, r"page_size: is 4\.0; expected an int"),
        ({"page_size": 4, "first_page": -1}, "first_page: is -1; expected an int of at least 0"),
        ({"page_size": 4, "first_page": "a"}, "first_page: is 'a'; expected an int"),
    ],
)
def test_trees_have_pages(given: Any, text: str) -> None:
    for make in (wl.RadixTree, lambda **sizes: wl.RadixTree.from_tokens([[1]], **sizes)):
        with pytest.raises(errors.ArgumentError, match=text):
            make(**given)


def test_trees_are_made_of_sequences() -> None:
    tokens: Any = 3
    with pytest.raises(errors.ArgumentError, match="sequences: is 3; expected one list of token"):
        wl.RadixTree.from_tokens(tokens, 4)
    with pytest.raises(errors.WrongShape, match="tokens has shape"):
        wl.RadixTree.from_tokens([1, 2], 4)
    with pytest.raises(errors.WrongDType, match="tokens has dtype float64"):
        wl.RadixTree(4).insert([1.5])


ONE = wl.Part([0], [1])
GROUPS = wl.Level([0, 1, 2], [0, 1, 3], [5, 6, 7], last_page_len=[4, 0])


@pytest.mark.parametrize(
    ("source", "sizes", "text"),
    [
        (ONE, {}, r"source: is one Part; expected a RadixTree, or a list such as \[Part\("),
        (7, {}, "source: is 7; expected a RadixTree"),
        ([wl.Part(0, [1])], {}, r"Part: requests are 0; expected a list of whole numbers"),  # type: ignore[arg-type]
        ([wl.Part([0], 1)], {}, r"Part: pages are 1; expected a list of whole numbers"),  # type: ignore[arg-type]
        ([wl.Part([0], [1.5])], {}, r"pages are \[1\.5\]; expected"),  # type: ignore[list-item]
        ([wl.Part([0], [2**40])], {}, "pages: 1099511627776 is beyond 2147483647"),
        ([wl.Part([2**40], [0])], {}, "requests: 1099511627776 is beyond"),
        ([wl.Part([0], [1], "x")], {}, r"is 'x' in source\[0\], .* 1 page; expected 1 to 4"),  # type: ignore[arg-type]
        ([GROUPS], {}, r"last_page_len: is 0 in group 1 of source\[0\], which has 2 pages; expec"),
        ([ONE], {"page_size": 0}, "page_size: is 0; expected an int of at least 1"),
        ([ONE], {"num_requests": "3"}, "num_requests: is '3'; expected an int of at least 0"),
        ([], {"num_requests": -1}, "num_requests: is -1; expected an int of at least 0"),
    ],
)
def test_parts(source: Any, sizes: Any, text: str) -> None:
    with pytest.raises(errors.ArgumentError, match=text):
        wl.compose(source, **{"page_size": 4, **sizes})


@pytest.mark.parametrize("last", [[1], [1, 2, 3]])
def test_levels_have_one_last_page_for_each_group(last: list[int]) -> None:
    level = wl.Level([0, 1, 2], [0, 1, 2], [0, 1], last)
    with pytest.raises(errors.WrongShape, match=r"last_page_len has shape .*expected \(2,\)"):
        wl.compose([level], page_size=4)


def test_parts_may_hold_any_integers() -> None:
    table = wl.compose(
        [wl.Part(range(2), np.array([3])), wl.Part([1], torch.tensor([5]), np.int32(2))],  # type: ignore[arg-type]
        page_size=4,
    )
    assert table["kv_indices"].tolist() == [3, 3, 5]
    assert table["last_page_len"].tolist() == [4, 2]


def test_appends_need_the_rows_that_indptr_tells() -> None:
    k, cache = torch.zeros(2, 2, 16), torch.zeros(4, 2, 4, 2, 16)
    text = r"k has shape \[2, .*\]; expected \[3 or more, heads, dim\], since indptr\[-1\] is 3"
    with pytest.raises(errors.WrongShape, match=text):
        wl.append(k, k, cache, [0, 3], [0, 1], [2], [3])


def test_plain_attention_lists_what_it_takes() -> None:
    q = torch.zeros(1, 2, 2, 16)
    unknown: Any = {"foo": 3}
    text = (
        "attention without a variant has no input 'foo'. It takes: nothing, since it has no "
        r"fields; attention\(\) itself takes variant, sm_scale, return_lse, return_aux, layout"
    )
    with pytest.raises(errors.UnknownInput, match=text):
        wl.attention(q, q, q, **unknown)
    text = r"'kernel_options'\. Leave it out: tiles are chosen"
    with pytest.raises(errors.UnknownInput, match=text):
        wl.attention(q, q, q, kernel_options={})  # type: ignore[arg-type]


TABLE: dict[str, Any] = {
    "qo_indptr": [0, 1, 2],
    "kv_indptr": [0, 3, 5],
    "kv_indices": [7, 2, 4, 0, 9],
    "last_page_len": [8, 4],
}
PAGES = wl.Paged(16)
ORDER = r"needs it: \(qo_indptr, kv_indptr, kv_indices, last_page_len\); a decode's "


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize(
    ("kv_format", "given", "text"),
    [
        (PAGES, {"kv_indptr": [0, 40, 60]}, "of a Paged cache counts pages, not tokens"),
        (wl.Composed(16), {"kv_indptr": [0, 40, 60]}, "of a Composed cache counts pages, not"),
        (PAGES, {"last_page_len": [0, 4]}, r"is 0; expected 1 to 16, which is \(kv_len - 1\) % 16"),
        (PAGES, {"last_page_len": [40, 4]}, r"\(kv_len - 1\) % 16 \+ 1; 0 is for requests without"),
        (PAGES, {"last_page_len": None}, f"{ORDER}qo_indptr is range"),
        (
            PAGES,
            {"last_page_len": None, "kv_lens": [40, 20]},
            r"give last_page_len, which is \(kv_len - 1\) % 16 \+ 1; 0 is for requests without",
        ),
    ],
)
def test_tables_that_count_otherwise(kv_format: Any, given: Any, text: str, backend: Any) -> None:
    attention = wl.AttentionWrapper(
        num_q_heads=2, head_dim=16, dtype="float32", kv_format=kv_format, device="cpu",
        backend=backend,
    )  # fmt: skip
    with pytest.raises(errors.ArgumentError, match=text):
        attention.plan(**{**TABLE, **given})


def test_other_lists_count_blocks_and_pages() -> None:
    rows = wl.AttentionWrapper(
        kv_format=wl.BlockSparse((2, 4)), num_q_heads=2, head_dim=16, dtype="float32", device="cpu",
        backend="reference",
    )  # fmt: skip
    with pytest.raises(errors.WrongShape, match="of BlockSparse counts blocks, not tokens"):
        rows.plan([0, 2], [0, 8], [0, 1], kv_lens=[8])
    with pytest.raises(errors.WrongShape, match="of a Level counts pages, not tokens"):
        wl.compose([wl.Level([0, 1], [0, 8], [0, 1])], page_size=4)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("empty", [[], torch.tensor([]), np.array([]), np.array([], np.float32)])
def test_no_indices_need_no_type(empty: Any, backend: Any) -> None:
    attention = wl.AttentionWrapper(
        num_q_heads=2, head_dim=16, dtype="float32", kv_format=PAGES, device="cpu", backend=backend
    )
    attention.plan([0, 2], [0, 0], empty, [0])
    out = attention.run(torch.ones(2, 2, 16), torch.zeros(1, 2, 16, 2, 16))
    assert not out.any()
    with pytest.raises(errors.WrongDType, match="kv_indices has dtype float"):
        attention.plan([0, 2], [0, 1], [0.0], [3])


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize(("given", "shown"), [(None, "None"), ("abc", "a str"), ({}, "a dict")])
def test_index_arrays_may_be_lists(given: Any, shown: str, backend: Any) -> None:
    attention = wl.AttentionWrapper(
        num_q_heads=2, head_dim=16, dtype="float32", kv_format=PAGES, device="cpu", backend=backend
    )
    text = f"qo_indptr: is {shown}; expected a list, an array or a tensor"
    with pytest.raises(errors.ArgumentError, match=text):
        attention.plan(**{**TABLE, "qo_indptr": given})


def test_none_is_no_tensor() -> None:
    q, none = torch.zeros(1, 2, 2, 16), None
    with pytest.raises(errors.ArgumentError, match=r"^k: is None; expected a tensor.$"):
        wl.attention(q, none, q)


def test_a_group_without_pages_may_have_any_last_page() -> None:
    """`compose` itself returns 0 for requests without pages, as `plan` takes it."""
    level = wl.Level([0, 1, 2], [0, 1, 1], [5], last_page_len=[4, 0])
    table = wl.compose([level, wl.Part([1], [], 9)], page_size=4)
    assert {name: array.tolist() for name, array in table.items()} == {
        "kv_indptr": [0, 1, 1], "kv_indices": [5], "last_page_len": [4, 0]
    }  # fmt: skip
