"""Device copies of host tensors: made once, renewed after a write, gone with their source."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from support.fake_stream import FakeStream

import warploom as wl
from warploom.dsl.library.alibi import Alibi
from warploom.dsl.types.dtypes import dtype
from warploom.dsl.variants.trace import trace
from warploom.errors import ForbiddenUnderCapture
from warploom.runtime.calls import attention_args as module
from warploom.runtime.devices import graph
from warploom.runtime.inputs import copies
from warploom.runtime.inputs.copies import DeviceCopies, DeviceCopy

META = torch.device("meta")
FLOAT32 = dtype("float32")


def test_a_copy_is_made_once_and_renewed_in_place() -> None:
    kept, made = DeviceCopies(), []
    source = torch.arange(4.0)

    def host() -> torch.Tensor:
        made.append(source._version)
        return source.clone()

    cpu = torch.device("cpu")
    copy = kept(source, cpu, FLOAT32, host)
    assert kept(source, cpu, FLOAT32, host) is copy
    assert len(made) == 1
    source[1] = 9.0
    assert kept(source, cpu, FLOAT32, host) is copy
    assert copy[1] == 9.0
    assert len(made) == 2
    assert kept(source, META, FLOAT32, host) is not copy


def test_a_copy_lives_no_longer_than_its_source() -> None:
    kept = DeviceCopies()
    source = torch.arange(4.0)
    copy = weakref.ref(kept(source, META, FLOAT32, source.clone))
    assert copy() is not None
    del source
    gc.collect()
    assert copy() is None


def test_attention_copies_bound_tensors_once() -> None:
    slopes = torch.rand(4)
    variant = Alibi(slopes)
    traced = trace(variant)
    first, second = (
        module.values_of(variant.inputs(), traced, {}, META)["slopes"] for _ in range(2)
    )
    assert first.device == META
    assert first is second


def test_one_conversion_of_a_captured_tensor_is_kept_and_renewed_in_place() -> None:
    slopes = torch.rand(4, dtype=torch.float64)
    variant = wl.flex(lambda score, b, h, i, j: score + slopes[h] * j)
    (first,), (again,) = variant.inputs().values(), variant.inputs().values()
    assert first.dtype == torch.float32
    assert again is first
    count = first._version
    slopes *= 2
    (renewed,) = variant.inputs().values()
    assert renewed is first
    assert renewed._version > count
    assert torch.equal(renewed, slopes.float())


class FakeCopy:
    """A CUDA tensor as far as `DeviceCopy` knows."""

    is_cuda = True
    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.recorded: list[int] = []

    def copy_(self, host: object) -> None: ...

    def record_stream(self, stream: FakeStream) -> None:
        self.recorded.append(stream.cuda_stream)


def test_readers_wait_for_the_writer_and_the_next_writer_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = [FakeStream(handle) for handle in (1, 2, 3)]
    now = [streams[0]]
    monkeypatch.setattr(copies, "is_capturing", lambda device: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now[0])
    tensor: Any = FakeCopy()
    copy = DeviceCopy(tensor, 0)
    for turn in (0, 1, 1, 0):
        now[0] = streams[turn]
        assert copy.use() is tensor
    assert [stream.waited for stream in streams] == [[], [1], []]
    assert tensor.recorded == [2]
    now[0] = streams[2]
    copy.renew(torch.zeros(1), 1)
    copy.use()
    assert streams[2].waited == [1, 2]
    assert tensor.recorded == [2, 3]  # the last writer did not allocate it
    now[0] = streams[1]
    copy.use()
    assert streams[1].waited == [1, 3]


def test_nothing_is_copied_under_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, cpu = DeviceCopies(), torch.device("cpu")
    known, new = torch.zeros(2), torch.zeros(2)
    with torch.inference_mode():
        uncounted = torch.zeros(2)
    copy = kept(known, cpu, FLOAT32, known.clone)
    monkeypatch.setattr(graph, "is_capturing", lambda device: True)
    assert kept(known, cpu, FLOAT32, known.clone) is copy
    known += 1
    for source, remedy in (
        (known, r"Put it on the device, or call with it once before the capture\.$"),
        (new, "or call with it once"),
        (uncounted, r"captured. Put it on the device\.$"),
    ):
        with pytest.raises(ForbiddenUnderCapture, match=f"a tensor on the host had to .*{remedy}"):
            kept(source, cpu, FLOAT32, source.clone)
