"""The paper's design space exploration, and how far the model here agrees with its figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from warploom.serving.prefetch.accelerators import MB, PAPER, Accelerator
from warploom.serving.prefetch.l2_model import (
    Serving,
    collective_seconds,
    decode_seconds,
    end_to_end_seconds,
    layer_sections,
)
from warploom.serving.prefetch.model_shapes import LLAMA3_405B, MODELS, ModelShape

L2_MEGABYTES = tuple(range(8, 161, 8))
_GBIT = 1e9 / 8


@cache
def _grid(devices: int = 32) -> tuple[Serving, ...]:
    """Batches and lengths of section 5."""
    lengths = (2048, 4096, 8192, 16384)
    return tuple(Serving(devices, batch, n) for batch in (8, 16, 24, 32) for n in lengths)


def with_l2(chip: Accelerator, megabytes: float) -> Accelerator:
    return replace(chip, l2_bytes=megabytes * MB)


@cache
def latencies(
    model: ModelShape, chip: Accelerator = PAPER, sizes: Sequence[int] = L2_MEGABYTES
) -> tuple[float, ...]:
    """Figure 6: time of decoding for each size of L2 over that for the smallest, grid's mean."""
    means = [
        float(np.mean([decode_seconds(with_l2(chip, size), model, one, True) for one in _grid()]))
        for size in sizes
    ]
    return tuple(mean / means[0] for mean in means)


@cache
def densities(
    prefetches: bool, chip: Accelerator = PAPER, sizes: Sequence[int] = L2_MEGABYTES
) -> tuple[float, ...]:
    """Figure 7: decoded tokens a second and mm2 for each size of L2, mean of models and grid."""
    found = []
    for size in sizes:
        at = with_l2(chip, size)
        rates = [
            one.batch * one.decoded / decode_seconds(at, model, one, prefetches)
            for model in MODELS
            for one in _grid()
        ]
        found.append(float(np.mean(rates)) / (at.core_area + at.l2_area * at.l2_bytes))
    return tuple(found)


def speedups(chip: Accelerator, serving: Serving) -> list[float]:
    """End to end, of each model."""
    return [
        end_to_end_seconds(chip, model, serving, False)
        / end_to_end_seconds(chip, model, serving, True)
        for model in MODELS
    ]


def speedup_by_link(gigabits: float) -> float:
    """Figure 8: mean over models, 128 devices, batch 16, 8k tokens, 104 MB."""
    chip = replace(PAPER, link_bandwidth=gigabits * _GBIT)
    return float(np.mean(speedups(chip, Serving(128, 16, 8192))))


def speedup_by_l2_bandwidth(terabytes: float, teraops: float = 800.0) -> float:
    """Figure 9: mean over models, 32 devices, batch 16, 8k tokens, 104 MB."""
    chip = replace(PAPER, l2_bandwidth=terabytes * 1e12, throughput=teraops * 1e12)
    return float(np.mean(speedups(chip, Serving(32, 16, 8192))))


@dataclass(frozen=True)
class ScaleOut:
    """A point of figure 10: Llama3-405B, batch 16, 8k tokens, 104 MB.

    Attributes:
        devices: of the cluster.
        speedup: of decoding.
        collective, attention, mlp: seconds of an all-reduce, and of reading what is behind it.
    """

    devices: int
    speedup: float
    collective: float
    attention: float
    mlp: float


def scale_out(devices: int) -> ScaleOut:
    """Figure 10, with the keys of the last step."""
    serving, model = Serving(devices, 16, 8192), LLAMA3_405B
    sections = layer_sections(PAPER, model, serving, 1, serving.length, serving.length)
    attention, mlp = (sum(x.bytes for x in one) / PAPER.memory_bandwidth for one in sections)
    collective = collective_seconds(PAPER, devices, serving.batch * model.hidden)
    before, after = (decode_seconds(PAPER, model, serving, flag) for flag in (False, True))
    return ScaleOut(devices, before / after, collective, attention, mlp)


@dataclass(frozen=True)
class Comparison:
    """A number of the paper's text and the model's.

    Attributes:
        what: it is, with the place.
        paper, here: both.
    """

    what: str
    paper: float
    here: float

    @property
    def error(self) -> float:
        """Relative."""
        return self.here / self.paper - 1


def comparisons() -> Iterator[Comparison]:
    """All numbers that the text gives for figures 6 to 10."""
    reductions = [1 - min(latencies(model)) for model in MODELS]
    yield Comparison("figure 6, latency saved, least", 0.20, min(reductions))
    yield Comparison("figure 6, latency saved, mean", 0.25, float(np.mean(reductions)))
    yield Comparison("figure 6, latency saved, most", 0.36, max(reductions))
    settled = Counter(_settled(latencies(model)) for model in MODELS)
    for at, here in zip(
        (136, 144), sorted(size for size, _ in settled.most_common(2)), strict=True
    ):
        yield Comparison("figure 6, MB beyond which most models gain nothing", at, here)
    plain, fetching = densities(False), densities(True)
    yield Comparison("figure 7, best MB without prefetches", 8, _best(plain))
    yield Comparison("figure 7, best MB with prefetches", 104, _best(fetching))
    yield Comparison("figure 7, best density gained", 1.25, max(fetching) / max(plain))
    yield Comparison("figure 7, tokens/s/mm2 without", 11.8, max(plain))
    yield Comparison("figure 7, tokens/s/mm2 with", 14.8, max(fetching))
    yield Comparison("figure 8, mean speedup at 200 Gbit/s", 1.18, speedup_by_link(200))
    yield Comparison("figure 8, mean speedup at 1000 Gbit/s", 1.27, speedup_by_link(1000))
    points = [scale_out(devices) for devices in (8, 16, 32, 64, 128)]
    best = max(points, key=lambda point: point.speedup)
    yield Comparison("figure 10, devices with the largest speedup", 32, best.devices)
    matching = next(point for point in points if point.devices == 32)
    ratio = matching.mlp / matching.collective
    yield Comparison("figure 10, MLP's reads over all-reduce at 32", 1.0, ratio)


def _best(values: Sequence[float]) -> float:
    return L2_MEGABYTES[int(np.argmax(values))]


def _settled(values: Sequence[float]) -> int:
    """The smallest L2 that is as good as the largest."""
    return next(
        size
        for size, value in zip(L2_MEGABYTES, values, strict=True)
        if value <= min(values) * (1 + 1e-9)
    )
