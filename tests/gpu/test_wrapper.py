"""The wrapper on a GPU: every hook and format against the oracle, splits, streams, offsets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.filled import FILLS, filled_and_cut
from support.fused_sums import VARIANTS
from support.padding import with_and_without_garbage

import warploom as wl
from warploom import errors
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.runtime.launching.pretransformed_keys import Way
from warploom.runtime.trials.case import Case, Setup
from warploom.runtime.trials.trials import mismatch
from warploom.scheduler.plans.verify import verify
from warploom.testing import run_property, warm_up

pytestmark = pytest.mark.gpu


class EveryHook(wl.Variant):
    """Each hook does something, with each kind of input."""

    strength = wl.Scalar("float32", default=0.5)
    offset = wl.Scalar("int32")
    per_key = wl.Tensor("float32", ("batch", "kv_pos"))
    per_head = wl.Tensor("float32", ("q_head",))
    hidden = wl.Tensor("bool", ("kv_head", "kv_pos"))

    def query_transform(self, q: Value, at: Position) -> Value:
        return q * (1.0 + self.strength * wl.to_float(at.lane) / wl.to_float(at.head_dim))

    def key_transform(self, k: Value, at: Position) -> Value:
        return wl.where(at.kv_pos % 3 == 0, -k, k)

    def value_transform(self, v: Value, at: Position) -> Value:
        return v * self.per_key[at.batch, at.kv_pos]

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return logits + self.per_head[at.q_head] * wl.to_float(at.q_pos - at.kv_pos) / 64.0

    def logits_mask(self, at: Position) -> Value:
        near = at.kv_pos <= at.q_pos + self.offset
        return near & ~self.hidden[at.kv_head, at.kv_pos]

    def output_transform(self, o: Value, at: Position) -> Value:
        return o * wl.sigmoid(at.lse)


class ShiftedValues(wl.Variant):
    """Values change and keys do not, so that each goes its own way through the kernel."""

    def value_transform(self, v: Value, at: Position) -> Value:
        return v * 2.0 + 1.0


def on_gpu(kv_format: Any, dtype: str, dim: int, dim_v: int | None = None) -> Setup:
    return Setup(kv_format, dtype, dim, dim_v or dim, "cuda")


POOL = [
    (wl.Variant(), on_gpu(wl.Dense(), "float16", 64)),
    (wl.Causal() & wl.SoftCap(5.0), on_gpu(wl.Dense(layout="HND"), "bfloat16", 128)),
    (wl.Causal(), on_gpu(wl.Ragged(), "bfloat16", 128)),
    (wl.SlidingWindow(9, 2, 3), on_gpu(wl.Paged(1), "bfloat16", 64)),
    (wl.Causal() & wl.Rope(), on_gpu(wl.Paged(16, layout="HND"), "bfloat16", 128)),
    (wl.Alibi(), on_gpu(wl.Ragged(layout="HND"), "float16", 96)),
    (wl.FlashSigmoid(bias=-2.0), on_gpu(wl.Ragged(), "float16", 40)),
    (wl.Causal() & wl.Rope(), on_gpu(wl.Rolling(60, 3), "bfloat16", 128)),
    (EveryHook(), on_gpu(wl.Rolling(33, 1, positions="cache"), "float16", 64)),
    (wl.PrefixLM(), on_gpu(wl.Paged(5), "bfloat16", 64, 32)),
    (wl.Causal() & wl.DocumentMask(), on_gpu(wl.Ragged(), "float16", 8, 64)),
    (wl.Variant(), on_gpu(wl.BlockSparse(block=(32, 16)), "bfloat16", 64)),
    (wl.Causal() & wl.SlidingWindow(30), on_gpu(wl.BlockSparse(block=(1, 1)), "float16", 32)),
    (wl.Causal() & wl.AttentionSink(), on_gpu(wl.Paged(16), "float16", 256)),
    (wl.QKNorm(), on_gpu(wl.Paged(7, layout="HND"), "bfloat16", 72)),
    (wl.Causal(), on_gpu(wl.Paged(64), "float16", 192, 128)),
    (wl.Causal() & wl.SlidingWindow(200), on_gpu(wl.Paged(528), "bfloat16", 128)),
    (wl.Causal() & wl.Rope(), on_gpu(wl.Paged(112), "float16", 128)),
    (EveryHook(), on_gpu(wl.BlockSparse(block=(5, 3)), "bfloat16", 64)),
    (EveryHook(), on_gpu(wl.Paged(4), "float16", 128)),
    (ShiftedValues(), on_gpu(wl.BlockSparse(block=(1, 8)), "float16", 128)),
    (ShiftedValues(), on_gpu(wl.Paged(16), "bfloat16", 128)),
    (ShiftedValues(), on_gpu(wl.Ragged(), "float16", 64)),
    (wl.Rope(interleaved=True) & wl.SoftCap(5.0), on_gpu(wl.Ragged(), "float16", 128)),
    (wl.Causal() & wl.Rope(dim=64), on_gpu(wl.Paged(64), "bfloat16", 128)),
    (wl.Causal() & wl.Rope() & wl.QKNorm(), on_gpu(wl.Paged(16), "bfloat16", 192, 128)),
]


@pytest.fixture(scope="module")
def pool() -> Any:
    """Kernels of all subjects for every tile, so that each choice is met."""
    jobs = []
    for variant, setup in POOL:
        wrapper = wl.AttentionWrapper(
            variant, kv_format=setup.kv_format, num_q_heads=1, head_dim=setup.head_dim,
            head_dim_v=setup.head_dim_v, dtype=setup.dtype, device="cuda",
        )  # fmt: skip
        for choice in wrapper.choices():
            way: Way = "before" if choice.pretransformed_keys else "fused"
            jobs.append((variant, replace(setup, tile=choice.tile, key_transform=way)))
    return warm_up(jobs)


def test_every_kernel_agrees_with_the_oracle_on_random_batches(pool: Any) -> None:
    run_property(pool, None, max_examples=600)


def test_long_requests_are_split_and_merged(pool: Any) -> None:
    for variant, setup in pool:
        case = Case(setup, (3, 3), (9000, 4000), num_kv_heads=1, group_size=2, seed=1)
        found = mismatch(variant, case)
        assert found is None, f"{variant} {setup}: {found}"


SHAPE: dict[str, Any] = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128, "dtype": "bfloat16"}


def tensors(rows: int, keys: int, device: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.randn(rows, 8, 128, device=device, dtype=torch.bfloat16)
    k, v = torch.randn(2, keys, 2, 128, device=device, dtype=torch.bfloat16)
    return q, k, v


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of one request in float32, aligned to the end."""
    q, k, v = (x.float().transpose(0, 1)[None] for x in (q, k, v))
    rows, keys = q.shape[2], k.shape[2]
    mask = torch.ones(rows, keys, device=q.device, dtype=torch.bool).tril(keys - rows)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(out.float(), expected.float(), atol=2e-2, rtol=2e-2)


def test_work_is_split_over_the_device_and_verified(cuda: Any) -> None:
    attention = wl.AttentionWrapper(wl.Causal(), device=cuda, **SHAPE)
    attention.plan([0, 1, 2, 300], [0, 50_000, 50_100, 53_000])
    planned = attention.planned
    assert planned is not None
    verify(planned.plan, planned.visibility)
    assert planned.plan.num_slots > 0
    assert "registers" in str(attention.explain().facts["resources"])
    q, k, v = tensors(300, 53_000, cuda)
    out = attention.run(q, (k, v))
    close(out[:1], sdpa(q[:1], k[:50_000], v[:50_000]))
    close(out[2:], sdpa(q[2:], k[50_100:], v[50_100:]))


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize(("rows", "heads"), [(1, 8), (1, 2), (8, 8), (300, 8)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_keys_filled_with_large_numbers_weigh_nothing(
    fill: float, rows: int, heads: int, dtype: torch.dtype, cuda: Any
) -> None:
    q = torch.randn(1, rows, heads, 64, device=cuda, dtype=dtype)
    out, expected = filled_and_cut(fill, q, num_kv_heads=2)
    torch.testing.assert_close(out, expected, atol=4e-3, rtol=2e-2)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(("rows", "heads"), [(1, 2), (3, 8), (15, 8), (300, 8)])
def test_what_no_row_sees_may_be_garbage(rows: int, heads: int) -> None:
    with_garbage, without = with_and_without_garbage(rows, heads, "cuda")
    assert torch.equal(with_garbage, without)


def test_tiles_of_the_same_keys_are_cut_at_the_same_places(cuda: Any) -> None:
    attention = wl.AttentionWrapper(
        wl.Causal(), kv_format=wl.Ragged(), num_q_heads=32, num_kv_heads=8, head_dim=128,
        dtype="bfloat16", device=cuda,
    )  # fmt: skip
    attention.plan([0, 128], [0, 32_768])
    planned = attention.planned
    assert planned is not None
    verify(planned.plan, planned.visibility)
    items = planned.plan.items[planned.plan.items["kv_head"] == 3]
    ends = (items["kv_end"][items["row_begin"] == row] for row in set(items["row_begin"]))
    cuts = [sorted(ends_of_tile)[:-1] for ends_of_tile in ends]
    assert len(cuts) == 4 and len(cuts[0]) > 0
    assert all(places == cuts[0] for places in cuts)


def test_runs_repeat_their_bits(cuda: Any) -> None:
    attention = wl.AttentionWrapper(wl.Causal(), device=cuda, **SHAPE)
    attention.plan([0, 2, 200], [0, 40_000, 40_500])
    q, k, v = tensors(200, 40_500, cuda)
    first, lse = attention.run(q, (k, v), return_lse=True)
    for _ in range(20):
        again, sums = attention.run(q, (k, v), return_lse=True)
        assert torch.equal(again, first)
        assert torch.equal(sums, lse)


def test_invariant_wrappers_give_a_request_the_same_bits_among_any_neighbours(cuda: Any) -> None:
    attention = wl.AttentionWrapper(wl.Causal(), device=cuda, batch_invariant=True, **SHAPE)
    q, k, v = tensors(70, 29_000, cuda)
    attention.plan([0, 5], [0, 9000])
    alone = attention.run(q[:5], (k[:9000], v[:9000]))
    attention.plan([0, 5, 6, 70], [0, 9000, 25_700, 29_000])
    assert torch.equal(alone, attention.run(q, (k, v))[:5])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_has_the_same_bits_in_any_chunk(variant: wl.Variant, cuda: Any) -> None:
    """The last row alone sees a tile that hides nothing, in other code than that of a mask."""
    q, k, v = tensors(9, 64, cuda)
    attention = wl.AttentionWrapper(
        variant & wl.Causal(), device=cuda, batch_invariant=True, sm_scale=0.3, **SHAPE
    )
    attention.plan([0, 9], [0, 64])
    among = attention.run(q, (k, v))
    for rows in (1, 2, 5):
        attention.plan([0, rows], [0, 64])
        assert torch.equal(attention.run(q[-rows:], (k, v)), among[-rows:])


@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_decoding_is_invariant_while_neighbours_come_and_go(
    kv_dtype: Any, kv_heads: int, cuda: Any
) -> None:
    """The same request alone, among 64, and after half of these have finished."""
    pages = torch.randint(1, 60, (64,), generator=torch.Generator().manual_seed(1)).tolist()
    pages[40] = 625  # 10,000 keys: cut, alone or not
    ends = np.cumsum([0, *pages]).astype(np.int32)
    q = torch.randn(64, 8, 128, device=cuda, dtype=torch.bfloat16)
    cache = torch.randn(ends[-1], 2, 16, kv_heads, 128, device=cuda).to(kv_dtype)
    indices = np.random.default_rng(0).permutation(ends[-1]).astype(np.int32)
    attention = wl.AttentionWrapper(
        wl.Causal(), kv_format=wl.Paged(16), device=cuda, batch_invariant=True, kv_dtype=kv_dtype,
        bounds=wl.Bounds(64, 64, 10_000, int(ends[-1])), **{**SHAPE, "num_kv_heads": kv_heads},
    )  # fmt: skip

    def decode(first: int, last: int) -> torch.Tensor:
        own = ends[first : last + 1]
        attention.plan(
            np.arange(last - first + 1), own - own[0], indices[own[0] : own[-1]],
            np.full(last - first, 16),
        )  # fmt: skip
        return attention.run(q[first:last], cache)

    among = decode(0, 64)[40]
    assert torch.equal(decode(40, 41)[0], among)
    assert torch.equal(decode(32, 64)[8], among)


def test_plans_and_runs_on_different_streams_wait_for_each_other(cuda: Any) -> None:
    attention = wl.AttentionWrapper(wl.Causal(), device=cuda, **SHAPE)
    q, k, v = tensors(64, 4096, cuda)
    side = torch.cuda.Stream(cuda)
    results = []
    for rows, keys in ((64, 4096), (7, 100), (64, 3000), (1, 4096)) * 5:
        out = torch.full((rows, 8, 128), torch.nan, device=cuda, dtype=torch.bfloat16)
        attention.plan([0, rows], [0, keys])  # must wait for the run before
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000)
            attention.run(q[:rows], (k[:keys], v[:keys]), out=out)  # must wait for the plan
        results.append((out, rows, keys))
    torch.cuda.synchronize()
    for out, rows, keys in results:
        close(out, sdpa(q[:rows], k[:keys], v[:keys]))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_another_device_than_the_current_one() -> None:
    q, k, v = tensors(5, 300, "cuda:1")
    attention = wl.AttentionWrapper(wl.Causal(), device="cuda:1", **SHAPE)
    attention.plan([0, 5], [0, 300])
    close(attention.run(q, (k, v)), sdpa(q, k, v))


def test_offsets_pass_32_bits(cuda: Any) -> None:
    pages, size = 9000, 1024  # 9000 * 1024 * 2 * 128 elements: beyond 2^31
    cache = torch.zeros(pages, size, 2, 128, device=cuda, dtype=torch.bfloat16)
    attention = wl.AttentionWrapper(wl.Causal(), kv_format=wl.Paged(size), device=cuda, **SHAPE)
    used = np.array([pages - 1, 3, pages - 7], np.int32)
    q, k, v = tensors(4, 3 * size, cuda)
    values = torch.zeros_like(cache)
    for i, page in enumerate(used.tolist()):
        cache[page], values[page] = (x[i * size : (i + 1) * size] for x in (k, v))
    attention.plan([0, 4], [0, 3], used, [size])
    close(attention.run(q, (cache, values)), sdpa(q, k, v))


def test_torch_compile_takes_it_whole(cuda: Any) -> None:
    variant = wl.Causal() & wl.SoftCap(30.0)
    q = torch.randn(2, 9, 8, 64, device=cuda, dtype=torch.float16)
    k, v = torch.randn(2, 2, 40, 2, 64, device=cuda, dtype=torch.float16)

    def layer(q: Any, k: Any, v: Any) -> Any:
        return wl.attention(q, k, v, variant=variant) + 1

    close(torch.compile(layer, fullgraph=True)(q, k, v), layer(q, k, v))


def test_what_cuda_cannot_serve_is_refused(cuda: Any) -> None:
    with pytest.raises(errors.UnsupportedSpec, match="float32 on CUDA"):
        wl.AttentionWrapper(device=cuda, num_q_heads=1, head_dim=64, dtype="float32")
    attention = wl.AttentionWrapper(wl.Causal(), device=cuda, **SHAPE)
    attention.plan([0, 2], [0, 10])
    q, k, v = tensors(2, 10, cuda)
    with pytest.raises(errors.WrongDevice, match="k is on cpu"):
        attention.run(q, (k.cpu(), v))


@pytest.mark.parametrize(("rows", "heads"), [(1, 2), (1, 4), (40, 4), (200, 4)])
@pytest.mark.parametrize("spoilt", ["key", "every key"])
def test_what_is_no_number_shows(cuda: Any, rows: int, heads: int, spoilt: str) -> None:
    """Also where keys are split, and only one part is spoilt."""
    attention = wl.AttentionWrapper(
        wl.Causal(), num_q_heads=heads, num_kv_heads=2, head_dim=64, dtype="float16", device=cuda
    )
    attention.plan([0, rows], [0, 9000])
    q = torch.randn(rows, heads, 64, device=cuda, dtype=torch.float16)
    k, v = torch.randn(2, 9000, 2, 64, device=cuda, dtype=torch.float16)
    k[100 if spoilt == "key" else slice(None), 0, 3] = float("nan")
    out, lse = attention.run(q, (k, v), return_lse=True)
    expected = torch.zeros(rows, heads, dtype=torch.bool, device=cuda)
    expected[:, : heads // 2] = True
    assert torch.equal(out.isnan().all(-1), expected)
    assert torch.equal(out.isnan().any(-1), expected)
    assert torch.equal(lse.isnan(), expected)


@pytest.mark.parametrize("rows", [1, 40, 300])
def test_entries_share_keys_of_a_batch_of_one(cuda: Any, rows: int) -> None:
    """Decode, and prefill with tensor copies; the tables say which entry is meant, so no copy."""
    q = torch.randn(3, rows, 8, 128, device=cuda, dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 300, 2, 128, device=cuda, dtype=torch.bfloat16)
    for variant in (wl.Causal(), wl.Causal() & wl.Rope()):
        shared = wl.attention(q, k, v, variant=variant, kv_lens=[300, 7, 256])
        copied = (x.expand(3, -1, -1, -1).contiguous() for x in (k, v))
        close(shared, wl.attention(q, *copied, variant=variant, kv_lens=[300, 7, 256]))
