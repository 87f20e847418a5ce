"""The design space of an accelerator: any chips, models and batches, and the paper's figures.

Section 5 of PRESERVE and its appendix say which sizes of L2, links and clusters are looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np

from warploom.errors import ArgumentError
from warploom.serving.prefetch.accelerators import MB, PAPER, Accelerator
from warploom.serving.prefetch.checks import checked_number
from warploom.serving.prefetch.model_shapes import LLAMA3_405B, MODELS, ModelShape
from warploom.serving.prefetch.performance import (
    Serving,
    collective_seconds,
    decode_seconds,
    end_to_end_seconds,
    layer_sections,
)

L2_MEGABYTES = tuple(range(8, 161, 8))
GIGABITS = (200, 400, 600, 800, 1000)  # of a link, figure 8
TERAOPS = (200, 400, 800, 1600, 3200)  # figure 9, whose text names none
CLUSTERS = (8, 16, 32, 64, 128)  # figure 10
_GBIT = 1e9 / 8


# Batches and lengths of section 5, on 32 devices.
SERVINGS = tuple(
    Serving(32, batch, length)
    for batch in (8, 16, 24, 32)
    for length in (2048, 4096, 8192, 16384)
)  # fmt: skip


@dataclass(frozen=True)
class Design:
    """A chip that serves a model in some way; times come when they are asked for.

    Attributes:
        chip: its rates, and its area where densities are asked for.
        model: sizes of its layers.
        serving: devices, requests, tokens of prompts and tokens that are decoded.
    """

    chip: Accelerator
    model: ModelShape
    serving: Serving

    def decode_seconds(self, prefetches: bool = True) -> float:
        """Seconds of all steps of decoding."""
        return decode_seconds(self.chip, self.model, self.serving, prefetches)

    def end_to_end_seconds(self, prefetches: bool = True) -> float:
        """Seconds of prefill and decoding."""
        return end_to_end_seconds(self.chip, self.model, self.serving, prefetches)

    @property
    def speedup(self) -> float:
        """Seconds without prefetches over those with them, of prefill and decoding."""
        return self.end_to_end_seconds(False) / self.end_to_end_seconds(True)

    def throughput(self, prefetches: bool = True) -> float:
        """Decoded tokens a second, of all requests and on all devices."""
        tokens = self.serving.batch * self.serving.decoded
        return tokens / self.decode_seconds(prefetches)

    def density(self, prefetches: bool = True) -> float:
        """Decoded tokens a second for each mm2 of a chip's cores and L2 (`Accelerator.area`).

        Raises:
            NoArea: it is not known of this chip.
        """
        return self.throughput(prefetches) / self.chip.area


def explore(
    chips: Iterable[Accelerator],
    models: Iterable[ModelShape] = MODELS,
    servings: Iterable[Serving] = SERVINGS,
) -> Iterator[Design]:
    """All designs: each chip with each model, served in each way, in this order.

    Chips that differ in one number are made by `dataclasses.replace`, or `with_l2`.

    Args:
        chips: accelerators.
        models: those of the paper by default.
        servings: the paper's batches and lengths on 32 devices by default (section 5).

    Raises:
        ArgumentError: one chip, model or serving in place of several.
    """
    given = {"chips": chips, "models": models, "servings": servings}
    for name, one in given.items():
        if isinstance(one, (Accelerator, ModelShape, Serving)):
            reason = f"is one {type(one).__name__}; expected several: put it into a list"
            raise ArgumentError(name=name, reason=reason)
    return (Design(*one) for one in product(chips, models, servings))


def with_l2(chip: Accelerator, megabytes: float) -> Accelerator:
    """The chip with an L2 of so many MB of 10^6 bytes; raises ArgumentError below 0."""
    return replace(chip, l2_bytes=checked_number("megabytes", megabytes, zero=True) * MB)


@cache
def latencies(
    model: ModelShape, chip: Accelerator = PAPER, sizes: Sequence[int] = L2_MEGABYTES
) -> tuple[float, ...]:
    """Figure 6: time of decoding for each size of L2 over that for the smallest, grid's mean."""
    chips = [with_l2(chip, size) for size in sizes]
    means = [_mean(one.decode_seconds() for one in explore([at], [model])) for at in chips]
    return tuple(mean / means[0] for mean in means)


@cache
def densities(
    prefetches: bool, chip: Accelerator = PAPER, sizes: Sequence[int] = L2_MEGABYTES
) -> tuple[float, ...]:
    """Figure 7: decoded tokens a second and mm2 for each size of L2, mean of models and grid."""
    chips = [with_l2(chip, size) for size in sizes]
    return tuple(_mean(one.density(prefetches) for one in explore([at])) for at in chips)


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def speedups(chip: Accelerator, serving: Serving) -> list[float]:
    """End to end, of each model."""
    return [one.speedup for one in explore([chip], servings=[serving])]


def speedup_by_link(gigabits: float) -> float:
    """Figure 8: mean over models, 128 devices, batch 16, 8k tokens, 104 MB; links in Gbit/s."""
    chip = replace(PAPER, link_bandwidth=checked_number("gigabits", gigabits) * _GBIT)
    return _mean(speedups(chip, Serving(128, 16, 8192)))


def speedup_by_l2_bandwidth(terabytes: float, teraops: float = 800.0) -> float:
    """Figure 9: mean over models, 32 devices, batch 16, 8k tokens, 104 MB.

    Args:
        terabytes: that L2 reads a second, of 10^12 bytes.
        teraops: 10^12 operations a second.
    """
    rates = checked_number("terabytes", terabytes), checked_number("teraops", teraops)
    chip = replace(PAPER, l2_bandwidth=rates[0] * 1e12, throughput=rates[1] * 1e12)
    return _mean(speedups(chip, Serving(32, 16, 8192)))


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
