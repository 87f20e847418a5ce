"""Layers of a KV-cache group that one plan serves, and the wrappers that plan for them."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch

from warploom.dsl.types.formats import Composed, Paged
from warploom.dsl.variants.variant import Variant
from warploom.engine_errors import UnsupportedByEngine
from warploom.engines.layers import likeness
from warploom.engines.vllm.layers import Layer, scaled
from warploom.engines.vllm.sharing import Sharing
from warploom.engines.vllm.steps import Step
from warploom.engines.vllm.variants import chosen
from warploom.runtime.devices.graph import is_capturing
from warploom.runtime.wrappers.declaration import AttentionDeclaration
from warploom.runtime.wrappers.wrapper import AttentionWrapper
from warploom.scheduler.model.bounds import Bounds


class Kind:
    """One variant with its heads and scale, over one group's pages.

    Three wrappers share the work. `decode` has declared bounds: on a GPU a kernel plans for it,
    always for the same grid and addresses, so that vLLM's full CUDA graphs hold its runs and each
    step plans before it replays one. `mixed` takes every other step, planned by the host.
    `shared` takes those in which requests begin with the same pages, as a prefix cache lets them,
    where that pays. What a full CUDA graph holds is `decode` always, for a graph cannot choose.

    Attributes:
        names: fields that runs give values for, layer by layer.
        declarations: of its wrappers, in this order; `wl.build_kernels` takes them.
    """

    def __init__(
        self,
        layer: Layer,
        variant: Variant,
        *,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        decode: Bounds | None = None,
        layers: int = 1,
        prefixes: bool = True,
    ) -> None:
        """Declare.

        Args:
            layer: one of them.
            variant: what they compute, but for the scales of the cache.
            page_size: tokens in a page.
            dtype: of queries.
            device: of all tensors.
            decode: the largest batch of decodes that a CUDA graph may hold; None without graphs.
            layers: how many share the plan.
            prefixes: requests may begin with the same pages.

        Raises:
            UnsupportedSpec, BadHeadDim, ArgumentError: no kernel serves such layers.
        """
        declared = partial(
            AttentionDeclaration,
            scaled(layer, variant),
            num_q_heads=layer.num_q_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            sm_scale=layer.sm_scale,
            dtype=dtype,
            kv_dtype=layer.kv_dtype,
        )
        paged = Paged(page_size, layout="HND")
        mixed = declared(kv_format=paged)
        self.declarations = [mixed]
        self._mixed = mixed.on(device)
        self._bounds = decode
        if decode is not None:
            of_decodes = declared(kv_format=paged, bounds=decode, cuda_graph=True)
            self.declarations.append(of_decodes)
            self._decode = of_decodes.on(device)
        self._sharing: Sharing | None = None
        # pages that a window has left behind are all listed as page 0, which is no prefix
        if prefixes and layer.window is None:
            stored = dtype if layer.kv_dtype is None else getattr(torch, layer.kv_dtype)
            self._sharing = Sharing.of(layer, layers, stored.itemsize, device)
            shared = declared(kv_format=Composed(page_size, layout="HND"))
            self.declarations.append(shared)
            self._shared = shared.on(device)
        self._last: tuple[Step, AttentionWrapper] | None = None
        # values of the user's own are not the model's to replace
        self.names = frozenset(self._mixed.spec.variant.input_names) - variant.inputs().keys()

    def warm_up(self) -> None:
        """Build the kernels of all steps, so that none waits for a compiler."""
        self._mixed.warm_up()
        if self._bounds is not None:
            self._decode.warm_up()
        if self._sharing is not None:
            self._shared.warm_up()

    def plan(self, step: Step) -> None:
        """Plan a step on the current stream."""
        self._last = None  # in case that it is refused
        wrapper = self._wrapper(step)
        if self._bounds is not None and wrapper is self._decode:
            wrapper.plan(*step.on_device, q_rows=step.rows)
        elif self._sharing is not None and wrapper is self._shared:
            wrapper.plan(*step.with_host_pages)
        else:
            wrapper.plan(*step.on_host)
        self._last = step, wrapper

    def run(
        self,
        step: Step,
        q: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        inputs: dict[str, Any],
    ) -> None:
        """Attention of one layer.

        Args:
            step: the batch; planned now, if another one was planned since.
            q: [rows or more, num_q_heads, head_dim]; rows past those of the step are left alone.
            kv: keys and values [pages, num_kv_heads, page_size, head_dim].
            out: as q.
            inputs: values of the fields in `names`.

        Raises:
            UnsupportedByEngine: a CUDA graph is to hold a step that the host has planned.
        """
        if self._last is None or self._last[0] is not step:
            if is_capturing(q.device):  # replays would plan this step's lists again
                raise _not_in_a_graph(step, "it was not planned before")
            self.plan(step)
        assert self._last is not None
        wrapper = self._last[1]
        in_graph = self._bounds is not None and wrapper is self._decode
        if not in_graph and is_capturing(q.device):
            reason = "the host has planned it, which a replay would not do again"
            raise _not_in_a_graph(step, reason)
        rows = step.rows if in_graph else int(step.host_qo[-1])
        wrapper.run(q[:rows], kv, out=out[:rows], **inputs)

    def _wrapper(self, step: Step) -> AttentionWrapper:
        bounds = self._bounds
        if bounds is not None and step.requests <= bounds.max_requests:
            each = bounds.max_q_rows // bounds.max_requests
            if step.longest_q <= each and step.rows <= bounds.max_q_rows:
                return self._decode
        if self._sharing is not None and self._sharing.pays(step):
            return self._shared
        return self._mixed


def _not_in_a_graph(step: Step, reason: str) -> UnsupportedByEngine:
    return UnsupportedByEngine(
        what=f"a full CUDA graph of {step.requests} requests with {step.rows} rows",
        engine="vLLM",
        reason=reason,
        remedy="Set cudagraph_mode to PIECEWISE, or report what makes vLLM capture it.",
    )


def kinds_of(layers: list[Layer], **declared: Any) -> dict[str, Kind]:
    """A `Kind` for each layer, by name; layers that are alike have the same one.

    Args:
        layers: of a KV-cache group.
        **declared: see `Kind`.

    Raises:
        as `Kind` and `chosen`.
    """
    alike: dict[Hashable, list[tuple[Layer, Variant]]] = {}
    for layer in layers:
        variant = chosen(layer)
        key = (likeness(variant), layer.num_q_heads, layer.num_kv_heads, layer.head_dim,
               layer.sm_scale, layer.cache_dtype, layer.window)  # fmt: skip
        alike.setdefault(key, []).append((layer, variant))
    found: dict[str, Kind] = {}
    for members in alike.values():
        kind = Kind(*members[0], layers=len(members), **declared)
        found |= {layer.name: kind for layer, _ in members}
    return found
