"""Pages selected for each request and key/value head, against attention with the rest masked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.emulator import Emulator

import warploom as wl
from warploom import errors
from warploom.codegen.compilers.hostcc import host_target
from warploom.dsl.reference import naive_attention, reference_attention
from warploom.dsl.types.rounding import assert_close
from warploom.runtime.formats import make_batch
from warploom.runtime.formats.selected import Selected
from warploom.runtime.strategies import host_strategy

HEADS, KV_HEADS, DIM, PAGES = 4, 2, 64, 60


class Kept(wl.Variant):
    """All keys of a request but those of pages that were not selected for the head."""

    kept = wl.Tensor("bool", ("kv_head", "kv_pos"))

    def logits_mask(self, at: Any) -> Any:
        return self.kept[at.kv_head, at.kv_pos]


def wrapper(
    variant: wl.Variant, page_size: int, dtype: str, layout: Any, tile: wl.TileConfig | None = None
) -> Any:
    return wl.PageSelectionWrapper(
        variant, kv_format=wl.Paged(page_size, layout=layout), num_q_heads=HEADS,
        num_kv_heads=KV_HEADS, head_dim=DIM, dtype=dtype, device="cpu", tile=tile,
    )  # fmt: skip


def indptr(lengths: Any) -> Any:
    return np.cumsum([0, *lengths])


class Trial:
    """Requests of which each head keeps some pages, the last one always."""

    def __init__(self, q_lens: list[int], seed: int, page_size: int, budget: int, dtype: str):
        rng = self.rng = np.random.default_rng(seed)
        self.page_size, self.dtype = page_size, dtype
        self.q_lens = q_lens
        self.tables = [rng.permutation(PAGES)[: rng.integers(1, 12)] for _ in q_lens]
        self.last = rng.integers(1, page_size + 1, len(q_lens)).astype(np.int32)
        self.counts = np.array([rng.integers(1, min(budget, len(t)) + 1) for t in self.tables])
        element = getattr(torch, dtype)
        shape = (PAGES, page_size, KV_HEADS, DIM)
        self.k, self.v = (torch.from_numpy(rng.standard_normal(shape)).to(element) for _ in "kv")
        self.q = torch.from_numpy(rng.standard_normal((sum(q_lens), HEADS, DIM))).to(element)
        self.budget = budget

    def choose(self) -> torch.Tensor:
        """A selection, and as `self.chosen` the table's places of each."""
        selection = torch.full((len(self.q_lens), KV_HEADS, self.budget), 0, dtype=torch.int32)
        self.chosen = {}
        for request, table in enumerate(self.tables):
            for head in range(KV_HEADS):
                count = self.counts[request]
                early = np.sort(self.rng.permutation(len(table) - 1)[: count - 1])
                places = np.append(early, len(table) - 1)
                self.chosen[request, head] = places
                selection[request, head, :count] = torch.from_numpy(table[places])
        return selection

    def check(self, out: torch.Tensor, layout: str) -> None:
        begins = np.cumsum([0, *self.q_lens])
        for request, table in enumerate(self.tables):
            rows = slice(int(begins[request]), int(begins[request + 1]))
            length = (len(table) - 1) * self.page_size + int(self.last[request])
            k, v = (x[table].flatten(0, 1)[:length] for x in (self.k, self.v))
            kept = np.zeros((KV_HEADS, length), bool)
            for head in range(KV_HEADS):
                for place in self.chosen[request, head]:
                    kept[head, place * self.page_size : (place + 1) * self.page_size] = True
            given = Kept(kept=kept), self.q[rows], k, v
            exact, _ = reference_attention(*given)
            naive, _ = naive_attention(*given, round_to=self.dtype)
            assert_close(out[rows].double(), exact, naive, self.dtype)


KERNELS = [
    (1, "float32", "NHD"),
    (5, "bfloat16", "HND"),
    (16, "float32", "HND"),
    (16, "bfloat16", "NHD"),
]


@settings(max_examples=40, deadline=None)
@given(
    q_lens=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
    kernel=st.sampled_from(KERNELS),
    budget=st.integers(1, 9),
)
def test_heads_read_their_own_pages(
    q_lens: list[int], seed: int, kernel: tuple[int, str, str], budget: int
) -> None:
    page_size, dtype, layout = kernel
    trial = Trial(q_lens, seed, page_size, budget, dtype)
    attention = wrapper(wl.Variant(), page_size, dtype, layout)
    stored = [x if layout == "NHD" else x.transpose(1, 2).contiguous() for x in (trial.k, trial.v)]
    selection = trial.choose()
    attention.plan(np.cumsum([0, *q_lens]), indptr(trial.counts), selection, trial.last)
    trial.check(attention.run(trial.q, tuple(stored)), layout)
    selection.copy_(trial.choose())  # new contents, same plan
    trial.check(attention.run(trial.q, tuple(stored)), layout)
    attention.select(trial.choose())  # another tensor
    trial.check(attention.run(trial.q, tuple(stored)), layout)


def check_mix(tile: wl.TileConfig, page_size: int, dtype: str) -> None:
    """A mix of which either role has some, and either alone, with selections that change."""
    attention = wrapper(wl.Variant(), page_size, dtype, "NHD", tile)
    for seed, (q_lens, roles) in enumerate(
        (([70, 1, 2, 0, 33, 1], {0, 1}), ([1] * 5, {1}), ([40, 90], {0}))
    ):
        trial = Trial(q_lens, seed, page_size, 9, dtype)
        selection = trial.choose()
        attention.plan(indptr(q_lens), indptr(trial.counts), selection, trial.last)
        assert set(attention.planned.plan.role.tolist()) == roles
        trial.check(attention.run(trial.q, (trial.k, trial.v)), "NHD")
        selection.copy_(trial.choose())
        trial.check(attention.run(trial.q, (trial.k, trial.v)), "NHD")


def test_tiles_of_two_roles_read_selections() -> None:
    check_mix(wl.TileConfig(48, 128, decode=wl.TileConfig(12, 64)), 16, "float32")


@pytest.mark.parametrize(
    ("tile", "page_size"),
    [
        (wl.TileConfig(64, 64, 4, 2, "hopper", 2, decode=wl.TileConfig(8, 96, 3, 2)), 16),
        (wl.TileConfig(64, 64, 4, 2, "hopper", 2, decode=wl.TileConfig(16, 64, 2, 2)), 1),
        (wl.TileConfig(64, 64, 4, 2, decode=wl.TileConfig(16, 64, 2, 2)), 16),
    ],
    ids=["8 rows", "16 rows", "portable"],
)
def test_emulated_tiles_of_two_roles_read_selections(
    emulator: Emulator, tile: wl.TileConfig, page_size: int
) -> None:
    emulator.order = 5
    check_mix(tile, page_size, "bfloat16")


def test_a_slice_of_a_larger_buffer() -> None:
    trial = Trial([1, 1], 3, 16, 4, "float32")
    attention = wrapper(wl.Variant(), 16, "float32", "NHD")
    buffer = torch.full((5, 3, KV_HEADS, 7), -1, dtype=torch.int32)  # [request, layer, head, page]
    buffer[:2, 1, :, :4] = trial.choose()
    attention.plan([0, 1, 2], indptr(trial.counts), buffer[:, 1], trial.last)
    trial.check(attention.run(trial.q, (trial.k, trial.v)), "NHD")


GOOD = torch.zeros(2, KV_HEADS, 4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("selection", "pages", "last", "error", "text"),
    [
        (GOOD.long(), [1, 1], [1, 1], errors.WrongDType, r"kv_indices.*\.to\(torch.int32\)"),
        (GOOD[:1], [1, 1], [1, 1], errors.WrongShape, "requests>=2"),
        (GOOD[:, :1], [1, 1], [1, 1], errors.WrongShape, "kv_head=2"),
        (GOOD.mT.contiguous().mT, [1, 1], [1, 1], errors.WrongStride, "the last must be 1"),
        (
            GOOD,
            [1, 5],
            [1, 1],
            errors.BadLength,
            r"pages of kv_indptr\[1\] is 5; expected at most 4",
        ),
        (GOOD, [1, -1], [1, 1], errors.BadIndptr, "kv_indptr decreases"),
        (GOOD, [1, 1], [1, 17], errors.BadLength, "1 to 16"),
        (GOOD, [1], [1, 1], errors.BadIndptr, "kv_indptr has 2, of 1"),
        (None, [1, 1], [1, 1], errors.ArgumentError, "kv_indices.*needs it"),
    ],
)
def test_wrong_selections(
    selection: Any, pages: Any, last: Any, error: type[Exception], text: str
) -> None:
    attention = wrapper(wl.Causal(), 16, "float32", "NHD")
    with pytest.raises(error, match=text):
        attention.plan([0, 1, 2], indptr(pages), selection, last)


def test_a_selection_that_would_be_copied_is_refused() -> None:
    """What it says later would not be seen."""
    attention, frozen = wrapper(wl.Causal(), 16, "float32", "NHD"), GOOD.numpy().copy()
    frozen.flags.writeable = False
    for copied, text in ((frozen, "read-only"), (GOOD.numpy()[::-1], "runs backwards")):
        with pytest.raises(errors.ArgumentError, match=f"kv_indices: .*{text}"):
            attention.plan([0, 1, 2], [0, 1, 2], copied, [1, 1])
    attention.plan([0, 1, 2], [0, 1, 2], GOOD.numpy(), [1, 1])


def test_select_wants_a_plan_and_its_shape() -> None:
    attention = wrapper(wl.Causal(), 16, "float32", "NHD")
    with pytest.raises(errors.NotPlanned):
        attention.select(GOOD)
    with pytest.raises(errors.NotPlanned):
        attention.check_selection(torch.zeros(PAGES, 2, 16, KV_HEADS, DIM))
    attention.plan([0, 1, 2], [0, 1, 5], GOOD, [3, 16])
    with pytest.raises(errors.WrongShape, match=r"expected \(2, 2, 4\), as planned\. Plan again"):
        attention.select(torch.zeros(2, KV_HEADS, 5, dtype=torch.int32))
    with pytest.raises(errors.WrongShape, match=r"expected \(2, 2, 4\), as planned\. Plan again"):
        attention.select(GOOD[:1])
    with pytest.raises(errors.WrongStride, match=r"\(8, 4, 1\), as planned\. Plan again with"):
        attention.select(torch.zeros(2, KV_HEADS, 8, dtype=torch.int32)[..., :4])
    with pytest.raises(errors.ArgumentError, match="Paged"):
        wl.PageSelectionWrapper(
            num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, dtype="float32", device="cpu"
        )
    with pytest.raises(errors.ArgumentError, match="backend"):
        wl.PageSelectionWrapper(
            kv_format=wl.Paged(16), num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM,
            dtype="float32", device="cpu", backend="reference",
        ).plan([0, 1], [0, 1], GOOD, [1])  # fmt: skip


@pytest.mark.parametrize("page", [-1, PAGES, 10**6])
def test_a_page_outside_of_the_cache_is_refused(page: int) -> None:
    trial = Trial([1, 1], 5, 16, 4, "float32")
    trial.counts = np.array([2, 1])
    attention = wrapper(wl.Variant(), 16, "float32", "NHD")
    selection = torch.zeros(2, KV_HEADS, 4, dtype=torch.int32)
    attention.plan([0, 1, 2], indptr(trial.counts), selection, [16, 16])
    selection[0, :, 2:] = selection[1, :, 1:] = page  # never read
    good = attention.run(trial.q, (trial.k, trial.v))
    selection[0, 1, 1] = page
    text = rf"kv_indices\[0, 1, 1\] is {page}; valid are 0 to {PAGES - 1}"
    for cache in ((trial.k, trial.v), torch.stack((trial.k, trial.v), 1)):
        with pytest.raises(errors.IndexOutOfRange, match=text):
            attention.run(trial.q, cache)
        with pytest.raises(errors.IndexOutOfRange, match=text):
            attention.check_selection(cache)
    selection[0, 1, 1] = 0
    torch.testing.assert_close(attention.run(trial.q, (trial.k, trial.v)), good)


@pytest.mark.parametrize(
    ("strides", "fits"),
    [((2**29, 2**29, 1), True), ((2**30, 1, 1), False), ((1, 2**31, 1), False)],
)
def test_a_view_with_entries_too_far_apart_is_refused(strides: tuple[int, ...], fits: bool) -> None:
    view = torch.empty_strided((3, KV_HEADS, 1), strides, dtype=torch.int32, device="meta")
    rows, ones, paged = (
        np.arange(4, dtype=np.int32),
        np.ones(3, np.int32),
        Selected.of(wl.Paged(16)),
    )
    if fits:
        begins = make_batch(paged, rows, rows, view, ones).segments["index_begin"]
        assert begins.tolist() == [i * strides[0] for i in range(3)]
        return
    with pytest.raises(errors.WrongStride, match="kv_indices"):
        make_batch(paged, rows, rows, view, ones)


def test_warm_selections_build_no_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy plans them, and declarations name no other kernel than that of attention."""
    made: list[Any] = []
    monkeypatch.setattr(host_strategy, "HostPlanner", lambda *spec: made.append(spec))
    declaration = wl.PageSelectionDeclaration(
        wl.Causal(), kv_format=wl.Paged(16), num_q_heads=4, head_dim=64, dtype="float32"
    )
    host = host_target()
    assert {source.labels[0] for source, _ in declaration.jobs(host, [host])} == {("kind", "cpu")}
    declaration.on("cpu").warm_up(progress=False)
    assert not made


def test_no_requests_have_a_selection_of_any_strides() -> None:
    attention = wl.PageSelectionWrapper(
        None, kv_format=wl.Paged(4), num_q_heads=2, head_dim=8, dtype="float32", device="cpu"
    )
    for selection in (torch.zeros(0, 2, 8).int(), torch.from_numpy(np.zeros((0, 2, 8), np.int32))):
        attention.plan([0], [0], selection, [])
        assert attention.run(torch.zeros(0, 2, 8), torch.zeros(1, 2, 4, 2, 8)).shape == (0, 2, 8)
