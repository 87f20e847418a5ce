"""`Output`: what functors record, as graphs and in the NumPy reading, and mistakes with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.recorded_variants import Dump, Terms

import warploom as wl
from warploom.dsl.variants.trace import trace
from warploom.errors import (
    ChainClash,
    FieldMisuse,
    ImpureFunctor,
    MissingInput,
    WarploomError,
    WrongCall,
    WrongDeclaration,
    WrongDType,
    WrongShape,
)

NAN = float("nan")
AXES = ("batch", "q_head", "q_idx", "kv_pos")
# wrong on purpose, out of the type checkers' sight
ANY: dict[str, Any] = {"none": None, "name": "kv_pos"}


def tensors(rows: int = 3, keys: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, keys, 2, 8, generator=generator)
    return torch.randn(rows, 4, 8, generator=generator), k, v


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[heads, rows, keys] scaled products."""
    wide = k.repeat_interleave(2, 1)
    return torch.einsum("qhd,khd->hqk", q.double(), wide.double()) / 8**0.5


# --- graphs


def test_a_record_is_no_part_of_the_hooks() -> None:
    plain, recording = trace(wl.Causal() & wl.SoftCap(5.0)), trace(Dump() & wl.SoftCap(5.0))
    assert recording.hooks["logits_transform"] is plain.hooks["logits_transform"]
    (record,) = recording.records
    assert record.output.name == "seen"
    assert record.value.op == "logits"
    assert recording.output_names == recording.input_names[-1:] == ("seen",)


def test_the_identity_stays_the_identity() -> None:
    assert trace(Dump()).hooks == {}


def test_what_is_recorded_keeps_the_fields_that_it_reads() -> None:
    class Aside(wl.Variant):
        seen = wl.Output("float32", AXES)
        unused = wl.Scalar("float32")
        shift = wl.Scalar("float32")

        def logits_transform(self, logits, at):
            self.seen.record(logits + self.shift, at)
            return logits

    assert trace(Aside()).input_names == ("shift", "seen")


def test_records_come_in_order_of_declaration() -> None:
    assert trace(Terms()).output_names == ("before", "bias")


def test_equal_variants_have_equal_records() -> None:
    assert trace(Dump()) == trace(Dump())
    assert trace(Dump()) != trace(wl.Variant())
    assert hash(trace(Dump())) == hash(trace(Dump()))


# --- the NumPy reading


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_oracle_writes_what_is_visible(dtype: str) -> None:
    class Dumped(wl.Variant):
        seen = wl.Output(dtype, ("q_head", "q_row", "kv_pos"))

        def logits_transform(self, logits, at):
            return self.seen.record(logits * 2, at) / 2

    q, k, v = tensors()
    seen = torch.full((4, 9, 6), NAN, dtype=getattr(torch, dtype))
    o, lse = wl.reference_attention(
        Dumped() & wl.Causal(), q, k, v, inputs={"seen": seen}, first_q_row=2
    )
    plain, plain_lse = wl.reference_attention(wl.Causal(), q, k, v)
    np.testing.assert_allclose(o, plain)
    np.testing.assert_allclose(lse, plain_lse)
    expected = torch.full((4, 9, 6), NAN, dtype=torch.float64)
    hidden = ~torch.ones(3, 5, dtype=torch.bool).tril(2)
    expected[:, 2:5, :5] = (2 * scores(q, k)).masked_fill(hidden, NAN)
    torch.testing.assert_close(seen, expected.to(seen.dtype), equal_nan=True)


def test_the_oracle_writes_to_arrays_too() -> None:
    q, k, v = tensors()
    seen = np.full((1, 4, 3, 5), NAN, np.float32)
    wl.reference_attention(Dump(), q, k, v, inputs={"seen": seen})
    np.testing.assert_allclose(seen[0], scores(q, k), rtol=1e-6)


def test_queries_before_the_first_key_have_no_position() -> None:
    class ByPosition(wl.Variant):
        seen = wl.Output("float32", ("batch", "q_pos", "q_head", "kv_pos"))

        def logits_transform(self, logits, at):
            return self.seen.record(logits, at)

    q, k, v = tensors(rows=5, keys=3)
    seen = np.full((1, 3, 4, 3), NAN, np.float32)
    wl.reference_attention(ByPosition(), q, k, v, inputs={"seen": seen})
    np.testing.assert_allclose(seen[0], scores(q, k)[:, 2:].transpose(0, 1), rtol=1e-6)


@pytest.mark.parametrize(
    ("seen", "error"),
    [
        (None, MissingInput),
        (np.zeros((1, 4, 3, 5)), WrongDType),
        (torch.zeros(1, 4, 3, 5, dtype=torch.float16), WrongDType),
        ([[[[0.0]]]], WrongDType),
        (np.zeros((4, 3, 5), np.float32), WrongShape),
        (np.zeros((1, 4, 2, 5), np.float32), WrongShape),
        (np.zeros((1, 5, 3, 5), np.float32), WrongShape),
    ],
)
def test_the_oracle_refuses_other_tensors(seen: Any, error: type[WarploomError]) -> None:
    with pytest.raises(error, match="seen"):
        wl.reference_attention(Dump(), *tensors(), inputs={"seen": seen})


# --- mistakes


@pytest.mark.parametrize(
    ("dtype", "axes", "text"),
    [
        ("int32", AXES, "holds no logits"),
        ("bool", AXES, "holds no logits"),
        ("float99", AXES, "float99"),
        ("float32", ("batch", "q_head", "kv_pos"), "tell query rows apart"),
        ("float32", ("q_head", "q_idx", "kv_pos"), "tell query rows apart"),
        ("float32", ("batch", "q_idx"), "q_head and kv_pos is missing"),
        ("float32", ("batch", "q_head", "q_head", "q_idx", "kv_pos"), "twice"),
        ("float32", ("batch", "kv_head", "q_idx", "kv_pos"), "none of batch"),
        ("float32", (*AXES, None), "None is none of"),
        ("float32", ANY["name"], "no tuple"),
        ("float32", ANY["none"], "no tuple"),
    ],
)
def test_wrong_declarations(dtype: str, axes: Any, text: str) -> None:
    with pytest.raises(WrongDeclaration, match=text):
        wl.Output(dtype, axes)


def test_calls_that_do_not_fit() -> None:
    with pytest.raises(WrongCall, match="axes"):
        wl.Output("float32")  # type: ignore[call-arg]
    with pytest.raises(WrongDeclaration, match="no default"):
        wl.Output("float32", AXES, default=0.0)  # type: ignore[call-arg]


class Twice(Dump):
    def logits_transform(self, logits, at):
        return self.seen.record(logits, at) + self.seen.record(logits * 2, at)


class NoPosition(Dump):
    def logits_transform(self, logits, at):
        return self.seen.record(logits)


class Truth(Dump):
    def logits_transform(self, logits, at):
        return logits + self.seen.record(logits > 0, at)


class Read(Dump):
    def logits_transform(self, logits, at):
        return logits + self.seen[at.batch, at.q_head, at.q_idx, at.kv_pos]


class Assigned(Dump):
    def logits_transform(self, logits, at):
        self.seen[at.batch, at.q_head, at.q_idx, at.kv_pos] = logits
        return logits


class Unused(Dump):
    def logits_transform(self, logits, at):
        return logits


class InQuery(Dump):
    def query_transform(self, q, at):
        return self.seen.record(q, at)


class InMask(Dump):
    def logits_mask(self, at):
        return self.seen.record(at.kv_pos, at) > 2


class InOutput(Dump):
    def output_transform(self, o, at):
        return self.seen.record(o, at)


MISTAKES: list[tuple[type[wl.Variant], str, str]] = [
    (Twice, "two values", "self.seen.record(logits * 2"),
    (NoPosition, "without its position", "self.seen.record(logits)"),
    (Truth, "truth", "self.seen.record(logits > 0"),
    (Read, "written, not read", "self.seen[at.batch"),
    (Assigned, "nothing is assigned", "self.seen[at.batch"),
    (InQuery, "query_transform records", "self.seen.record(q"),
    (InMask, "logits_mask records", "self.seen.record(at.kv_pos"),
    (InOutput, "output_transform records", "self.seen.record(o"),
]


@pytest.mark.parametrize(("variant", "text", "place"), MISTAKES, ids=lambda x: str(x)[:20])
def test_mistakes_point_at_the_line(
    placed: Callable[[WarploomError, str], bool], variant: type[wl.Variant], text: str, place: str
) -> None:
    with pytest.raises(FieldMisuse, match=text) as caught:
        trace(variant())
    assert placed(caught.value, place)


@pytest.mark.parametrize("variant", [Twice, NoPosition, Read, InQuery, InMask, InOutput])
def test_the_oracle_refuses_them_too(variant: type[wl.Variant]) -> None:
    with pytest.raises(FieldMisuse, match="seen"):
        seen = np.zeros((1, 4, 3, 5), np.float32)
        wl.reference_attention(variant(), *tensors(), inputs={"seen": seen})


def test_an_output_that_nothing_is_recorded_in() -> None:
    with pytest.raises(FieldMisuse, match="nothing is recorded in it"):
        trace(Unused())


def test_two_parts_cannot_share_an_output() -> None:
    with pytest.raises(ChainClash, match="seen"):
        _ = Dump() & Dump()


def test_a_recorded_value_must_be_the_same_each_time() -> None:
    class Random(Dump):
        def logits_transform(self, logits, at):
            self.seen.record(logits * float(np.random.default_rng().random()), at)
            return logits

    with pytest.raises(ImpureFunctor):
        trace(Random())
