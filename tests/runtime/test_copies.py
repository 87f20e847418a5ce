"""Device copies of host tensors: made once, renewed after a write, gone with their source."""

from __future__ import annotations

import gc
import weakref

import torch

from warploom.dsl.dtypes import dtype
from warploom.dsl.library.alibi import Alibi
from warploom.dsl.trace import trace
from warploom.runtime import attention as module
from warploom.runtime.copies import DeviceCopies

META = torch.device("meta")
FLOAT32 = dtype("float32")


def test_a_copy_is_made_once_and_renewed_in_place() -> None:
    copies, made = DeviceCopies(), []
    source = torch.arange(4.0)

    def host() -> torch.Tensor:
        made.append(source._version)
        return source.clone()

    cpu = torch.device("cpu")
    copy = copies(source, cpu, FLOAT32, host)
    assert copies(source, cpu, FLOAT32, host) is copy
    assert len(made) == 1
    source[1] = 9.0
    assert copies(source, cpu, FLOAT32, host) is copy
    assert copy[1] == 9.0
    assert len(made) == 2
    assert copies(source, META, FLOAT32, host) is not copy


def test_a_copy_lives_no_longer_than_its_source() -> None:
    copies = DeviceCopies()
    source = torch.arange(4.0)
    copy = weakref.ref(copies(source, META, FLOAT32, source.clone))
    assert copy() is not None
    del source
    gc.collect()
    assert copy() is None


def test_attention_copies_bound_tensors_once() -> None:
    slopes = torch.rand(4)
    variant = Alibi(slopes)
    traced = trace(variant)
    first, second = (module._values(variant.inputs(), traced, {}, META)["slopes"] for _ in range(2))
    assert first.device == META
    assert first is second
