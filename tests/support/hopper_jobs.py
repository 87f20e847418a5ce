"""Variants, formats and tiles that together go every way through the Hopper template."""

from __future__ import annotations

import warploom as wl
from warploom.codegen.source import TileConfig
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.runtime.trials.case import Setup

ONE, TWO = TileConfig(64, 128, 4, 2, "hopper", 2), TileConfig(128, 128, 8, 2, "hopper", 1)
WIDE, THIRDS = TileConfig(128, 64, 8, 2, "hopper", 1), TileConfig(128, 96, 8, 2, "hopper", 1)
THREE, DEEP = TileConfig(192, 96, 12, 3, "hopper", 2), TileConfig(192, 64, 12, 4, "hopper", 1)
E4M3 = "float8_e4m3fn"


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


def of(
    kv_format: KVFormat, dtype: str, dim: int, tile: TileConfig, dim_v: int | None = None
) -> Setup:
    return Setup(kv_format, dtype, dim, dim_v or dim, tile=tile)


def narrow(
    kv_format: KVFormat, dtype: str, tile: TileConfig, kv_dtype: str, dim: int = 128
) -> Setup:
    return Setup(kv_format, dtype, dim, dim, tile=tile, kv_dtype=kv_dtype)


JOBS = [
    (wl.Causal(), of(wl.Ragged(), "float16", 128, ONE)),
    (wl.Causal() & wl.Rope(), of(wl.Paged(16), "bfloat16", 128, ONE)),
    (wl.DocumentMask(), of(wl.Ragged(), "bfloat16", 128, ONE)),
    (wl.QKNorm(), of(wl.Paged(3), "float16", 64, ONE)),
    (wl.Causal() & wl.QKNorm() & NormedValues(), of(wl.Ragged(), "bfloat16", 128, TWO)),
    (wl.Causal() & wl.QKNorm() & wl.Rope(), of(wl.Paged(16), "float16", 64, TWO)),
    (wl.Causal() & Standardised(), of(wl.Ragged(), "bfloat16", 128, TWO)),
    (Standardised(), of(wl.Paged(3), "float16", 96, ONE)),
    (wl.Causal() & wl.QKNorm(), of(wl.Composed(16), "bfloat16", 128, TWO)),
    (NormedValues() & Standardised(), of(wl.Composed(4), "float16", 64, ONE)),
    (wl.QKNorm(), of(wl.BlockSparse(block=(16, 8)), "bfloat16", 96, TWO)),
    (wl.Variant(), of(wl.BlockSparse(block=(32, 16)), "float16", 128, ONE)),
    (wl.Causal() & wl.Rope(), of(wl.Rolling(100, 3), "bfloat16", 128, ONE)),
    (wl.QKNorm(), of(wl.Rolling(90, 0, positions="cache"), "float16", 64, TWO)),
    (wl.Causal() & wl.SoftCap(5.0), of(wl.Paged(16), "float16", 128, TWO)),
    (SomeKeys(), of(wl.Ragged(), "bfloat16", 128, TWO)),
    (SomeKeys() & wl.Alibi(), of(wl.Paged(1), "bfloat16", 128, ONE)),
    (SomeKeys(), of(wl.Paged(16), "bfloat16", 256, WIDE)),
    (wl.Causal() & wl.SlidingWindow(40), of(wl.Ragged(), "bfloat16", 128, TWO)),
    (wl.Causal(), of(wl.Ragged(), "float16", 64, THREE)),
    (Near(), of(wl.Paged(1), "bfloat16", 64, THREE)),
    (wl.Causal() & Capped(), of(wl.Paged(16), "float16", 32, THREE)),
    (Sigmoid(), of(wl.Ragged(), "bfloat16", 40, DEEP)),
    (wl.Variant(), of(wl.Dense(), "float16", 64, DEEP)),
    # Transforms by halves and quarters of vectors, beside accumulators and in a group of their own.
    (wl.Causal() & wl.Rope(), of(wl.Ragged(), "bfloat16", 256, WIDE)),
    (wl.QKNorm(), of(wl.Paged(16), "float16", 256, WIDE)),
    (wl.Causal() & wl.QKNorm() & wl.Rope(), of(wl.Paged(1), "bfloat16", 192, THIRDS)),
    (wl.Causal() & wl.QKNorm() & wl.Rope(), of(wl.Ragged(), "float16", 160, THIRDS)),
    (wl.Rope() & NormedValues(), of(wl.Paged(3), "float16", 256, WIDE)),
    (wl.QKNorm() & NormedValues(), of(wl.Ragged(), "bfloat16", 192, THIRDS)),
    (wl.QKNorm() & NormedValues(), of(wl.Paged(1), "float16", 72, TWO)),
    (wl.Causal() & wl.Rope(), of(wl.Paged(1), "bfloat16", 72, TWO)),
    (wl.Causal() & Biased(), of(wl.Ragged(), "float16", 128, TWO)),
    (Biased() & wl.FlashSigmoid(bias=-2.0), of(wl.Paged(1), "bfloat16", 64, TWO)),
    # Widths of swizzles, and columns that take one instruction of the tensor cores or two.
    (wl.Causal(), of(wl.Ragged(), "float16", 96, TWO)),
    (wl.Causal(), of(wl.Ragged(), "bfloat16", 160, THIRDS)),
    (wl.Causal(), of(wl.Paged(16), "bfloat16", 192, THIRDS)),
    (wl.Variant(), of(wl.Ragged(), "float16", 192, TWO, 128)),
    (wl.Variant(), of(wl.Paged(16), "float16", 96, TWO, 64)),
    (wl.Causal(), of(wl.Ragged(), "bfloat16", 96, WIDE, 224)),
]
# 8-bit keys and values, widened where they landed, by a group or ahead, or transformed on the way.
NARROW_JOBS = [
    (wl.Causal(), narrow(wl.Paged(16), "bfloat16", TWO, E4M3)),
    (wl.Causal() & wl.HeadKVScale(), narrow(wl.Ragged(), "float16", ONE, "int8")),
    (wl.Causal() & wl.SoftCap(5.0), narrow(wl.Paged(3), "bfloat16", TWO, "float8_e5m2")),
    (wl.Causal() & wl.Rope(), narrow(wl.Paged(16), "bfloat16", ONE, E4M3)),
    (wl.Causal() & Biased(), narrow(wl.Ragged(), "bfloat16", TWO, E4M3)),
    (wl.TokenKVScale(), narrow(wl.Ragged(), "bfloat16", TWO, E4M3)),
    (wl.Causal() & wl.Alibi(), narrow(wl.Composed(16), "float16", TWO, E4M3)),
    (wl.Variant(), narrow(wl.BlockSparse(block=(32, 16)), "float16", ONE, "int8", 112)),
    (wl.QKNorm() & NormedValues(), narrow(wl.Rolling(100, 3), "bfloat16", TWO, E4M3)),
]
