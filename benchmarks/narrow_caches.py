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
TOKEN_SCALES = "warploom e4m3 cache, scales of tokens"
PORTABLE = TileConfig(64, 32, 2)  # of the template of all GPUs, the fastest for prefills of 8 bits


def run_narrow(options: dict[str, Any], inputs: Sequence[Inputs]) -> list[Thunk]:
    """Causal attention over the same keys and values in a cache of 8 bits."""
    attention = planned(wl.Causal(), inputs[0], kv_dtype=E4M3, **options)
    narrow = [(x.k.to(E4M3), x.v.to(E4M3)) for x in inputs]
    return [partial(attention.run, x.q, kv) for x, kv in zip(inputs, narrow, strict=True)]


def narrow_cache(name: str = "warploom e4m3 cache", **options: Any) -> Implementation:
    """A contestant; `options` are of the wrapper."""
    return Implementation(name, partial(run_narrow, options))


def by_position(of_slots: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Numbers of slots of pages, [pages, page_size, heads], as [batch, keys, heads]: scales come by
    position. Of requests of equal length, whose pages are full."""
    batch, pages = inputs.shape.batch, inputs.indices.to(of_slots.device).long()
    return of_slots[pages].reshape(batch, -1, of_slots.shape[-1])


def run_scaled(inputs: Sequence[Inputs]) -> list[Thunk]:
    """The same numbers stored as halves or as they are, by token and head, with their scales."""
    attention = planned(wl.Causal() & wl.TokenKVScale(), inputs[0], kv_dtype=E4M3)
    thunks = []
    for x in inputs:
        scales = [1.0 + torch.randint_like(stored[..., 0], 2).float() for stored in (x.k, x.v)]
        kv = tuple((y / s[..., None]).to(E4M3) for y, s in zip((x.k, x.v), scales, strict=True))
        k_scale, v_scale = (by_position(s, x) for s in scales)
        thunks.append(partial(attention.run, x.q, kv, k_scale=k_scale, v_scale=v_scale))
    return thunks


def make_representable(shape: Shape, device: torch.device) -> Inputs:
    """Inputs whose keys and values 8 bits hold exactly, so that both caches have one truth."""
    made = make_inputs(shape, device)
    k, v = (x.to(E4M3).to(shape.dtype) for x in (made.k, made.v))
    return replace(made, k=k, v=v)
