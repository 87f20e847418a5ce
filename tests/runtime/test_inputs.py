"""Extra inputs: whose memory they live in, and which sizes must match."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from warploom.codegen.source import TileConfig
from warploom.dsl.library.causal import Causal
from warploom.dsl.library.document_mask import DocumentMask
from warploom.dsl.library.kv_scale import TokenKVScale
from warploom.dsl.library.packed_mask import PackedMask, TreeMask, pack_masks
from warploom.dsl.library.qk_norm import QKNorm
from warploom.dsl.library.soft_cap import SoftCap
from warploom.dsl.types.formats import BlockSparse, Composed, Paged, Ragged
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.fields import Scalar, Tensor
from warploom.dsl.variants.flex import flex
from warploom.dsl.variants.trace import trace
from warploom.dsl.variants.variant import Variant
from warploom.errors import (
    ArgumentError,
    MissingInput,
    NotPlanned,
    PlanMismatch,
    WrongShape,
)
from warploom.runtime.calls.attention import attention
from warploom.runtime.inputs.args import Geometry
from warploom.runtime.inputs.inputs import Inputs
from warploom.runtime.strategies.device_strategy import DevicePlanner
from warploom.runtime.strategies.planner_params import PlannerParams
from warploom.runtime.wrappers.wrapper import AttentionWrapper
from warploom.scheduler.model.bounds import Bounds

BOUNDS = Bounds(max_requests=3, max_q_rows=12, max_kv_len=64)
LONGER = Bounds(max_requests=3, max_q_rows=20, max_kv_len=64)
SHAPE: dict[str, Any] = {"num_q_heads": 2, "head_dim": 32, "dtype": "float32", "device": "cpu"}


class Biased(Variant):
    bias = Tensor("float32", ("q_row", "kv_pos"))
    table = Tensor("float32", (None,))

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return logits + self.bias[at.q_row, at.kv_pos] + self.table[at.kv_pos + 1]


def graphed(variant: Any, **options: Any) -> AttentionWrapper:
    return AttentionWrapper(variant, **{**SHAPE, "bounds": BOUNDS, "cuda_graph": True, **options})


def test_host_values_never_overwrite_the_callers_tensor() -> None:
    geometry = Geometry(Ragged(), 2, 2, 32, 32, torch.float32, torch.float32, torch.device("meta"))
    inputs = Inputs(trace(Biased()), geometry)
    inputs.bind({"table": torch.zeros(7, device="meta")})
    callers = inputs.tensors["table"]  # a view of it
    inputs.bind({"table": np.ones(7, np.float32)})
    own = inputs.tensors["table"]
    assert own is not callers
    inputs.bind({"table": np.zeros(7, np.float32)})
    assert inputs.tensors["table"] is own  # a captured graph sees the new values


def test_a_plan_undoes_what_runs_gave_and_keeps_what_it_is_given() -> None:
    wrapper = AttentionWrapper(SoftCap(5.0), **SHAPE)
    q, k, v = 10 * torch.randn(3, 2, 32), torch.randn(11, 2, 32), torch.randn(11, 2, 32)
    wrapper.plan([0, 3], [0, 11])
    first, other = wrapper.run(q, (k, v)), wrapper.run(q, (k, v), cap=1.0)
    assert not torch.allclose(first, other)
    for cap, expected in ((None, first), (1.0, other), (None, other), (5.0, first)):
        given: dict[str, Any] = {} if cap is None else {"cap": cap}
        wrapper.plan([0, 3], [0, 11], **given)
        assert torch.equal(wrapper.run(q, (k, v)), expected)


@pytest.mark.parametrize("lanes", [8, 24, 40])
def test_lanes_match_the_vectors_that_read_them(lanes: int) -> None:
    attention = AttentionWrapper(QKNorm(), **{**SHAPE, "head_dim_v": 24})
    with pytest.raises(WrongShape, match="lane=32"):
        attention.plan([0, 1], [0, 1], q_weight=torch.ones(lanes), k_weight=torch.ones(lanes))
    attention.plan([0, 1], [0, 1], q_weight=torch.ones(32), k_weight=torch.ones(32))


def _document_mask(ids: Any) -> Variant:
    return DocumentMask(ids)


def _captured_mask(ids: Any) -> Variant:
    return flex(None, lambda b, h, q_idx, kv_idx: ids[b, q_idx] == ids[b, kv_idx])


@pytest.mark.some(6)
@pytest.mark.parametrize("made", [_document_mask, _captured_mask])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64, np.int32])
@pytest.mark.parametrize("make", ["plain", "graphed"])
def test_plan_reads_tensors_of_the_mask_again(made: Any, kind: Any, make: str) -> None:
    is_torch = isinstance(kind, torch.dtype)
    ids: Any = torch.zeros(1, 20, dtype=kind) if is_torch else np.zeros((1, 20), kind)
    options: dict[str, Any] = {"bounds": LONGER, "cuda_graph": True} if make == "graphed" else {}
    wrapper = AttentionWrapper(made(ids), **SHAPE, **options)
    q, k, v = torch.randn(20, 2, 32), torch.randn(20, 2, 32), torch.randn(20, 2, 32)

    def expected() -> torch.Tensor:
        fresh = AttentionWrapper(made(ids), **SHAPE)
        fresh.plan([0, 20], [0, 20])
        return fresh.run(q, (k, v))

    wrapper.plan([0, 20], [0, 20])
    name, held = next(iter(wrapper._inputs.tensors.items()))
    address, before = held.data_ptr(), expected()
    ids[0, 12:] = 1
    assert torch.equal(wrapper.run(q, (k, v)), before)  # as planned
    wrapper.plan([0, 20], [0, 20])
    assert torch.equal(wrapper.run(q, (k, v)), expected())
    assert not torch.equal(before, expected())
    assert wrapper._inputs.tensors[name].data_ptr() == address


def test_run_takes_the_planned_tensor_of_the_mask_and_no_other() -> None:
    ids = torch.zeros(1, 20, dtype=torch.int32)
    wrapper = AttentionWrapper(DocumentMask(ids), **SHAPE)
    wrapper.plan([0, 20], [0, 20])
    q, k, v = torch.randn(20, 2, 32), torch.randn(20, 2, 32), torch.randn(20, 2, 32)
    same = wrapper.run(q, (k, v), document_ids=ids)
    assert torch.equal(same, wrapper.run(q, (k, v)))
    with pytest.raises(PlanMismatch, match="document_ids is another tensor"):
        wrapper.run(q, (k, v), document_ids=ids.clone())
    ids[0, 5:] = 1
    with pytest.raises(PlanMismatch, match="document_ids is changed"):
        wrapper.run(q, (k, v), document_ids=ids)
    assert torch.equal(same, wrapper.run(q, (k, v)))


class Chosen(Variant):
    """Keys with a positive weight; no weight is no number."""

    weight = Tensor("float32", ("kv_pos",))

    def logits_mask(self, at: Position) -> Value:
        return self.weight[at.kv_pos] > 0


def test_no_number_is_no_change() -> None:
    weight = torch.ones(20)
    weight[3] = torch.nan
    wrapper = AttentionWrapper(Chosen(), **SHAPE, backend="reference")
    wrapper.plan([0, 20], [0, 20], weight=weight)
    q, k, v = torch.randn(3, 20, 2, 32)
    wrapper.run(q, (k, v), weight=weight)
    weight[4] = torch.nan
    with pytest.raises(PlanMismatch, match="weight is changed"):
        wrapper.run(q, (k, v), weight=weight)


def test_a_plan_that_fails_with_a_changed_mask_leaves_none() -> None:
    ids = torch.zeros(1, 20, dtype=torch.int32)
    wrapper = graphed(DocumentMask(ids), bounds=LONGER)
    wrapper.plan([0, 20], [0, 20])
    ids[0, 5:] = 1
    with pytest.raises(WrongShape, match="kv_pos"):
        wrapper.plan([0, 1], [0, 30])
    with pytest.raises(NotPlanned):
        wrapper.run(torch.randn(20, 2, 32), (torch.randn(20, 2, 32), torch.randn(20, 2, 32)))


@pytest.mark.parametrize("kind", [PackedMask, TreeMask])
@pytest.mark.parametrize("options", [{}, {"bounds": LONGER, "cuda_graph": True}])
def test_packed_masks_must_cover_the_batch(kind: Any, options: Any) -> None:
    def plan(*shapes: tuple[int, int]) -> None:
        masks = pack_masks([np.ones(shape, bool) for shape in shapes])
        attention = AttentionWrapper(kind(*masks) & Causal(), **SHAPE, **options)
        attention.plan([0, 4, 14], [0, 20, 50])

    sizes = [(4, 20), (10, 30)] if kind is PackedMask else [(4, 4), (10, 10)]
    plan(*sizes)
    with pytest.raises(ArgumentError, match=r"request 0 has 8 bits; the batch needs 4 rows of"):
        plan((4, 2), sizes[1])
    with pytest.raises(ArgumentError, match="request 1 has 48 bits; the batch needs 10 rows of"):
        plan(sizes[0], (7, 6))
    with pytest.raises(ArgumentError, match=r"mask_indptr: has 2 entries; expected .* = 3"):
        plan(sizes[0])


class Reached(Variant):
    """Keys up to a limit for each request, which also reads every key's own entry."""

    limit = Tensor("int32", ("batch",))
    hidden = Tensor("bool", (None,))

    def logits_mask(self, at: Position) -> Value:
        return (at.kv_pos < self.limit[at.batch]) & ~self.hidden[at.kv_pos]


# 300 keys and 40: pages of 20, of which the first two are shared, or blocks of 20 keys
PAGES: dict[str, Any] = {
    "kv_indptr": [0, 15, 17], "kv_indices": [*range(15), 0, 1], "last_page_len": [20, 20],
}  # fmt: skip
BLOCKS: dict[str, Any] = {
    "kv_indptr": [0, 15, 17], "kv_indices": [*range(15), 0, 1], "kv_lens": [300, 40],
}  # fmt: skip
LENGTHS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ragged": (Ragged(), {"kv_indptr": [0, 300, 340]}),
    "paged": (Paged(20), PAGES),
    "composed": (Composed(20), PAGES),
    "blocks": (BlockSparse((4, 20)), BLOCKS),
}


@pytest.mark.parametrize("graphed", [False, True])
@pytest.mark.parametrize("storage", LENGTHS)
def test_a_mask_that_only_run_is_given_is_not_planned_with(storage: str, graphed: bool) -> None:
    kv_format, lengths = LENGTHS[storage]
    bounds = Bounds(max_requests=2, max_q_rows=8, max_kv_len=300, max_blocks=17, max_segments=2)
    options: dict[str, Any] = {"bounds": bounds, "cuda_graph": True} if graphed else {}
    options |= {"kv_format": kv_format, "tile": TileConfig(12, 64, warps=1), **SHAPE}
    keys = (15, 20) if storage in ("paged", "composed") else (340,)
    q, k, v = torch.randn(8, 2, 32), torch.randn(*keys, 2, 32), torch.randn(*keys, 2, 32)
    later = AttentionWrapper(Reached(), **options)
    later.plan([0, 4, 8], **lengths)
    for seed in (1, 2):  # one plan, two masks
        draw = torch.Generator().manual_seed(seed)
        given: dict[str, Any] = {
            "limit": torch.randint(1, 40, (2,), generator=draw, dtype=torch.int32),
            "hidden": torch.rand(300, generator=draw) < 0.5,
        }
        known = AttentionWrapper(Reached(), **options)
        known.plan([0, 4, 8], **lengths, **given)
        torch.testing.assert_close(later.run(q, (k, v), **given), known.run(q, (k, v)))
        if storage != "blocks" and not graphed:
            assert known.explain().facts != later.explain().facts
    with pytest.raises(MissingInput, match=r"Reached reads 'hidden'"):
        later.run(q, (k, v), limit=given["limit"])


def test_the_device_plans_with_all_that_the_mask_reads_or_not_at_all() -> None:
    traced = trace(Reached())
    made: Any = SimpleNamespace(params=PlannerParams(traced), _name="Reached")
    inputs: Any = SimpleNamespace(scalars={}, tensors={"hidden": torch.zeros(3, dtype=torch.bool)})
    with pytest.raises(MissingInput, match=r"Reached reads 'limit'.*plan\(\)"):
        DevicePlanner.write(made, SimpleNamespace(bounds=LONGER), inputs, None, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_masks_read_tensors_of_floats(dtype: str) -> None:
    class Reach(Variant):
        reach = Tensor(dtype, ("q_head",))

        def logits_mask(self, at: Position) -> Value:
            return at.kv_pos < self.reach[at.q_head]

    attention = AttentionWrapper(Reach(), **SHAPE)
    q, k, v = torch.randn(4, 2, 32), *torch.randn(2, 100, 2, 32)
    reach = torch.tensor([3, 70], dtype=getattr(torch, dtype))
    attention.plan([0, 4], [0, 100], reach=reach)
    out = attention.run(q, (k, v))
    for head, keys in enumerate((3, 70)):
        weights = (q[:, head] @ k[:keys, head].T / 32**0.5).softmax(-1)
        torch.testing.assert_close(out[:, head], weights @ v[:keys, head], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["int64", "int32"])
def test_integers_beyond_those_of_kernels_are_refused(name: str) -> None:
    class Documents(Variant):
        ids = Tensor(name, ("kv_pos",))

        def logits_mask(self, at: Position) -> Value:
            return self.ids[at.kv_pos] == self.ids[at.q_pos]

    attention = AttentionWrapper(Documents(), **SHAPE)
    ids = torch.arange(8)
    q, k, v = torch.randn(8, 2, 32), *torch.randn(2, 8, 2, 32)
    attention.plan([0, 8], [0, 8], ids=ids)
    torch.testing.assert_close(attention.run(q, (k, v)), v)
    with pytest.raises(ArgumentError, match=r"at \[1\] does not fit into int32; renumber"):
        attention.plan([0, 8], [0, 8], ids=ids << 32)


class Affine(Variant):
    rate = Scalar("float32", default=1.0)
    offset = Scalar("float32", default=0.0)
    table = Tensor("float32", ("kv_pos",))

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return logits * self.rate + self.table[at.kv_pos] * self.offset


def test_scalars_given_to_a_run_hold_for_it_alone_however_they_repeat() -> None:
    table = torch.randn(20)
    other, moved = torch.randn(20), torch.tensor(0.5)
    attention = AttentionWrapper(Affine(table=table), **SHAPE)
    attention.plan([0, 4], [0, 20])
    q, k, v = torch.randn(4, 2, 32), *torch.randn(2, 20, 2, 32)
    fast: dict[str, Any] = {"rate": 0.25}
    both, far = {"rate": 1, "offset": 2.0}, {"offset": 2.0}
    table_too, same = {"table": other, "rate": 0.25}, {"rate": moved}
    runs: list[dict[str, Any]]
    runs = [fast, fast, {}, fast, both, far, fast, table_too, fast, same, same]
    for given in runs:
        moved += 1.0  # in place: the same object is another number
        expected = AttentionWrapper(Affine(table=table), **SHAPE)
        expected.plan([0, 4], [0, 20], **{name: _copied(x) for name, x in given.items()})
        assert torch.equal(attention.run(q, (k, v), **given), expected.run(q, (k, v)))
    attention.run(q, (k, v), **fast)
    attention.plan([0, 4], [0, 20], rate=3.0)
    expected = AttentionWrapper(Affine(table=table), **SHAPE)
    expected.plan([0, 4], [0, 20], rate=0.25)
    assert torch.equal(attention.run(q, (k, v), **fast), expected.run(q, (k, v)))


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


class Reaches(Variant):
    """A mask of floats, which may be no numbers, of the heads of a tile."""

    reach = Tensor("float32", ("q_head",))

    def logits_mask(self, at: Position) -> Any:
        return (self.reach[at.q_head] < 5.0) & (at.kv_pos >= 0)


@pytest.mark.parametrize("head", range(4))
def test_a_nan_among_the_heads_of_a_tile_hides_its_head(head: int) -> None:
    reach = torch.full((4,), 3.0)
    reach[head] = math.nan
    q, k, v = torch.zeros(1, 1, 4, 16), torch.zeros(1, 32, 1, 16), torch.ones(1, 32, 1, 16)
    out = attention(q, k, v, variant=Reaches(reach=reach))[0, 0, :, 0]
    assert out.tolist() == [float(i != head) for i in range(4)]


class RowBias(Variant):
    row_bias = Tensor("float32", ("q_row",))

    def output_transform(self, o: Value, at: Position) -> Value:
        return o + self.row_bias[at.q_row]


def test_rows_of_dense_tensors_are_counted_in_each_request() -> None:
    q, bias = torch.randn(3, 4, 2, 8), torch.arange(4.0)
    plain = attention(q, q, q, variant=Causal())
    out = attention(q, q, q, variant=Causal() & RowBias(), row_bias=bias)
    torch.testing.assert_close(out, plain + bias[:, None, None])
    with pytest.raises(WrongShape, match=r"row_bias has shape \(3,\); expected \[q_row>=4\]"):
        attention(q, q, q, variant=Causal() & RowBias(), row_bias=bias[:3])


def test_a_tensor_that_an_earlier_plan_was_given_is_told_from_those_of_this_one() -> None:
    def scales(keys: int) -> dict[str, Any]:
        return {name: torch.ones(1, keys, 2) for name in ("k_scale", "v_scale")}

    wrapper = AttentionWrapper(TokenKVScale(), **SHAPE)
    wrapper.plan([0, 1], [0, 4], **scales(4))
    with pytest.raises(WrongShape, match=r"to an earlier plan.* give plan k_scale=.* for this"):
        wrapper.plan([0, 1], [0, 9])
    with pytest.raises(WrongShape, match=r"kv_head=2\]\.$"):
        wrapper.plan([0, 1], [0, 9], **scales(5))
    wrapper.plan([0, 1], [0, 9], **scales(9))
