"""PRESERVE's model of performance (section 5, "Performance & cost model"), and what follows of it.

Time of an operation is the longer of its arithmetic and its reads, at the bandwidth of L2 for what
hits and of memory for what does not. A collective takes a constant and, in a ring of n devices,
2 (n - 1) / n of its bytes at a link's bandwidth. With prefetching, the operations up to the next
collective hit L2 in the order of Algorithm 1 as long as they fit, and begin when both the
collective and the prefetch are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from warploom.serving.prefetch.accelerators import Accelerator
from warploom.serving.prefetch.checks import (
    checked_count,
    checked_kind,
    checked_number,
    checked_seconds,
)
from warploom.serving.prefetch.model_shapes import ModelShape, Operation

_STEPS = 8  # of a generation that are looked at, from its first to its last


@dataclass(frozen=True)
class Serving:
    """How a model is served; batching is static, and sequences are equally long.

    Attributes:
        devices: of the tensor-parallel cluster.
        batch: requests.
        length: tokens of a request; two thirds are its prompt (section 4).
    """

    devices: int
    batch: int
    length: int

    def __post_init__(self) -> None:
        for name in ("devices", "batch", "length"):
            checked_count(name, getattr(self, name))

    @property
    def prompt(self) -> int:
        return 2 * self.length // 3

    @property
    def decoded(self) -> int:
        return self.length - self.prompt


def collective_seconds(chip: Accelerator, devices: int, size: float) -> float:
    """An all-reduce of so many bytes; one device has none, and no constant of it."""
    if devices <= 1:
        return 0.0
    return chip.link_latency + 2 * (devices - 1) / devices * size / chip.link_bandwidth


def operation_seconds(chip: Accelerator, operation: Operation, hits: float = 0.0) -> float:
    """One operation, of whose bytes so many hit L2."""
    reads = hits / chip.l2_bandwidth + (operation.bytes - hits) / chip.memory_bandwidth
    return max(reads, operation.work / chip.throughput)


def section_seconds(
    chip: Accelerator, collective: float, operations: Sequence[Operation], prefetches: bool
) -> float:
    """A collective that takes so long, and what depends on it up to the next one."""
    if not prefetches or collective <= 0:  # nothing to prefetch beside
        return collective + sum(operation_seconds(chip, one) for one in operations)
    fetched = 0.0
    seconds = 0.0
    is_full = False
    for one in operations:
        is_full = is_full or fetched + one.bytes > chip.budget
        fetched += 0.0 if is_full else one.bytes
        seconds += operation_seconds(chip, one, 0.0 if is_full else one.bytes)
    return max(collective, fetched / chip.memory_bandwidth) + seconds


def layer_sections(
    chip: Accelerator, model: ModelShape, serving: Serving, rows: int, keys: float, pairs: float
) -> tuple[list[Operation], list[Operation]]:
    """Attention and MLP of a layer on one device.

    Args:
        chip: of the cluster.
        model, serving: what is served, and how.
        rows: query rows of a request.
        keys: of a request.
        pairs: query rows of a request times the keys that each sees.
    """
    size, batch = chip.weight_bytes, serving.batch
    kv_bytes = batch * keys * 2 * model.head_dim * size
    attention = model.attention(
        serving.devices, batch * rows, kv_bytes, batch * pairs, size
    )  # fmt: skip
    return attention, model.mlp(serving.devices, batch * rows, size)


def pass_seconds(
    chip: Accelerator, model: ModelShape, serving: Serving, rows: int, keys: float, pairs: float,
    prefetches: bool,
) -> float:  # fmt: skip
    """All layers once; arguments as those of `layer_sections`."""
    activations = serving.batch * rows * model.hidden * chip.weight_bytes
    collective = collective_seconds(chip, serving.devices, activations)
    sections = layer_sections(chip, model, serving, rows, keys, pairs)
    return model.layers * sum(
        section_seconds(chip, collective, one, prefetches) for one in sections
    )


def decode_seconds(
    chip: Accelerator, model: ModelShape, serving: Serving, prefetches: bool
) -> float:
    """All steps of decoding; the keys grow from the prompt's to the whole length."""
    keys = np.linspace(serving.prompt, serving.length, _STEPS)
    steps = [pass_seconds(chip, model, serving, 1, n, n, prefetches) for n in keys.tolist()]
    return serving.decoded * float(np.mean(steps))


def end_to_end_seconds(
    chip: Accelerator, model: ModelShape, serving: Serving, prefetches: bool
) -> float:
    """Prefill and decoding."""
    rows = serving.prompt
    prefill = pass_seconds(chip, model, serving, rows, rows, rows * rows / 2, prefetches)
    return prefill + decode_seconds(chip, model, serving, prefetches)


@dataclass(frozen=True)
class Prediction:
    """What prefetching makes of a collective and the reads behind it.

    Attributes:
        asked: bytes that are asked for.
        hits: bytes that are in L2 when they are read.
        without, seconds: from the collective's launch to the end of the reads, without and with.
    """

    asked: float
    hits: float
    without: float
    seconds: float

    @property
    def saved(self) -> float:
        return self.without - self.seconds


def predict(
    chip: Accelerator, collective: float, size: float, asked: float, startup: float = 0.0
) -> Prediction:
    """A collective, then something that reads so many bytes and has little else to do.

    Three things are added that the paper's chip does not have. Nobody waits for a prefetch, so only
    what arrives while the collective runs can hit; the rest is read once, whoever asks for it.
    Reads that hit and reads that miss go on at the same time, on different CTAs. And a prefetch of
    more than L2 keeps drives out what came first, so that reads in the same order find nothing: the
    worst case, of a cache that evicts what was used longest ago.

    Args:
        chip: where.
        collective: its seconds.
        size: bytes that are read behind it.
        asked: bytes that are prefetched.
        startup: seconds from the launch of a prefetch to its first bytes.

    Raises:
        ArgumentError: another chip than an Accelerator, a duration that is none or above 0.1 s, or
            bytes below 0.
    """
    _check(chip, collective, size, startup)
    checked_number("asked", asked, zero=True)
    asked = min(asked, size)
    arrived = min(asked, chip.memory_bandwidth * max(0.0, collective - startup))
    hits = arrived if arrived <= chip.budget else 0.0
    without, seconds = (
        collective + max((size - n) / chip.memory_bandwidth, size / chip.l2_bandwidth)
        for n in (0.0, hits)
    )
    return Prediction(asked, hits, without, seconds)


def best_bytes(chip: Accelerator, collective: float, size: float, startup: float = 0.0) -> int:
    """The budget for a collective of so many seconds: what arrives meanwhile, fits, and is read.

    Args:
        chip, collective, size, startup: of `predict`.

    Returns:
        Bytes in whole lines of 128; 0: do not prefetch.

    Raises:
        ArgumentError: as `predict` does.
    """
    _check(chip, collective, size, startup)
    arrives = chip.memory_bandwidth * max(0.0, collective - startup)
    return int(min(arrives, chip.budget, size)) // 128 * 128


def _check(chip: Accelerator, collective: float, size: float, startup: float) -> None:
    expected = "an Accelerator, such as H200; an Overlap has best() and saved() of its own"
    checked_kind("chip", chip, Accelerator, expected)
    checked_seconds("collective", collective)
    checked_seconds("startup", startup)
    checked_number("size", size, zero=True)
