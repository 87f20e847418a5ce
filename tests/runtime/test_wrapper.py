"""Plan and run on the CPU: results, outputs given by the caller, inputs, bounds, invariance."""

from __future__ import annotations

import itertools
import math
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from warploom.codegen.source import TileConfig
from warploom.dsl.library.alibi import Alibi
from warploom.dsl.library.causal import Causal
from warploom.dsl.library.prefix_lm import PrefixLM
from warploom.dsl.library.sliding_window import SlidingWindow
from warploom.dsl.library.soft_cap import SoftCap
from warploom.dsl.types.formats import BlockSparse, Composed, Dense, Paged
from warploom.errors import (
    ArgumentError,
    NotPlanned,
    PlanMismatch,
    WorkspaceTooSmall,
)
from warploom.runtime.launching.kernels import Kernels
from warploom.runtime.wrappers.wrapper import AttentionWrapper
from warploom.scheduler.model.bounds import Bounds
from warploom.scheduler.plans.verify import verify

TILE = TileConfig(12, 64, 1, 1)
SHAPE: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": "float32"}


def make(variant: Any = None, **options: Any) -> AttentionWrapper:
    return AttentionWrapper(variant, **{**SHAPE, "device": "cpu", "tile": TILE, **options})


def tensors(rows: int, keys: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, 4, 64, generator=generator)
    k, v = torch.randn(2, keys, 2, 64, generator=generator)
    return q, k, v


def sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
) -> Any:
    """torch's attention of one request [rows, heads, dim]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("keys", [40, 5000])
@pytest.mark.parametrize("spoilt", ["query", "key", "every key"])
def test_what_is_no_number_shows(spoilt: str, keys: int) -> None:
    """Also where keys are split, and only one part is spoilt; what is hidden spoils nothing."""
    attention = make(SlidingWindow(keys, 0))
    attention.plan([0, 2], [0, keys])
    q, k, v = tensors(2, keys)
    if spoilt == "query":
        q[1, 0, 3] = math.nan
    else:
        k[keys - 1 if spoilt == "key" else slice(None), 0, 3] = math.nan
    out, lse = attention.run(q, (k, v), return_lse=True)
    expected = torch.zeros(2, 4, dtype=torch.bool)
    expected[1 if spoilt != "every key" else slice(None), : 1 if spoilt == "query" else 2] = True
    assert torch.equal(out.isnan().all(-1), expected)
    assert torch.equal(out.isnan().any(-1), expected)
    assert torch.equal(lse.isnan(), expected)


def test_ragged_batches_agree_with_sdpa() -> None:
    attention = make(Causal())
    attention.plan([0, 5, 5, 20], [0, 30, 31, 46])
    q, k, v = tensors(20, 46)
    out, lse = attention.run(q, (k, v), return_lse=True)
    masks = [torch.ones(5, 30).tril(25).bool(), torch.ones(15, 15).tril().bool()]
    torch.testing.assert_close(out[:5], sdpa(q[:5], k[:30], v[:30], masks[0]))
    torch.testing.assert_close(out[5:], sdpa(q[5:], k[31:], v[31:], masks[1]))
    assert lse.shape == (20, 4)
    assert torch.isfinite(lse).all()


def test_a_row_that_sees_nothing_is_zero_and_minus_infinity() -> None:
    attention = make(Causal())
    attention.plan([0, 4, 6], [0, 2, 2])  # two rows before the first key; a request without keys
    q, k, v = tensors(6, 2)
    out, lse = attention.run(q, (k, v), return_lse=True)
    assert (out[[0, 1, 4, 5]] == 0).all()
    assert (lse[[0, 1, 4, 5]] == -math.inf).all()
    assert torch.isfinite(lse[2:4]).all()


def test_an_empty_batch_runs() -> None:
    attention = make(Causal())
    attention.plan([0], [0])
    out, lse = attention.run(*_empty(), return_lse=True)
    assert out.shape == (0, 4, 64)
    assert lse.shape == (0, 4)


def _empty() -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    return torch.zeros(0, 4, 64), (torch.zeros(0, 2, 64), torch.zeros(0, 2, 64))


def test_results_go_where_the_caller_says() -> None:
    attention = make()
    attention.plan([0, 9], [0, 33])
    q, k, v = tensors(9, 33)
    out = torch.full((9, 4, 128), 7.0)[:, :, :64]  # strided
    lse = torch.empty(9, 4)
    got = attention.run(q, (k, v), out=out, lse=lse)
    assert got is out
    torch.testing.assert_close(out, sdpa(q, k, v))
    fresh, sums = attention.run(q, (k, v), return_lse=True)
    assert torch.equal(fresh, out)
    assert torch.equal(sums, lse)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_paged_caches_come_as_a_pair_or_as_one_tensor(layout: Any) -> None:
    attention = make(Causal(), kv_format=Paged(8, layout=layout))
    attention.plan([0, 3], [0, 3], [4, 0, 2], [5])
    q, k, v = tensors(3, 40)
    cache = torch.stack((k.view(5, 8, 2, 64), v.view(5, 8, 2, 64)), dim=1)
    if layout == "HND":
        cache = cache.transpose(2, 3).contiguous()
    whole = attention.run(q, cache)
    assert torch.equal(whole, attention.run(q, (cache[:, 0], cache[:, 1])))
    order = torch.cat([torch.arange(32, 40), torch.arange(8), torch.arange(16, 21)])
    mask = torch.ones(3, 21).tril(18).bool()
    torch.testing.assert_close(whole, sdpa(q, k[order], v[order], mask))


def test_block_rows_of_several_requests() -> None:
    attention = make(kv_format=BlockSparse(block=(4, 8)))
    attention.plan([0, 5, 8], [0, 1, 3, 4], [1, 2, 0, 0], kv_lens=[20, 9])
    q, k, v = tensors(8, 29)
    out = attention.run(q, (k, v))
    torch.testing.assert_close(out[:4], sdpa(q[:4], k[8:16], v[8:16]))
    seen = torch.cat([torch.arange(8), torch.arange(16, 20)])
    torch.testing.assert_close(out[4:5], sdpa(q[4:5], k[seen], v[seen]))
    torch.testing.assert_close(out[5:], sdpa(q[5:], k[20:28], v[20:28]))


def test_dense_batches_may_be_shorter_than_their_tensors() -> None:
    attention = make(kv_format=Dense())
    attention.plan([0, 3, 6], [0, 10, 14])
    q, k, v = (x.view(2, -1, *x.shape[1:]) for x in tensors(6, 40))
    out = attention.run(q, (k, v))
    torch.testing.assert_close(out[0], sdpa(q[0], k[0, :10], v[0, :10]))
    torch.testing.assert_close(out[1], sdpa(q[1], k[1, :4], v[1, :4]))


def test_strided_tensors_are_read_in_place() -> None:
    attention = make(kv_format=Dense())
    attention.plan([0, 5], [0, 5])
    packed = torch.randn(1, 5, 4 + 2 + 2, 64)
    q, k, v = packed.split((4, 2, 2), dim=2)
    torch.testing.assert_close(attention.run(q, (k, v))[0], sdpa(q[0], k[0], v[0]))
    longer = torch.cat((packed, packed), dim=1)[:, :5]  # the same shapes, other strides
    q2, k2, v2 = longer.split((4, 2, 2), dim=2)
    assert torch.equal(attention.run(q2, (k2, v2)), attention.run(q, (k, v)))


def test_calls_that_differ_in_addresses_only_read_their_own_tensors() -> None:
    """As the layers of a model call, in each form of the arguments."""
    attention = make(Causal(), kv_format=Paged(8))
    attention.plan([0, 3], [0, 2], [1, 0], [5])
    q, caches = torch.randn(3, 4, 64), torch.randn(5, 2, 2, 8, 2, 64).unbind()
    expected = []
    for cache in caches:  # one wrapper each: nothing is known from the call before
        alone = make(Causal(), kv_format=Paged(8))
        alone.plan([0, 3], [0, 2], [1, 0], [5])
        expected.append(alone.run(q, (cache[:, 0], cache[:, 1]), return_lse=True))
    for fused, out_given, lse_given in itertools.product((True, False), repeat=3):
        for cache, (wanted, sums) in zip(caches, expected, strict=True):
            out = torch.full((3, 4, 64), math.nan) if out_given else None
            lse = torch.full((3, 4), math.nan) if lse_given else None
            kv = cache if fused else (cache[:, 0], cache[:, 1])
            got, got_sums = attention.run(q, kv, out=out, lse=lse, return_lse=True)
            assert torch.equal(got, wanted)
            assert torch.equal(got_sums, sums)
            assert out is None or out is got
            assert lse is None or lse is got_sums


def test_each_call_of_another_form_is_checked_again() -> None:
    attention = make()
    attention.plan([0, 2], [0, 7])
    q, k, v = tensors(2, 7)
    expected = attention.run(q, (k, v))
    for given in ((k, v, v), (k,), (k, None), (k.double(), v), k):
        with pytest.raises(ArgumentError):
            attention.run(q, given)
        assert torch.equal(attention.run(q, (k, v)), expected)
    with pytest.raises(ArgumentError):
        attention.run(q, (k, v), lse=torch.empty(2, 4, 1))
    assert torch.equal(attention.run(torch.nn.Parameter(q, False), [k, v]), expected)


def test_numpy_integers_declare_what_python_s_do() -> None:
    plain: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    heads: dict[str, Any] = {name: np.int64(value) for name, value in plain.items()}
    q, (k, v) = torch.randn(1, 4, 16), torch.randn(2, 5, 2, 16)
    outs = []
    for numbers in (heads, plain):
        attention = AttentionWrapper(Causal(), **numbers, dtype="float32", device="cpu")
        attention.plan([0, 1], [0, 5])
        outs.append(attention.run(q, (k, v)))
    assert torch.equal(*outs)


def test_numpy_arrays_go_in() -> None:
    attention = make()
    attention.plan(np.array([0, 2]), np.array([0, 7]))
    q, k, v = tensors(2, 7)
    out = attention.run(q.numpy(), (k.numpy(), v.numpy()))
    assert isinstance(out, torch.Tensor)
    assert torch.equal(out, attention.run(q, (k, v)))


def test_the_log_sum_exp_has_the_base_that_was_asked_for() -> None:
    q, k, v = tensors(3, 11)
    sums = []
    for base in ("e", "2"):
        attention = make(lse_base=base)
        attention.plan([0, 3], [0, 11])
        sums.append(attention.run(q, (k, v), return_lse=True)[1])
    logits = torch.einsum("qhd,khd->qhk", q, k.repeat_interleave(2, dim=1)) / 8
    torch.testing.assert_close(sums[0], logits.logsumexp(-1))
    torch.testing.assert_close(sums[1], sums[0] * math.log2(math.e))


def test_the_scale_is_the_declared_one() -> None:
    q, k, v = tensors(3, 11)
    attention = make(sm_scale=0.5)
    attention.plan([0, 3], [0, 11])
    torch.testing.assert_close(attention.run(q, (k, v)), sdpa(q * 4, k, v))


def test_inputs_of_run_hold_for_that_run_only() -> None:
    attention = make(SoftCap(5.0) & Alibi("input"))
    attention.plan([0, 3], [0, 11], slopes=[0.1, 0.2, 0.3, 0.4])
    q, k, v = tensors(3, 11)
    first = attention.run(q, (k, v))
    other = attention.run(q, (k, v), cap=1.0, slopes=torch.zeros(4))
    assert not torch.allclose(first, other)
    assert torch.equal(first, attention.run(q, (k, v)))
    plain = make(SoftCap(1.0))
    plain.plan([0, 3], [0, 11])
    torch.testing.assert_close(other, plain.run(q, (k, v)))


def test_a_plan_may_change_scalars_of_the_mask() -> None:
    attention = make(SlidingWindow(2))
    q, k, v = tensors(1, 11)
    for left in (2, 5):
        attention.plan([0, 1], [0, 11], left=left)
        torch.testing.assert_close(
            attention.run(q, (k, v)), sdpa(q, k[10 - left :], v[10 - left :])
        )


def test_tensors_of_the_mask_sharpen_the_plan_and_stay_as_planned() -> None:
    prefix = np.array([3, 0], np.int32)
    attention = make(PrefixLM())
    attention.plan([0, 100, 200], [0, 300, 600], prefix_len=prefix)
    q, k, v = tensors(200, 600)
    before = attention.run(q, (k, v))
    prefix[:] = 200  # the plan keeps the values that it was made for
    assert torch.equal(attention.run(q, (k, v)), before)
    blind = make(PrefixLM())
    blind.plan([0, 100, 200], [0, 300, 600])
    assert torch.equal(blind.run(q, (k, v), prefix_len=torch.tensor([3, 0]).int()), before)


def test_plans_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPLOOM_THREADS", "2")
    attention = make(Causal())
    attention.plan([0, 4, 5, 8], [0, 2000, 5000, 5300])
    planned = attention.planned
    assert planned is not None
    verify(planned.plan, planned.visibility)
    assert planned.plan.num_slots > 0


def test_the_callers_workspace_is_enough_exactly_as_computed() -> None:
    bounds = Bounds(max_requests=2, max_q_rows=40, max_kv_len=3000)
    probe = make(Causal())
    needed = probe.workspace_size(bounds).total
    memory = torch.full((needed + 64,), 0xAB, dtype=torch.uint8)
    attention = make(Causal(), bounds=bounds, workspace=memory[:needed])
    attention.plan([0, 8, 16], [0, 3000, 5000])
    q, k, v = tensors(16, 5000)
    out = attention.run(q, (k, v))
    assert attention.planned is not None
    assert attention.planned.plan.num_slots > 0
    assert (memory[needed:] == 0xAB).all()
    mask = torch.ones(8, 3000).tril(2992).bool()
    torch.testing.assert_close(out[:8], sdpa(q[:8], k[:3000], v[:3000], mask), atol=1e-5, rtol=1e-4)
    with pytest.raises(WorkspaceTooSmall, match=f"{needed - 1} bytes; these bounds need {needed}"):
        make(Causal(), bounds=bounds, workspace=memory[: needed - 1])


@pytest.mark.parametrize("kv_format", [None, Composed(16)], ids=["ragged", "composed"])
def test_a_small_workspace_is_refused_before_kernels_are_built(kv_format: Any) -> None:
    """Batches choose their tiles, of which the largest is what counts."""
    bounds = Bounds(max_requests=3, max_q_rows=200, max_kv_len=3000, max_blocks=600)
    options: dict[str, Any] = {"bounds": bounds, "tile": None, "kv_format": kv_format}
    probe = make(**options)
    assert len(probe.tiles()) > 1
    needed = probe.workspace_size().total
    short = torch.empty(needed - 1, dtype=torch.uint8)
    forbid = patch.object(Kernels, "get", side_effect=AssertionError("built a kernel"))
    with forbid, pytest.raises(WorkspaceTooSmall, match=f"these bounds need {needed}"):
        make(**options, workspace=short)
    make(**options, workspace=torch.empty(needed, dtype=torch.uint8))


def test_a_workspace_without_bounds_serves_what_fits() -> None:
    attention = make(workspace=torch.empty(2048, dtype=torch.uint8))
    attention.plan([0, 1], [0, 10])
    with pytest.raises(WorkspaceTooSmall, match=r"this batch needs \d+\. .* Declare Bounds"):
        attention.plan([0, 4000], [0, 10])


def test_wrappers_may_share_a_workspace_if_each_plans_before_it_runs() -> None:
    bounds = Bounds(max_requests=2, max_q_rows=40, max_kv_len=3000)
    memory = torch.full((make().workspace_size(bounds).total * 2,), 0xAB, dtype=torch.uint8)
    first = make(bounds=bounds, workspace=memory)
    second = make(num_kv_heads=4, workspace=memory)
    q, k, v = tensors(8, 3000)
    expected = sdpa(q, k, v)
    wide = torch.randn(2, 700, 4, 64)
    for _ in range(2):
        first.plan([0, 8], [0, 3000])
        with pytest.raises((PlanMismatch, NotPlanned)):
            second.run(q, (wide[0], wide[1]))
        torch.testing.assert_close(first.run(q, (k, v)), expected, atol=1e-5, rtol=1e-4)
        second.plan([0, 8], [0, 700])
        torch.testing.assert_close(
            second.run(q, (wide[0], wide[1])), sdpa(q, *wide), atol=1e-5, rtol=1e-4
        )
        with pytest.raises(PlanMismatch, match=r"workspace is another wrapper's.*plan\(\) again"):
            first.run(q, (k, v))
        memory.fill_(0xAB)


def test_memory_grows_with_the_batches() -> None:
    attention = make(Causal())
    for rows, keys in ((1, 10), (30, 2000), (2, 3), (100, 100)):
        attention.plan([0, rows], [0, keys])
        q, k, v = tensors(rows, keys)
        mask = torch.ones(rows, keys).tril(keys - rows).bool()
        expected = sdpa(q, k, v, mask)
        torch.testing.assert_close(attention.run(q, (k, v)), expected, atol=1e-5, rtol=1e-4)


def test_the_limit_of_ctas_is_kept() -> None:
    attention = make(sm_limit=1)
    attention.plan([0, 50], [0, 500])
    assert attention.planned is not None
    assert (np.diff(attention.planned.plan.cta_indptr) > 0).tolist()[1:] == [False] * (
        attention.planned.plan.problem.num_ctas - 1
    )
    q, k, v = tensors(50, 500)
    torch.testing.assert_close(attention.run(q, (k, v)), sdpa(q, k, v))


def test_the_reference_back_end_agrees() -> None:
    q, k, v = tensors(6, 40)
    results = []
    for backend in ("cpu", "reference"):
        attention = make(Causal() & SoftCap(3.0), kv_format=Paged(8), backend=backend, lse_base="2")
        attention.plan([0, 2, 6], [0, 2, 5], [0, 3, 1, 2, 4], [3, 8])
        cache = (k.view(5, 8, 2, 64), v.view(5, 8, 2, 64))
        results.append(attention.run(q, cache, return_lse=True))
    torch.testing.assert_close(results[0], results[1])


def test_explain_prints_choices_and_facts() -> None:
    attention = make(Causal() & SlidingWindow(64), tile=None)
    assert "none yet" in str(attention.explain())
    attention.plan([0, 300], [0, 900])
    explained = attention.explain()
    assert {"tile", "why this tile", "work items", "balance", "mask", "workspace"} <= set(
        explained.facts
    )
    assert "skipped" in str(explained.facts["mask"])
    for name in explained.facts:
        assert name in str(explained)
    assert "Ragged" in str(explained)
    assert "thread" in str(explained.facts["grid"])
    assert not any(word in str(explained) for word in ("CTA", "warps", "stages"))
    assert "NumPy" in str(make(backend="reference").explain())
