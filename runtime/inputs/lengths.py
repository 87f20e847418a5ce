"""A variant's own check of its mask's tensors against the lengths of a batch, done once each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import ref

import numpy as np
import torch

from warploom.dsl.variants.capture import writes
from warploom.dsl.variants.variant import Variant
from warploom.runtime.formats.batch import Batch
from warploom.runtime.inputs.values import Number


class LengthsCheck:
    """`check_lengths` of one variant for one batch.

    A run usually gets the same tensors as the previous run. They are checked again if torch has
    written to them since. Writes to other arrays are not counted, so these are always checked.

    Args:
        variant: the variant that has the check.
        batch: a batch whose lengths the host knows.
        names: names of the tensors that the mask reads.
    """

    def __init__(self, variant: Variant, batch: Batch, names: frozenset[str]) -> None:
        self._variant, self._batch, self._names = variant, batch, names
        self._seen: dict[str, tuple[ref[torch.Tensor], int]] = {}  # in the last check of a run

    def of_plan(self, known: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Check the host values that a plan knows; raises what the variant raises."""
        lengths = self._batch.on_host
        self._variant.check_lengths(known, lengths.q_lens, lengths.kv_lens)

    def of_run(
        self,
        given: Mapping[str, Any],
        values: Mapping[str, Number | torch.Tensor],
        known: Mapping[str, np.ndarray[Any, Any]],
    ) -> None:
        """Check values given to a run, together with the plan's; raises what the variant raises.

        Args:
            given: values of fields, as the caller holds them.
            values: the values that the plan does not know, as numbers and as host tensors.
            known: the values that the plan knows.
        """
        new = [name for name in self._names if name in values]
        if not new or self._has_seen({name: given[name] for name in new}):
            return
        tensors = {name: x for name in new if isinstance(x := values[name], torch.Tensor)}
        # NumPy has no bfloat16
        readable = {name: x.detach() for name, x in tensors.items() if x.dtype != torch.bfloat16}
        self.of_plan({**known, **{name: x.numpy() for name, x in readable.items()}})
        self._seen = {}
        for name in new:
            value, count = given[name], writes(given[name])
            if isinstance(value, torch.Tensor) and count is not None:
                self._seen[name] = ref(value), count

    def _has_seen(self, given: Mapping[str, Any]) -> bool:
        seen = self._seen
        if len(seen) != len(given):
            return False
        for name, value in given.items():
            before = seen.get(name)
            if before is None or before[0]() is not value or before[1] != writes(value):
                return False
        return True
