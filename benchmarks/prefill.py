"""Prefill beside its peers: causal, full, variants, one's own, RoPE, ragged, paged, chunks, split.

    python benchmarks/prefill.py [--tables prefill prefill_paged] [--quick] [--only warploom]

TFLOP/s count visible pairs only. Batches of equal lengths: 16 requests, 16 heads of 128, fp16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import peers_flashinfer as flashinfer
import prefill_variants as variants
import torch
from batches import Shape, Truth, even_batch, everything, label, lengths
from narrow_caches import PORTABLE, make_representable, narrow_cache
from peers import cudnn, flex, warploom
from peers_upstream import cudnn_frontend, flash3, flash3_paged
from tables import Setting, Table, Trial, attention_trial, main

import warploom as wl

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
CHUNKS = ((256, 8192), (1024, 4096), (1024, 8192), (2048, 8192), (2048, 16384))  # queries, keys
KINDS = ("constant", "uniform", "zipf")
FP16 = variants.FP16


def causal_trials(setting: Setting) -> Iterator[Trial]:
    contestants = (
        warploom(), cudnn(), cudnn_frontend(), flex(), flashinfer.ragged("fa3"), flash3()
    )  # fmt: skip
    for length in setting.pick(LENGTHS, 128):
        shape = even_batch(length, setting.on_gpu)
        name = f"causal {label(length)}"
        yield attention_trial(name, shape, contestants, unit="TFLOP/s", truth=Truth(tolerance=FP16))


def no_mask(device: torch.device) -> wl.Variant:
    return wl.Variant()


def no_mods(device: torch.device) -> tuple[None, None]:
    return None, None


def full_trials(setting: Setting) -> Iterator[Trial]:
    contestants = (
        warploom(no_mask), cudnn(False), cudnn_frontend(False), flex(no_mods),
        flashinfer.ragged("fa3", causal=False), flash3(False),
    )  # fmt: skip
    for dim in setting.pick((64, 128, 256), 64):
        length = 8192 if setting.on_gpu else 128
        shape = even_batch(length, setting.on_gpu, dim)
        yield attention_trial(
            f"{label(length)}, head_dim {dim}", shape, contestants, unit="TFLOP/s",
            truth=Truth(mask=everything, tolerance=FP16), flops=shape.flops(causal=False),
        )  # fmt: skip


def uneven(kind: str, setting: Setting, page_size: int = 0) -> Shape:
    """16 requests of mean length 1024, 32 query and 8 key/value heads."""
    drawn = lengths(kind, 16, 1024) if setting.on_gpu else lengths(kind, 4, 64)
    heads = (32, 8, 128) if setting.on_gpu else (4, 2, 64)
    return Shape(drawn, drawn, *heads, page_size=page_size)


def ragged_trials(setting: Setting) -> Iterator[Trial]:
    contestants = (
        warploom(), cudnn(), flashinfer.ragged("fa3"), flashinfer.ragged("fa2"), flash3()
    )  # fmt: skip
    for kind in setting.pick(KINDS, "uniform"):
        yield attention_trial(
            kind, uneven(kind, setting), contestants, unit="TFLOP/s", truth=Truth(tolerance=FP16)
        )


def paged_trials(setting: Setting) -> Iterator[Trial]:
    contestants = (warploom(), flashinfer.paged("fa3"), flashinfer.paged("fa2"), flash3_paged())
    for kind in setting.pick(KINDS, "uniform"):
        for page_size in setting.pick((16, 64, 1), 16):
            yield attention_trial(
                f"{kind}, page {page_size}", uneven(kind, setting, page_size), contestants,
                unit="TFLOP/s", truth=Truth(tolerance=FP16),
            )  # fmt: skip


def chunk_trials(setting: Setting) -> Iterator[Trial]:
    """A chunk of one long prompt, as serving engines compute them: few tiles, hard to balance."""
    contestants = (warploom(), flashinfer.paged("fa3"), flash3_paged())
    for q_heads, kv_heads in setting.pick(((32, 8), (32, 32), (16, 16)), (4, 2)):
        for queries, keys in CHUNKS if setting.on_gpu else ((16, 128),):
            shape = Shape((queries,), (keys,), q_heads, kv_heads, 128, page_size=16)
            yield attention_trial(
                f"{label(queries)} of {label(keys)}, heads {q_heads}/{kv_heads}", shape,
                contestants, unit="TFLOP/s", truth=Truth(tolerance=2 * FP16),
            )  # fmt: skip


def split_trials(setting: Setting) -> Iterator[Trial]:
    """One request over all CTAs."""
    contestants = (warploom(), flashinfer.ragged("fa3"), flashinfer.ragged("fa2"))
    queries, keys = (128, 131072) if setting.on_gpu else (16, 1024)
    for q_heads, kv_heads in setting.pick(((32, 32), (32, 8)), (4, 2)):
        yield attention_trial(
            f"{queries} queries, {label(keys)} keys, heads {q_heads}/{kv_heads}",
            Shape((queries,), (keys,), q_heads, kv_heads, 128), contestants,
            unit="TFLOP/s", truth=Truth(tolerance=2 * FP16),
        )  # fmt: skip


def narrow_trials(setting: Setting) -> Iterator[Trial]:
    """Over a cache of 8 bits, by the tile that is chosen and by a portable one."""
    contestants = (warploom(), narrow_cache())
    if setting.on_gpu:
        contestants += (narrow_cache("e4m3 cache, portable tile", tile=PORTABLE),)
    for length in setting.pick((1024, 8192), 128):
        for dtype in (torch.bfloat16, torch.float16):
            batch, heads = (max(2, 16384 // length), (32, 8)) if setting.on_gpu else (2, (4, 2))
            shape = Shape((length,) * batch, (length,) * batch, *heads, 128, dtype, 16)
            name = f"{batch} x {label(length)}, {shape.describe()['dtype']}"
            trial = attention_trial(name, shape, contestants, unit="TFLOP/s")
            yield replace(trial, make=partial(make_representable, shape))


TABLES = (
    Table("prefill", causal_trials, ("matmul", "copy")),
    Table("prefill_full", full_trials, ("matmul", "copy")),
    Table("prefill_variants", variants.variant_trials, ("matmul", "copy")),
    Table("prefill_own", variants.own_trials, ("matmul", "copy")),
    Table("prefill_rope", variants.rope_trials, ("matmul", "copy")),
    Table("prefill_ragged", ragged_trials, ("matmul", "copy")),
    Table("prefill_paged", paged_trials, ("matmul", "copy")),
    Table("prefill_chunks", chunk_trials, ("matmul", "copy")),
    Table("prefill_split", split_trials, ("matmul", "copy"), bound=True),
    Table("prefill_fp8", narrow_trials, ("matmul", "copy")),
)

if __name__ == "__main__":
    main(TABLES, __doc__ or "")
