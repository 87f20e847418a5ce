"""What the model says of NVIDIA's GPUs: a collective of known length before a layer's reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from warploom.serving.prefetch.accelerators import B200, H100, H200, Accelerator
from warploom.serving.prefetch.model_shapes import LLAMA3_8B, LLAMA3_70B, ModelShape
from warploom.serving.prefetch.performance import (
    Prediction,
    Serving,
    best_bytes,
    layer_sections,
    predict,
)

CHIPS = (H100, H200, B200)
COLLECTIVES = (5e-6, 10e-6, 20e-6, 40e-6)  # seconds


@dataclass(frozen=True)
class Reads:
    """What lies between two collectives of a decoding step.

    Attributes:
        name: of model and part.
        bytes: that a device reads.
    """

    name: str
    bytes: float


@dataclass(frozen=True)
class Row:
    """One prediction, with the budget that the model chooses.

    Attributes:
        chip, reads, collective: of it; seconds.
        budget: bytes.
        prediction: what comes of it.
    """

    chip: Accelerator
    reads: Reads
    collective: float
    budget: int
    prediction: Prediction

    @property
    def saved(self) -> float:
        """Share of the time without prefetching."""
        return self.prediction.saved / self.prediction.without


def layer_reads(model: ModelShape, serving: Serving, chip: Accelerator = H200) -> list[Reads]:
    """Attention with its projections, and the MLP, in a decoding step at the full length."""
    sections = layer_sections(chip, model, serving, 1, serving.length, serving.length)
    name = f"{model.name}/TP{serving.devices}"
    return [
        Reads(f"{name} {part}", sum(one.bytes for one in operations))
        for part, operations in zip(("attention", "MLP"), sections, strict=True)
    ]


def all_reads() -> list[Reads]:
    """Layers of 8B and of 70B on eight devices, 8 requests of 4k tokens."""
    one, eight = Serving(1, 8, 4096), Serving(8, 8, 4096)
    return [*layer_reads(LLAMA3_8B, one), *layer_reads(LLAMA3_70B, eight)]


def predictions() -> Iterator[Row]:
    """Each chip, each part of a layer, each length of the collective."""
    for chip in CHIPS:
        for reads in all_reads():
            for collective in COLLECTIVES:
                budget = best_bytes(chip, collective, reads.bytes)
                found = predict(chip, collective, reads.bytes, budget)
                yield Row(chip, reads, collective, budget, found)
