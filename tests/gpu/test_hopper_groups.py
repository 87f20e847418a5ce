"""The Hopper kernel on a GPU with one, two and three groups that compute, whatever is chosen."""

from __future__ import annotations

from typing import Any

import pytest

import warploom as wl
from warploom.codegen.source import TileConfig
from warploom.dsl.formats import KVFormat
from warploom.dsl.position import Position
from warploom.dsl.symbols import Value
from warploom.runtime.trials import Case, Setup, mismatch
from warploom.testing import warm_up

pytestmark = pytest.mark.gpu

ONE, TWO = TileConfig(64, 128, 4, 2, "hopper", 2), TileConfig(128, 128, 8, 2, "hopper", 1)
WIDE, THIRDS = TileConfig(128, 64, 8, 2, "hopper", 1), TileConfig(128, 96, 8, 2, "hopper", 1)
THREE, DEEP = TileConfig(192, 96, 12, 3, "hopper", 2), TileConfig(192, 64, 12, 4, "hopper", 1)


# Three groups read no fields, so that these have their numbers in the kernel.
class Capped(wl.Variant):
    def logits_transform(self, logits: Value, at: Position) -> Value:
        return 5.0 * wl.tanh(logits / 5.0)


class Near(wl.Variant):
    def logits_mask(self, at: Position) -> Value:
        return (at.kv_pos <= at.q_pos) & (at.q_pos - at.kv_pos < 40)


class SomeKeys(wl.Variant):
    """What is left of its mask below the diagonal is the tensor."""

    hidden = wl.Tensor("bool", ("kv_head", "kv_pos"))

    def logits_mask(self, at: Position) -> Value:
        return ~self.hidden[at.kv_head, at.kv_pos] & (at.kv_pos <= at.q_pos)


class Biased(wl.Variant):
    """Each element loads a number of its own; keys behind a request's last are asked for none."""

    added = wl.Tensor("float32", ("q_head", "kv_pos"))

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return logits + self.added[at.q_head, at.kv_pos]


class Sigmoid(wl.Variant):
    softmax = False

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return wl.sigmoid(logits - 2.0)


class NormedValues(wl.Variant):
    """A group of warps reduces rows of values; some rows of a tile do not exist."""

    def value_transform(self, v: Value, at: Position) -> Value:
        return v * wl.rsqrt(wl.sum(v * v) + 1.0)


class Standardised(wl.Variant):
    """Two reductions one after the other, the second of what the first gave."""

    def key_transform(self, k: Value, at: Position) -> Value:
        k = k - wl.sum(k) * 0.01
        return k * wl.rsqrt(wl.sum(k * k) * 0.01 + 1.0)


def on_gpu(
    kv_format: KVFormat, dtype: str, dim: int, tile: TileConfig, dim_v: int | None = None
) -> Setup:
    return Setup(kv_format, dtype, dim, dim_v or dim, "cuda", tile)


JOBS = [
    (wl.Causal(), on_gpu(wl.Ragged(), "float16", 128, ONE)),
    (wl.Causal() & wl.Rope(), on_gpu(wl.Paged(16), "bfloat16", 128, ONE)),
    (wl.DocumentMask(), on_gpu(wl.Ragged(), "bfloat16", 128, ONE)),
    (wl.QKNorm(), on_gpu(wl.Paged(3), "float16", 64, ONE)),
    (wl.Causal() & wl.QKNorm() & NormedValues(), on_gpu(wl.Ragged(), "bfloat16", 128, TWO)),
    (wl.Causal() & wl.QKNorm() & wl.Rope(), on_gpu(wl.Paged(16), "float16", 64, TWO)),
    (wl.Causal() & Standardised(), on_gpu(wl.Ragged(), "bfloat16", 128, TWO)),
    (Standardised(), on_gpu(wl.Paged(3), "float16", 96, ONE)),
    (wl.Causal() & wl.QKNorm(), on_gpu(wl.Composed(16), "bfloat16", 128, TWO)),
    (NormedValues() & Standardised(), on_gpu(wl.Composed(4), "float16", 64, ONE)),
    (wl.QKNorm(), on_gpu(wl.BlockSparse(block=(16, 8)), "bfloat16", 96, TWO)),
    (wl.Variant(), on_gpu(wl.BlockSparse(block=(32, 16)), "float16", 128, ONE)),
    (wl.Causal() & wl.SoftCap(5.0), on_gpu(wl.Paged(16), "float16", 128, TWO)),
    (SomeKeys(), on_gpu(wl.Ragged(), "bfloat16", 128, TWO)),
    (SomeKeys() & wl.Alibi(), on_gpu(wl.Paged(1), "bfloat16", 128, ONE)),
    (SomeKeys(), on_gpu(wl.Paged(16), "bfloat16", 256, WIDE)),
    (wl.Causal() & wl.SlidingWindow(40), on_gpu(wl.Ragged(), "bfloat16", 128, TWO)),
    (wl.Causal(), on_gpu(wl.Ragged(), "float16", 64, THREE)),
    (Near(), on_gpu(wl.Paged(1), "bfloat16", 64, THREE)),
    (wl.Causal() & Capped(), on_gpu(wl.Paged(16), "float16", 32, THREE)),
    (Sigmoid(), on_gpu(wl.Ragged(), "bfloat16", 40, DEEP)),
    (wl.Variant(), on_gpu(wl.Dense(), "float16", 64, DEEP)),
    # Transforms by halves and quarters of vectors, beside accumulators and in a group of their own.
    (wl.Causal() & wl.Rope(), on_gpu(wl.Ragged(), "bfloat16", 256, WIDE)),
    (wl.QKNorm(), on_gpu(wl.Paged(16), "float16", 256, WIDE)),
    (wl.Causal() & wl.QKNorm() & wl.Rope(), on_gpu(wl.Paged(1), "bfloat16", 192, THIRDS)),
    (wl.Causal() & wl.QKNorm() & wl.Rope(), on_gpu(wl.Ragged(), "float16", 160, THIRDS)),
    (wl.Rope() & NormedValues(), on_gpu(wl.Paged(3), "float16", 256, WIDE)),
    (wl.QKNorm() & NormedValues(), on_gpu(wl.Ragged(), "bfloat16", 192, THIRDS)),
    (wl.QKNorm() & NormedValues(), on_gpu(wl.Paged(1), "float16", 72, TWO)),
    (wl.Causal() & wl.Rope(), on_gpu(wl.Paged(1), "bfloat16", 72, TWO)),
    (wl.Causal() & Biased(), on_gpu(wl.Ragged(), "float16", 128, TWO)),
    (Biased() & wl.FlashSigmoid(bias=-2.0), on_gpu(wl.Paged(1), "bfloat16", 64, TWO)),
    # Widths of swizzles, and columns that take one instruction of the tensor cores or two.
    (wl.Causal(), on_gpu(wl.Ragged(), "float16", 96, TWO)),
    (wl.Causal(), on_gpu(wl.Ragged(), "bfloat16", 160, THIRDS)),
    (wl.Causal(), on_gpu(wl.Paged(16), "bfloat16", 192, THIRDS)),
    (wl.Variant(), on_gpu(wl.Ragged(), "float16", 192, TWO, 128)),
    (wl.Variant(), on_gpu(wl.Paged(16), "float16", 96, TWO, 64)),
    (wl.Causal(), on_gpu(wl.Ragged(), "bfloat16", 96, WIDE, 224)),
]


@pytest.fixture(scope="module")
def kernels() -> Any:
    return warm_up(JOBS)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("q_lens", "kv_lens"),
    [((70, 1, 0, 33), (130, 257, 40, 33)), ((3, 500, 1), (0, 600, 1200)), ((100,), (5000,))],
)
def test_any_number_of_groups_agrees_with_the_oracle(
    q_lens: tuple[int, ...], kv_lens: tuple[int, ...], kernels: Any
) -> None:
    for variant, setup in kernels:
        equal = isinstance(setup.kv_format, wl.Dense)
        q_lens = (q_lens[0],) * len(q_lens) if equal else q_lens
        kv_lens = (kv_lens[0],) * len(kv_lens) if equal else kv_lens
        case = Case(setup, q_lens, kv_lens, num_kv_heads=2, group_size=2, seed=3)
        found = mismatch(variant, case)
        assert found is None, f"{variant!r} {case}: {found}"
