"""The argument of a native planner, as bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from warploom.codegen.abi import Packer
from warploom.codegen.planner_source import BATCH, INPUTS, OUTPUTS, PlannerSpec
from warploom.dsl.types.spec import TracedVariant
from warploom.runtime.devices.params import Block, write_array


class PlannerParams(Block):
    """`Params` of the planner of one mask.

    Attributes:
        inputs: names of the scalars and tensors that the mask reads.
        write_lengths, write_outputs: write the pointers INPUTS and OUTPUTS, in their order.
        write_batch, write_site: write the numbers BATCH and `PlannerSpec.site`.
    """

    def __init__(
        self, variant: TracedVariant, has_roles: bool = False, longest_first: bool = False
    ) -> None:
        spec = PlannerSpec(variant, has_roles, longest_first=longest_first)
        fields = spec.fields
        packer = Packer(fields)
        super().__init__(packer, packer.size)
        self.write_lengths = self.writer("Q", INPUTS)
        self.write_outputs = self.writer("Q", OUTPUTS)
        self.write_batch = self.writer("i", tuple(name for name, _ in BATCH))
        self.write_site = self.writer("i", tuple(name for name, _ in spec.site))
        self.inputs = frozenset(
            field.name[2:] for field in fields if field.meaning in ("scalar input", "tensor input")
        )

    def write_inputs(self, values: Mapping[str, Any]) -> None:
        """Write the mask's inputs; arrays and tensors must live until the planner has run."""
        for name in self.inputs:
            value = values[name]
            if isinstance(value, torch.Tensor):
                write_array(self, name, value.data_ptr(), value.shape, value.stride())
            elif isinstance(value, np.ndarray):
                strides = tuple(step // value.itemsize for step in value.strides)
                write_array(self, name, value.ctypes.data, value.shape, strides)
            else:
                self.set(f"x_{name}", value)
