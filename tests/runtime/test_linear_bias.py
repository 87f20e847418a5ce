"""Biases that grow from key to key, by kernels that fibers run on the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.emulator import Emulator
from support.linear_biases import INPUTS, VARIANTS

import warploom as wl
from warploom.codegen.source import TileConfig
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.runtime.trials.case import Case, Setup
from warploom.runtime.trials.trials import Trial, mismatch

STREAMED = Setup(wl.Paged(16), "bfloat16", 64, 64, tile=TileConfig(16, 64, 4, 2))
TALL = Setup(wl.Ragged(), "float16", 32, 32, tile=TileConfig(64, 32, 4, 2))
TWO_BLOCKS = Setup(wl.Ragged(), "float16", 32, 64, tile=TileConfig(64, 32, 2, 2))
NARROW = Setup(
    wl.Paged(16), "bfloat16", 64, 64, tile=TileConfig(16, 32, 2, 2), kv_dtype="float8_e4m3fn"
)
CASES = [
    ("alibi", STREAMED),
    ("alibi", NARROW),
    ("both ways", TWO_BLOCKS),
    ("decay", TALL),
    ("steep", STREAMED),
    ("steep", TWO_BLOCKS),
    ("backwards", TALL),
    ("after a cap", STREAMED),
    ("window", TALL),
    ("documents", TWO_BLOCKS),
    ("any slopes", STREAMED),
    ("any slopes", TALL),
    ("far origin", TALL),
]


@pytest.mark.some(4)
@pytest.mark.parametrize(("name", "setup"), CASES)
def test_biases_agree_with_the_oracle(emulator: Emulator, name: str, setup: Setup) -> None:
    for q_lens, kv_lens, heads in (
        ((1, 40, 3), (130, 90, 0), (2, 2)),
        ((2,), (700,), (1, 4)),  # keys are split
    ):
        case = Case(setup, q_lens, kv_lens, *heads, scale=2.0, seed=3)
        found = mismatch(VARIANTS[name], case, INPUTS.get(name))
        assert found is None, f"{case}: {found}"


class Huge(wl.Variant):
    """Biases of which float32 holds no digits behind hundreds, each row with another rounding."""

    far = wl.Scalar("int32")

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return logits + 7.3 * (at.kv_pos - self.far * at.q_pos)


@pytest.mark.parametrize("far", [9_999_991, -9_999_991])
def test_what_rounding_leaves_has_no_infinite_exponential(emulator: Emulator, far: int) -> None:
    case = Case(TALL, (90,), (90,), 1, 2, scale=2.0, seed=3)
    (output,), (lse,) = Trial(Huge(far=far), case).run()
    assert np.isfinite(output).all() and not np.isnan(lse).any() and (lse < np.inf).all()


def test_a_row_has_the_bits_of_its_own_slope(emulator: Emulator) -> None:
    """Beside steep rows and gentle ones: groups of three heads lie elsewhere in each chunk."""
    slopes = torch.tensor([20.0, 0.37, 0.21])  # beyond what is taken apart, and within
    attention = wl.AttentionWrapper(
        wl.Causal() & wl.Alibi(slopes=slopes), num_q_heads=3, num_kv_heads=1, head_dim=32,
        dtype="float16", device="cpu", tile=TileConfig(16, 32, 2, 2), batch_invariant=True,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(9, 3, 32, generator=generator).half()
    k, v = torch.randn(2, 64, 1, 32, generator=generator).half()
    attention.plan([0, 9], [0, 64])
    _, among = attention.run(q, (k, v), return_lse=True)  # float32: outputs round more
    for rows in (1, 2, 5):
        attention.plan([0, rows], [0, 64])
        _, sums = attention.run(q[-rows:], (k, v), return_lse=True)
        assert torch.equal(sums, among[-rows:])
