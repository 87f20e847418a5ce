"""Whether a step's requests share so much that reading it once pays for how such a step is planned.

On a GPU the page table lies on the device, and plans that share prefixes need it on the host. The
copy waits for all that the device has yet to do, and the plan itself takes the host longer. Both
are paid once for each step, and what is saved are reads of keys in all layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from warploom.engines.vllm.layers import Layer
from warploom.engines.vllm.steps import Step
from warploom.scheduler.composed.prefixes import find_prefixes

# A composed plan takes the host 3 to 5 ms for some hundred requests, where others take tenths of
# one; and where vLLM prepares a step while the one before runs, the copy makes it wait.
HOST_SECONDS = 5e-3
# Fused rows that each key is read for, from which tensor cores and not memory bound attention: of
# an H100 or H200, 989 TFLOP/s over 3.35 to 4.8 TB/s, for two operations on each byte of 16 bits.
BOUND_BY_PRODUCTS = 256


@dataclass(frozen=True)
class Sharing:
    """What decides for the layers of a kind.

    Attributes:
        group_size: query heads of each key/value head.
        seconds_of_key: to read a key and its value in all layers of the kind; 0 on a CPU, where
            the plan itself weighs what prefixes save.
    """

    group_size: int
    seconds_of_key: float

    @classmethod
    def of(cls, layer: Layer, layers: int, item_bytes: int, device: torch.device) -> Sharing:
        """For so many layers like this one, whose caches have elements of `item_bytes`."""
        group_size = layer.num_q_heads // layer.num_kv_heads
        if device.type != "cuda":
            return cls(group_size, 0.0)
        key_bytes = 2 * layer.num_kv_heads * layer.head_dim * item_bytes * layers
        return cls(group_size, key_bytes / bandwidth(device))

    def pays(self, step: Step) -> bool:
        """True if a plan that shares prefixes is better for the step.

        Reads the page table of the device only if the lengths alone allow it.
        """
        if step.host_kv is None or step.requests < 2:
            return False
        if not self.seconds_of_key:
            return step.shares_pages
        few = self._waits_for_memory(step)
        lens = step.host_kv[few].astype(np.int64)
        at_most = int(lens.sum() - lens.max(initial=0))
        if not self._is_worth(at_most):
            return False
        return step.shares_pages and self._is_worth(self.saved_keys(step))

    def saved_keys(self, step: Step) -> int:
        """Keys that requests need not read again, if each shared prefix is read once.

        Requests of many rows do not count: they wait for their products, whoever reads keys.
        """
        assert step.host_kv is not None
        few = self._waits_for_memory(step)
        width, page_size = step.host_pages.shape[1], step.page_size
        forest = find_prefixes(
            np.flatnonzero(few) * width,
            step.host_pages.reshape(-1),
            step.host_kv[few].astype(np.int64) // page_size,
            page_size,
        )
        sharing = forest.sum_over_requests(np.ones(int(few.sum()), np.int64))
        return int(((sharing - 1) * forest.length).sum())

    def _waits_for_memory(self, step: Step) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        rows = np.diff(step.host_qo) * self.group_size
        return (rows > 0) & (rows < BOUND_BY_PRODUCTS)

    def _is_worth(self, keys: int) -> bool:
        return keys * self.seconds_of_key > HOST_SECONDS


def bandwidth(device: torch.device) -> float:
    """Bytes that a GPU's memory gives in a second at best, as its driver knows it."""
    found = torch.cuda.get_device_properties(device)
    return 2 * found.memory_clock_rate * 1e3 * found.memory_bus_width / 8  # twice in a cycle; kHz
