"""The composed format on the CPU: random trees of prefixes under every kind of hook, and limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.composed_variants import EveryHook, NormOfRequest
from support.parts import compiled
from support.sampling import few

import warploom as wl
from warploom import errors
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.runtime.trials.case import Case, Setup
from warploom.runtime.trials.trials import mismatch
from warploom.scheduler.composed import sharing
from warploom.scheduler.composed.plan import ComposedPlan
from warploom.scheduler.composed.verify import verify_composed
from warploom.testing import run_property, warm_up

SMALL, WIDE = wl.TileConfig(12, 64, 1, 1), wl.TileConfig(48, 128, 1, 1)
ROLES = wl.TileConfig(48, 128, 1, 1, decode=wl.TileConfig(12, 64, 1, 1))
FLAT = wl.TileConfig(12, 64, 1, 1, decode=wl.TileConfig(2, 64, 1, 1))


class KeysOfARequest(wl.Variant):
    """Shared keys look different to each request."""

    def value_transform(self, v: Value, at: Position) -> Value:
        return v * wl.to_float(at.batch + 1)


def on_cpu(page: int, dtype: str, dim: int, dim_v: int, tile: Any, layout: Any = "NHD") -> Setup:
    return Setup(wl.Composed(page, layout=layout), dtype, dim, dim_v, tile=tile)


POOL = [
    (wl.Variant(), on_cpu(16, "float32", 64, 64, SMALL)),
    (wl.Causal() & wl.SoftCap(5.0), on_cpu(1, "float16", 80, 80, WIDE)),
    (wl.SlidingWindow(9, 2, 3), on_cpu(1, "bfloat16", 64, 64, SMALL)),
    (wl.Causal() & wl.Rope(), on_cpu(16, "bfloat16", 128, 128, SMALL, "HND")),
    (wl.Causal() & wl.Alibi(), on_cpu(5, "float16", 96, 96, WIDE)),
    (wl.FlashSigmoid(bias=-2.0), on_cpu(7, "float32", 40, 40, SMALL)),
    (wl.Causal() & wl.AttentionSink(), on_cpu(4, "float32", 64, 32, SMALL)),
    (wl.Causal() & wl.DocumentMask(), on_cpu(3, "float32", 8, 64, SMALL)),
    (EveryHook(), on_cpu(4, "float32", 64, 64, SMALL)),
    (EveryHook(), on_cpu(2, "float32", 32, 64, WIDE)),
    (NormOfRequest(), on_cpu(4, "float32", 32, 32, SMALL)),
    (KeysOfARequest(), on_cpu(4, "float32", 16, 16, SMALL)),
    (wl.Causal() & wl.SoftCap(5.0), on_cpu(1, "float16", 80, 80, ROLES)),
    (wl.SlidingWindow(9, 2, 3), on_cpu(4, "bfloat16", 64, 64, FLAT)),
    (wl.FlashSigmoid(bias=-2.0), on_cpu(7, "float32", 40, 40, FLAT)),
    (EveryHook(), on_cpu(2, "float32", 32, 64, ROLES)),
    (NormOfRequest(), on_cpu(4, "float32", 32, 32, FLAT)),
    (
        wl.HeadKVScale() & wl.Causal(),
        Setup(wl.Composed(4), "bfloat16", 64, 64, tile=SMALL, kv_dtype="float8_e4m3fn"),
    ),
]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever may be a part is one, so that small batches have deep trees."""
    monkeypatch.setattr(sharing, "PER_ITEM", 0)
    monkeypatch.setattr(sharing, "PER_ROW", 0)


@pytest.mark.usefixtures("eager")
def test_random_trees_agree_with_the_oracle() -> None:
    run_property(warm_up(POOL), None, max_examples=few(40, of=80))


@pytest.mark.parametrize("subject", POOL, ids=lambda subject: f"{subject[0].name}-{subject[1]}")
@pytest.mark.parametrize("q_len", [1, 5])
def test_many_requests_of_several_levels(subject: Any, q_len: int) -> None:
    variant, setup = subject
    lengths = (700, 1, 0, 900, 650, 800, 777, 333, 640, 701, 702, 90)
    case = Case(setup, (q_len,) * 12, lengths, num_kv_heads=2, group_size=2, seed=q_len)
    found = mismatch(variant, case)
    assert found is None, found


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("seed", range(4))
def test_output_transforms_that_reduce_where_ctas_have_no_items(seed: int) -> None:
    """Few short requests: rows are merged by CTAs that never opened an item, too."""
    variant, setup = NormOfRequest(), on_cpu(4, "float32", 32, 32, SMALL)
    case = Case(setup, (3, 1, 2), (40, 33, 45), num_kv_heads=1, group_size=2, seed=seed)
    found = mismatch(variant, case)
    assert found is None, found


def page_table(prefix: int, lengths: list[int], page: int) -> dict[str, Any]:
    """Requests that share their first `prefix` keys."""
    shared = prefix // page
    parts = [wl.Part(range(len(lengths)), range(shared))]
    fresh = shared
    for i, length in enumerate(lengths):
        pages = -(-(length - prefix) // page)
        parts.append(wl.Part([i], range(fresh, fresh + pages), (length - 1) % page + 1))
        fresh += pages
    return wl.compose(parts, num_requests=len(lengths), page_size=page)


SHAPE: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32, "dtype": "float32"}


def both(variant: Any, qo_indptr: Any, table: dict[str, Any], page: int, **inputs: Any) -> Any:
    """Output and log-sum-exp of the composed format, and of the NumPy reading of a paged cache."""
    pages = int(table["kv_indices"].max(initial=0)) + 1
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(int(qo_indptr[-1]), 4, 32, generator=generator)
    kv = torch.randn(pages, 2, page, 2, 32, generator=generator)
    composed = wl.AttentionWrapper(variant, kv_format=wl.Composed(page), device="cpu", **SHAPE)
    single = wl.AttentionWrapper(
        variant, kv_format=wl.Paged(page), device="cpu", backend="reference", **SHAPE
    )
    for wrapper in (composed, single):
        wrapper.plan(qo_indptr, **table, **inputs)
    out, lse = composed.run(q, kv, return_lse=True)
    expected, sums = single.run(q, kv, return_lse=True)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(lse, sums, atol=1e-5, rtol=1e-4)
    return composed


def parts_of(wrapper: wl.AttentionWrapper) -> ComposedPlan:
    assert wrapper.planned is not None
    plan = wrapper.planned.plan
    assert isinstance(plan, ComposedPlan)
    segments = wrapper.planned.arrays.segments
    verify_composed(plan, segments, wrapper.planned.visibility, wrapper.kv_format.block_kv)
    return plan


def test_speculative_trees_over_a_shared_prefix() -> None:
    rows, lengths = 6, [640 + n for n in (30, 41, 64, 17, 99, 8)]
    rng = np.random.default_rng(0)
    masks = [np.tril(rng.random((rows, rows)) < 0.5) | np.eye(rows, dtype=bool) for _ in lengths]
    bits, offsets = wl.pack_masks(masks)
    variant = wl.TreeMask(torch.from_numpy(bits), torch.from_numpy(offsets))
    qo_indptr = np.arange(len(lengths) + 1) * rows
    plan = parts_of(both(variant, qo_indptr, page_table(640, lengths, 16), 16))
    assert any(choice.kept for choice in plan.choices)


def test_a_tree_of_tokens_has_several_levels() -> None:
    rng = np.random.default_rng(1)
    system, tools, chat = (rng.integers(0, 1000, n).tolist() for n in (400, 320, 240))
    sequences = [
        [*system, *middle, *rng.integers(0, 1000, 20 + i).tolist()]
        for i, middle in enumerate([tools] * 6 + [chat] * 6 + [[]] * 2)
    ]
    tree = wl.RadixTree.from_tokens(sequences, 16)
    assert tree.fresh[1] == 720 // 16
    assert tree.fresh[0] == 0
    assert tree.num_pages < sum(len(s) for s in sequences) / 16 / 2
    plan = parts_of(both(wl.Causal() & wl.Alibi(), np.arange(15), wl.compose(tree), 16))
    assert {choice.keys for choice in plan.choices if choice.kept} == {400, 320, 240}


def test_levels_are_a_list_of_formats() -> None:
    shared = wl.Level([0, 4, 8], [0, 40, 70], np.arange(70))
    own = wl.Level(np.arange(9), np.arange(9) * 2, np.arange(70, 86), [3, 16, 1, 2, 9, 9, 9, 9])
    table = wl.compose([shared, own], page_size=16)
    assert table["kv_indptr"].tolist() == [0, 42, 84, 126, 168, 200, 232, 264, 296]
    assert table["last_page_len"].tolist() == [3, 16, 1, 2, 9, 9, 9, 9]
    plan = parts_of(both(wl.SlidingWindow(500), np.arange(9), table, 16))
    assert [choice.requests for choice in plan.choices if choice.kept] == [4, 4]


def test_sequences_that_end_with_what_they_share() -> None:
    """One request's keys are all another's prefix: its own part is empty."""
    tree = wl.RadixTree.from_tokens([list(range(n)) for n in (512, 512, 600, 5, 0)], 16)
    both(wl.Causal(), [0, 1, 3, 4, 5, 5], wl.compose(tree), 16)


def test_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(errors.ArgumentError, match="share full pages only"):
        wl.compose([wl.Part([0, 1], [0, 1], 7), wl.Part([1], [2])], page_size=16)
    with pytest.raises(errors.ArgumentError, match="names request 3, but there are 2"):
        wl.compose([wl.Part([3], [0])], page_size=16, num_requests=2)
    with pytest.raises(errors.ArgumentError, match="expected 1 to 16"):
        wl.compose([wl.Part([0], [0], 17)], page_size=16)
    for requests in ([-2], [0, 0]):
        with pytest.raises(errors.ArgumentError, match="expected each once, from 0 on"):
            wl.compose([wl.Part([0, 1], [1, 2]), wl.Part(requests, [5])], page_size=16)
    with pytest.raises(errors.ArgumentError, match="-3 is no page"):
        wl.compose([wl.Part([0], [1, -3])], page_size=16)
    with pytest.raises(errors.ArgumentError, match="parts need it"):
        wl.compose([wl.Part([0], [0])])


def test_what_composed_plans_cannot_promise_is_refused() -> None:
    with pytest.raises(errors.ArgumentError, match="batch_invariant"):
        wl.AttentionWrapper(
            wl.Causal(), kv_format=wl.Composed(16), device="cpu", batch_invariant=True, **SHAPE
        )


def test_keys_that_depend_on_the_request_are_not_shared() -> None:
    table = page_table(640, [700] * 6, 16)
    wrapper = both(KeysOfARequest(), np.arange(7), table, 16)
    assert parts_of(wrapper).choices == ()
    why = str(wrapper.explain().facts["shared prefixes"])
    assert why == "none: value_transform reads batch, which differs between requests"


def test_bounds_hold_and_are_named_when_they_do_not() -> None:
    table = page_table(640, [700, 650, 900, 641], 16)
    bounds = wl.Bounds(4, 4, 900, len(table["kv_indices"]))
    wrapper = wl.AttentionWrapper(
        wl.Causal(),
        kv_format=wl.Composed(16),
        device="cpu",
        bounds=bounds,
        cuda_graph=True,
        **SHAPE,
    )
    size = wrapper.workspace_size()
    wrapper.plan(np.arange(5), **table)
    address = compiled(wrapper).workspace.address("plan")
    assert wrapper.planned is not None
    assert wrapper.planned.size == size
    wrapper.plan(np.arange(4), **page_table(320, [400, 450, 333], 16))
    assert compiled(wrapper).workspace.address("plan") == address
    with pytest.raises(errors.BoundsExceeded, match="max_kv_len"):
        wrapper.plan(np.arange(3), **page_table(640, [1000, 700], 16))
    deep = wl.RadixTree.from_tokens([list(range(n)) for n in (800, 801, 400, 399)], 16)
    narrow = wl.Bounds(4, 4, 900, 400, max_levels=1)
    wrapper = wl.AttentionWrapper(
        wl.Causal(), kv_format=wl.Composed(16), device="cpu", bounds=narrow, **SHAPE
    )
    wrapper.plan(np.arange(5), **wl.compose(deep))
    assert not any(choice.kept for choice in parts_of(wrapper).choices)


def test_explain_tells_what_became_of_prefixes() -> None:
    wrapper = wl.AttentionWrapper(wl.Causal(), kv_format=wl.Composed(16), device="cpu", **SHAPE)
    wrapper.plan(np.arange(9), **page_table(640, [700] * 8, 16))
    facts = wrapper.explain().facts
    assert "640 keys of 8 requests: a part of its own" in str(facts["shared prefixes"])
    wrapper.plan([0, 1], **page_table(16, [60], 16))
    assert wrapper.explain().facts["shared prefixes"] == "none"


def test_runs_repeat_their_bits_whoever_comes_last() -> None:
    wrapper = wl.AttentionWrapper(wl.Causal(), kv_format=wl.Composed(16), device="cpu", **SHAPE)
    table = page_table(3200, [3300] * 8, 16)
    wrapper.plan(np.arange(9), **table)
    q, kv = torch.randn(8, 4, 32), torch.randn(300, 2, 16, 2, 32)
    first = wrapper.run(q, kv)
    for _ in range(20):
        assert torch.equal(wrapper.run(q, kv), first)
