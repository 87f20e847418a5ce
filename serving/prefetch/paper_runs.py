"""What the paper measured on Ascend 910B NPUs (section 4), and the same of the model.

The text has the NPU's L2, memory and throughput. Bandwidth of L2, links and the constant of a
collective are taken from the design space (table 2): it does not say those of the server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

from warploom.serving.prefetch.accelerators import MB, PAPER
from warploom.serving.prefetch.exploration import Design
from warploom.serving.prefetch.model_shapes import MODELS
from warploom.serving.prefetch.performance import Serving, layer_sections, pass_seconds

ASCEND = replace(PAPER, name="Ascend 910B", memory_bandwidth=1.6e12, l2_bytes=192 * MB)
_MEMORY_BYTES = 64e9
_NAMED = {model.name: model for model in MODELS}
DEVICES = (2, 4, 8)

# Table 1: end-to-end speed-ups on so many devices, batch 4, 16k tokens.
TABLE_1: Mapping[str, tuple[float, float, float]] = {
    "Llama3-8B": (1.34, 1.59, 1.11),
    "Llama3-70B": (1.16, 1.36, 1.11),
    "Qwen2-7B": (1.17, 1.09, 1.09),
    "Qwen2-72B": (1.14, 1.35, 1.18),
    "Phi3-small": (1.34, 1.61, 1.09),
    "Phi3-medium": (1.23, 1.43, 1.11),
}


def table_1() -> Iterator[tuple[str, int, float, float]]:
    """Model, devices, and the speed-up that was measured and that the model has."""
    for name, measured in TABLE_1.items():
        for devices, theirs in zip(DEVICES, measured, strict=True):
            serving = Serving(devices, 4, 16384)
            yield name, devices, theirs, Design(ASCEND, _NAMED[name], serving).speedup


def largest_decoding_speedup() -> float:
    """Figure 4: of the last step on four devices, over batches and lengths that memory holds."""
    names = "Llama3-70B", "Qwen2-72B", "Phi3-medium"
    batches, lengths = (2**n for n in range(9)), [2**n for n in range(10, 17)]
    found = [1.0]
    for name, batch, length in product(names, batches, lengths):
        model, serving = _NAMED[name], Serving(4, batch, length)
        sections = layer_sections(ASCEND, model, serving, 1, length, length)
        if model.layers * sum(x.bytes for one in sections for x in one) <= _MEMORY_BYTES:
            before, after = (
                pass_seconds(ASCEND, model, serving, 1, length, length, flag)
                for flag in (False, True)
            )
            found.append(before / after)
    return max(found)


def devices_whose_l2_holds_a_section() -> int:
    """Figure 2: the fewest, in powers of two, for the largest section of all models.

    Batch 8, 16k tokens.
    """
    devices, length = 1, 16384
    while True:
        serving = Serving(devices, 8, length)
        largest = max(
            sum(x.bytes for x in one)
            for model in MODELS
            for one in layer_sections(ASCEND, model, serving, 1, length, length)
        )
        if largest <= ASCEND.l2_bytes:
            return devices
        devices *= 2
