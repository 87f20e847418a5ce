"""The parts of a wrapper that only a compiled back end has."""

from __future__ import annotations

from typing import Any

from warploom.runtime.declaring.declared import DeclaredAttention
from warploom.runtime.declaring.wrapper_options import kernel_parts
from warploom.runtime.devices.params import ParamBlock
from warploom.runtime.devices.workspace import Workspace
from warploom.runtime.inputs.args import Geometry
from warploom.runtime.inputs.inputs import Inputs
from warploom.runtime.launching.kernels import Kernels
from warploom.runtime.launching.launch import Launcher
from warploom.runtime.launching.pretransformed_keys import PretransformedKeys
from warploom.runtime.strategies.planner import Planner
from warploom.runtime.tensors.tensors import as_torch


class Compiled:
    """Kernels of one declaration on one device, and what plans and launches them.

    Attributes:
        kernels: by tile; built when a plan first asks for one.
        params: the bytes of their parameters.
        workspace: memory of plans and of partial results.
        planner: makes plans.
        launcher: launches runs.
    """

    def __init__(
        self, declared: DeclaredAttention, geometry: Geometry, inputs: Inputs, memory: Any
    ) -> None:
        """Build the kernel and lay out the workspace, if the declaration fixes both.

        Args:
            declared: the declaration.
            geometry: what tensors must agree with.
            inputs: values of the variant's fields.
            memory: the caller's workspace, or None.

        Raises:
            WorkspaceTooSmall: it cannot hold all batches within the bounds.
        """
        device, heads, options = declared.device, declared.heads, declared.options
        given = None if memory is None else as_torch(memory, "workspace", shared=True)
        self.workspace = workspace = Workspace(device, given, options.bounds is not None)
        made, pretransform, always = kernel_parts(declared.spec, heads, declared.key_transform)
        self.kernels = Kernels(made, device, pretransform, always)
        self.params = params = ParamBlock(declared.spec)
        for name, value in (
            ("num_q_heads", heads.num_q),
            ("num_kv_heads", heads.num_kv),
            ("group_size", heads.group_size),
            ("sm_scale", declared.sm_scale),
            ("lse_scale", declared.lse_scale),
        ):
            params.set(name, value)
        self.planner = Planner(
            declared.spec, heads, self.kernels, workspace, params, options, device
        )
        keys = PretransformedKeys(pretransform, geometry, params) if pretransform else None
        self.launcher = Launcher(geometry, params, inputs, workspace, keys)
        self.planner.reserve()
