"""Caches of 8 bits beside those of 16, over the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from batches import Inputs, Shape, make_inputs
from harness import Implementation, Thunk
from peers import planned

import warploom as wl
from warploom.codegen.source import TileConfig

E4M3 = torch.float8_e4m3fn
PORTABLE = TileConfig(64, 32, 2)  # of the template of all GPUs, the fastest for prefills of 8 bits


def run_narrow(options: dict[str, Any], inputs: Sequence[Inputs]) -> list[Thunk]:
    """Causal attention over the same keys and values in a cache of 8 bits."""
    attention = planned(wl.Causal(), inputs[0], kv_dtype=E4M3, **options)
    narrow = [(x.k.to(E4M3), x.v.to(E4M3)) for x in inputs]
    return [partial(attention.run, x.q, kv) for x, kv in zip(inputs, narrow, strict=True)]


def narrow_cache(name: str = "warploom e4m3 cache", **options: Any) -> Implementation:
    """A contestant; `options` are of the wrapper."""
    return Implementation(name, partial(run_narrow, options))


def make_representable(shape: Shape, device: torch.device) -> Inputs:
    """Inputs whose keys and values 8 bits hold exactly, so that both caches have one truth."""
    made = make_inputs(shape, device)
    k, v = (x.to(E4M3).to(shape.dtype) for x in (made.k, made.v))
    return replace(made, k=k, v=v)
