"""Numbers of the paper's text beside the model's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from warploom.serving.prefetch.accelerators import PAPER
from warploom.serving.prefetch.exploration import (
    CLUSTERS,
    L2_MEGABYTES,
    TERAOPS,
    densities,
    latencies,
    scale_out,
    speedup_by_l2_bandwidth,
    speedup_by_link,
)
from warploom.serving.prefetch.model_shapes import MODELS
from warploom.serving.prefetch.paper_runs import (
    devices_whose_l2_holds_a_section,
    largest_decoding_speedup,
    table_1,
)


@dataclass(frozen=True)
class Comparison:
    """A number of the paper's text and the model's.

    Attributes:
        what: it is, with the place.
        paper, here: both.
        measured: whether the paper's is of a machine, where the others are of its own model.
    """

    what: str
    paper: float
    here: float
    measured: bool = False

    @property
    def error(self) -> float:
        """Relative."""
        return self.here / self.paper - 1


def comparisons() -> Iterator[Comparison]:
    """All numbers of the text that the model has, too."""
    yield from _measured()
    yield from _explored()


def _measured() -> Iterator[Comparison]:
    """Section 4, and figure 2, which needs no time."""
    devices = devices_whose_l2_holds_a_section()
    yield Comparison("figure 2, devices whose L2 holds any section", 16, devices)
    for name, devices, theirs, ours in table_1():
        yield Comparison(f"table 1, {name} on {devices}, speedup", theirs, ours, measured=True)
    most = largest_decoding_speedup()
    yield Comparison("figure 4, largest speedup of decoding", 1.82, most, measured=True)


def _explored() -> Iterator[Comparison]:
    """Figures 6 to 10."""
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
    # the text does not say between which bandwidths: L2 has 5 to 10 times memory's, by section 3
    slow, fast = (n * PAPER.memory_bandwidth / 1e12 for n in (5, 10))
    gains = [
        speedup_by_l2_bandwidth(fast, ops) / speedup_by_l2_bandwidth(slow, ops) - 1
        for ops in TERAOPS
    ]
    yield Comparison("figure 9, speedup gained by L2's bandwidth, most", 0.10, max(gains))
    points = [scale_out(devices) for devices in CLUSTERS]
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
