"""One run: check tensors if they changed, write their addresses, launch on the caller's stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from warploom.codegen.source import TileConfig
from warploom.runtime.args import (
    Geometry,
    check_apart,
    check_key_value,
    check_lse,
    check_out,
    check_query,
)
from warploom.runtime.formats import Batch
from warploom.runtime.graph import is_capturing
from warploom.runtime.inputs import Inputs
from warploom.runtime.kernels import Kernel
from warploom.runtime.params import ParamBlock
from warploom.runtime.tensor_map import TensorMaps


class Launcher:
    """Runs of one wrapper.

    Shapes, strides and types are checked when they differ from those of the run before; a run with
    the same ones costs a comparison. Addresses are written each time; results that the caller gives
    are compared with the inputs' memory when an address is new.
    """

    def __init__(self, geometry: Geometry, params: ParamBlock, inputs: Inputs) -> None:
        self._geometry = geometry
        self._params = params
        self._inputs = inputs
        self._device = geometry.device
        self._is_cuda = geometry.device.type == "cuda"
        self._seen: tuple[object, ...] | None = None
        self._apart: tuple[int, ...] | None = None
        self._streams = Streams(geometry.device)
        self._maps_of: dict[TileConfig, TensorMaps | None] = {}

    def planned(self, batch: Batch, kernel: Kernel) -> None:
        """Take a new plan, which has just been enqueued on the current stream."""
        self._batch = batch
        self._launch = kernel.launch
        self._tensor_maps = self._maps_of.get(kernel.tile)
        if kernel.tile not in self._maps_of:
            self._tensor_maps = TensorMaps.of(self._geometry, kernel.tile)
            self._maps_of[kernel.tile] = self._tensor_maps
        self._out_shape = self._geometry.q_shape(batch, self._geometry.head_dim_v)
        self._lse_shape = self._geometry.lse_shape(batch)
        self._seen = None
        self._needs_inputs = self._inputs.incomplete
        self._inputs.write_planned(self._params)

    def before_plan(self) -> None:
        """Let the current stream wait for runs that still read the old plan."""
        if self._is_cuda:
            self._streams.current()

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        given: Mapping[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        kept: tuple[torch.Tensor, ...] = ()
        if given or self._needs_inputs or self._inputs.overridden:
            kept = self._inputs.write_given(given, self._params)
        writes_to_given = out is not None or lse is not None
        if out is None:
            out = q.new_empty(self._out_shape)
        if lse is None and return_lse:
            lse = torch.empty(self._lse_shape, dtype=torch.float32, device=self._device)
        seen = (
            (q.shape, q.stride(), q.dtype, q.device),
            (k.shape, k.stride(), k.dtype, k.device),
            (v.shape, v.stride(), v.dtype, v.device),
            not writes_to_given or (out.shape, out.stride(), out.dtype, out.device),
            lse is None or not writes_to_given or (lse.shape, lse.stride(), lse.dtype, lse.device),
        )
        addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr())
        if seen != self._seen or (
            self._is_cuda and (addresses[0] | addresses[1] | addresses[2] | addresses[3]) & 15
        ):
            self._check(q, k, v, out, lse)
            self._seen = seen
        lse_address = 0 if lse is None else lse.data_ptr()
        if writes_to_given and self._apart != (*addresses, lse_address):
            check_apart(out, lse, (q, k, v))
            self._apart = (*addresses, lse_address)
        if self._tensor_maps is not None:
            self._params.set_tensor_maps(self._tensor_maps(k, v))
        self._params.set_pointers(*addresses, lse_address)
        self._launch(self._params, self._streams.current() if self._is_cuda else 0)
        del kept  # given tensors live until here
        return out, lse

    def _check(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Full checks; on success the strides are written."""
        geometry, batch = self._geometry, self._batch
        self._seen = self._apart = None
        strides = (
            *check_query(q, geometry, batch),
            *check_key_value(k, "k", geometry, batch),
            *check_key_value(v, "v", geometry, batch),
            *check_out(out, geometry, batch),
            *((0, 0, 0) if lse is None else check_lse(lse, geometry, batch)),
        )
        self._params.set_strides(strides)


class Streams:
    """Order between the streams that carry one wrapper's plans and runs.

    All of them use the same plan, partial results and counters, so each waits for the one before.
    On one stream everything is ordered by itself, and this costs a comparison.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.cuda.Stream | None = None
        self._handle = -1
        # What torch's own compiler asks at each launch: no stream object is made.
        self._raw = getattr(torch._C, "_cuda_getCurrentRawStream", _raw_stream)

    def current(self) -> int:
        """Handle of the caller's stream, after making it wait for the last one if it is another."""
        handle: int = self._raw(self._device.index)
        if handle != self._handle and not is_capturing(self._device):
            stream = torch.cuda.current_stream(self._device)
            if self._last is not None:
                stream.wait_stream(self._last)
            self._last, self._handle = stream, handle
        return handle


def _raw_stream(index: int) -> int:
    handle: int = torch.cuda.current_stream(index).cuda_stream
    return handle
