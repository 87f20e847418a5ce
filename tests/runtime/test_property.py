"""Random variants, formats, lengths, heads, types and layouts on the CPU, against the oracle.

Kernels come from a fixed pool, compiled once and in parallel; everything else is drawn freely.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from support.sampling import few

from warploom.codegen.source import TileConfig
from warploom.dsl.library.alibi import Alibi
from warploom.dsl.library.attention_sink import AttentionSink
from warploom.dsl.library.causal import Causal
from warploom.dsl.library.document_mask import DocumentMask
from warploom.dsl.library.flash_sigmoid import FlashSigmoid
from warploom.dsl.library.kv_scale import HeadKVScale, KVScale, TokenKVScale
from warploom.dsl.library.prefix_lm import PrefixLM
from warploom.dsl.library.qk_norm import QKNorm
from warploom.dsl.library.rope import Rope
from warploom.dsl.library.sliding_window import SlidingWindow
from warploom.dsl.library.soft_cap import SoftCap
from warploom.dsl.types.formats import BlockSparse, Dense, Paged, Ragged, Rolling
from warploom.dsl.values.functions import sigmoid, to_float, where
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.fields import Scalar, Tensor
from warploom.dsl.variants.flex import flex
from warploom.dsl.variants.variant import Variant
from warploom.errors import MissingInput
from warploom.runtime.trials.case import Case, Setup
from warploom.runtime.trials.random_inputs import random_inputs
from warploom.runtime.trials.trials import mismatch
from warploom.testing import CheckFailed, check, run_property, warm_up

# Small tiles, so that small batches have several, and split them.
SMALL, WIDE = TileConfig(12, 64, 1, 1), TileConfig(48, 128, 1, 1)


class EveryHook(Variant):
    """Each hook does something, with each kind of input."""

    strength = Scalar("float32", default=0.5)
    offset = Scalar("int32")
    per_key = Tensor("float32", ("batch", "kv_pos"))
    per_head = Tensor("float32", ("q_head",))
    hidden = Tensor("bool", ("kv_head", "kv_pos"))

    def query_transform(self, q: Value, at: Position) -> Value:
        return q * (1.0 + self.strength * to_float(at.lane) / to_float(at.head_dim))

    def key_transform(self, k: Value, at: Position) -> Value:
        return where(at.kv_pos % 3 == 0, -k, k)

    def value_transform(self, v: Value, at: Position) -> Value:
        return v * self.per_key[at.batch, at.kv_pos]

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return logits + self.per_head[at.q_head] * to_float(at.q_pos - at.kv_pos) / 64.0

    def logits_mask(self, at: Position) -> Value:
        near = at.kv_pos <= at.q_pos + self.offset
        return near & ~self.hidden[at.kv_head, at.kv_pos]

    def output_transform(self, o: Value, at: Position) -> Value:
        return o * sigmoid(at.lse)


POOL = [
    (Variant(), Setup(Dense(), "float32", 64, 64, tile=SMALL)),
    (Causal() & SoftCap(5.0), Setup(Dense(layout="HND"), "float16", 80, 80, tile=WIDE)),
    (SlidingWindow(9, 2, 3), Setup(Paged(1), "bfloat16", 64, 64, tile=SMALL)),
    (Causal() & Rope(), Setup(Paged(16, layout="HND"), "bfloat16", 128, 128, tile=SMALL)),
    (Alibi(), Setup(Ragged(layout="HND"), "float16", 96, 96, tile=WIDE)),
    (FlashSigmoid(bias=-2.0), Setup(Ragged(), "float32", 40, 40, tile=SMALL)),
    (PrefixLM(), Setup(Paged(5), "bfloat16", 64, 32, tile=SMALL)),
    (Causal() & DocumentMask(), Setup(Ragged(), "float32", 8, 64, tile=SMALL)),
    (Variant(), Setup(BlockSparse(block=(32, 16)), "bfloat16", 64, 64, tile=SMALL)),
    (Causal() & SlidingWindow(30), Setup(BlockSparse(block=(1, 1)), "float32", 32, 32, tile=SMALL)),
    (Causal() & AttentionSink(), Setup(Paged(16), "float16", 256, 256, tile=SMALL)),
    (QKNorm(), Setup(Paged(7, layout="HND"), "bfloat16", 72, 72, tile=WIDE)),
    (EveryHook(), Setup(BlockSparse(block=(5, 3)), "float32", 64, 64, tile=SMALL)),
    (EveryHook(), Setup(Paged(4), "float32", 64, 64, tile=WIDE)),
    (HeadKVScale(), Setup(Paged(16), "bfloat16", 64, 64, tile=SMALL, kv_dtype="float8_e4m3fn")),
    (
        Causal() & TokenKVScale() & SoftCap(5.0),
        Setup(Ragged(layout="HND"), "float16", 72, 40, tile=WIDE, kv_dtype="float8_e5m2"),
    ),
    (TokenKVScale(), Setup(Paged(3), "float32", 64, 64, tile=SMALL, kv_dtype="int8")),
    (
        KVScale(0.1, 0.2) & Causal(),
        Setup(Ragged(), "bfloat16", 80, 72, tile=WIDE, kv_dtype="int8"),
    ),
    (
        KVScale(0.5, 2.0) & Rope(),
        Setup(BlockSparse(block=(5, 3)), "float32", 64, 64, tile=SMALL, kv_dtype="float8_e4m3fn"),
    ),
    (EveryHook(), Setup(Rolling(60, 3), "float32", 64, 64, tile=SMALL)),
    (EveryHook(), Setup(Rolling(33, positions="cache"), "float32", 32, 64, tile=WIDE)),
    (
        Causal() & TokenKVScale(),
        Setup(Rolling(16, 1, layout="HND"), "bfloat16", 64, 64, tile=SMALL, kv_dtype="int8"),
    ),
]


def test_every_kernel_agrees_with_the_oracle_on_random_batches() -> None:
    run_property(warm_up(POOL), None, max_examples=few(80, of=120))


@pytest.mark.parametrize("subject", POOL, ids=lambda subject: f"{subject[0].name}-{subject[1]}")
def test_long_requests_are_split_and_merged(subject: tuple[Variant, Setup]) -> None:
    variant, setup = subject
    case = Case(setup, (3, 3), (1500, 700), num_kv_heads=1, group_size=2, seed=1)
    found = mismatch(variant, case)
    assert found is None, found


class Inconsistent(Variant):
    """Tells symbols from arrays, so that its kernel is not its oracle."""

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return where(at.kv_pos == 3, logits + 1.0, logits) if hasattr(logits, "node") else logits


@pytest.fixture
def unshrunk() -> Iterator[None]:
    """The first failure is reported as it was drawn: making it small takes 200 runs."""
    before = hypothesis.settings.get_current_profile_name()
    phases = [hypothesis.Phase.generate]
    hypothesis.settings.register_profile("unshrunk", hypothesis.settings(phases=phases))
    hypothesis.settings.load_profile("unshrunk")
    yield
    hypothesis.settings.load_profile(before)


def test_check_reports_the_smallest_failing_batch() -> None:
    with pytest.raises(CheckFailed) as caught:
        check(Inconsistent(), formats=[Paged(3)], dtypes=["float32"], devices=["cpu"])
    case = caught.value.case
    assert sum(case.q_lens) == 1  # one row shows it
    assert 4 <= max(case.kv_lens) <= 15
    assert (case.num_kv_heads, case.group_size) == (1, 1)
    for part in (
        "Inconsistent() fails on",
        "Paged",
        "q_lens [1]",
        "row 0, head 0",
        "got",
        "exceeds",
    ):
        assert part in str(caught.value)
    assert mismatch(Inconsistent(), case) is not None


class Raises(Variant):
    """Cannot run: its input's size is unknown to the test."""

    table = Tensor("float32", (None,))

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return logits + self.table[at.kv_pos % 9]


class Direct(Variant):
    """Its inputs have no axes, but positions index them as they are."""

    table = Tensor("float32", (None, None))
    offsets = Tensor("int32", ("batch", None))

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return logits + self.table[at.kv_pos, at.q_head] + self.offsets[at.batch, at.q_idx]


def test_check_draws_tensors_whose_sizes_follow_from_their_indices() -> None:
    case = Case(Setup(Ragged()), (2, 5), (7, 30), num_kv_heads=2, group_size=3)
    drawn = random_inputs(Direct(), case, np.random.default_rng(0), set())
    assert {name: tuple(x.shape) for name, x in drawn.items()} == {
        "table": (30, 6),
        "offsets": (2, 5),
    }
    check(Direct(), formats=[Ragged()], dtypes=["float32"], devices=["cpu"], max_examples=10)


class Biased(Variant):
    """No axis says how long the second dimension of its table is."""

    table = Tensor("float32", ("q_head", None))

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return logits + self.table[at.q_head, (at.q_pos - at.kv_pos) % 9]


def test_check_fits_bound_tensors_to_the_heads_of_a_batch() -> None:
    setup = {"formats": [Ragged()], "dtypes": ["float32"], "devices": ["cpu"], "max_examples": 20}
    table = torch.arange(36.0).reshape(4, 9)
    for heads in (2, 4, 6):
        case = Case(Setup(Ragged()), (2,), (7,), num_kv_heads=2, group_size=heads // 2)
        drawn = random_inputs(Biased(table=table), case, np.random.default_rng(0), set())
        torch.testing.assert_close(drawn["table"], table[torch.arange(heads) % 4])
    check(Biased(table=table), **setup)  # type: ignore[arg-type]
    with pytest.raises(MissingInput, match="or bind a tensor"):
        check(Biased(), **setup)  # type: ignore[arg-type]

    def given(case: Case, rng: np.random.Generator) -> dict[str, Any]:
        return {"table": rng.random((case.num_q_heads, 9), np.float32)}

    check(Biased(), inputs=given, **setup)  # type: ignore[arg-type]


def test_check_draws_bools_for_scalars() -> None:
    class Halved(Variant):
        is_whole = Scalar("bool")

        def logits_transform(self, logits: Value, at: Position) -> Value:
            return where(self.is_whole, logits, logits * 0.5)

    check(Halved(), formats=[Ragged()], dtypes=["float32"], devices=["cpu"], max_examples=5)


def test_check_continues_captured_tensors_to_the_length_of_a_batch() -> None:
    documents = np.repeat(np.arange(4, dtype=np.int32), 5)
    variant = flex(None, lambda b, h, q_idx, kv_idx: documents[q_idx] == documents[kv_idx])
    check(variant, formats=[Ragged()], dtypes=["float32"], devices=["cpu"], max_examples=20)


@pytest.mark.usefixtures("unshrunk")
def test_check_reports_errors_with_their_batch_and_takes_inputs() -> None:
    setup = {"formats": [Ragged()], "dtypes": ["float32"], "devices": ["cpu"], "max_examples": 10}
    with pytest.raises(MissingInput, match=r"Raises reads 'table'.*dimension 0 has no axis"):
        check(Raises(), **setup)  # type: ignore[arg-type]
    with pytest.raises(CheckFailed, match=r"IndexError|WrongShape"):
        check(Raises(), inputs=lambda case, rng: {"table": rng.random((9, 9))}, **setup)  # type: ignore[arg-type]
    check(Raises(), inputs=lambda case, rng: {"table": rng.random(9)}, **setup)  # type: ignore[arg-type]


class Undefined(Variant):
    def logits_transform(self, logits: Value, at: Position) -> Value:
        return logits + (to_float(at.kv_pos - at.kv_pos) / (at.kv_pos - at.kv_pos))


@pytest.mark.usefixtures("unshrunk")
def test_check_says_when_the_functors_give_nan(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(CheckFailed, match="the functors themselves give nan here"):
        check(Undefined(), formats=[Ragged()], dtypes=["float32"], devices=["cpu"], max_examples=10)
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]
