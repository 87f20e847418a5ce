"""Several streams and devices: what one of them still reads, another does not write."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import warploom as wl
from warploom.errors import BatchRefused, PlanMismatch
from warploom.runtime.calls import attention_args
from warploom.runtime.devices.graph import is_capturing

pytestmark = pytest.mark.gpu

SHAPE: dict[str, Any] = {"num_q_heads": 4, "head_dim": 64, "dtype": "float16"}
LONG = 100_000_000  # cycles that a stream is kept busy: about 50 ms
ROWS = 3


@contextmanager
def busy_stream() -> Iterator[torch.cuda.Stream]:
    """Another stream, which does nothing else for a while."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        yield stream


def decoding(cuda: Any, **options: Any) -> wl.AttentionWrapper:
    return wl.AttentionWrapper(wl.Causal(), **SHAPE, device=cuda, **options)


def on_device(cuda: Any, *lists: list[int]) -> list[torch.Tensor]:
    return [torch.tensor(values, dtype=torch.int32, device=cuda) for values in lists]


def tensors(cuda: Any, keys: int) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    q = torch.randn(ROWS, 4, 64, dtype=torch.float16, device=cuda)
    k, v = torch.randn(2, keys, 4, 64, dtype=torch.float16, device=cuda)
    return q, (k, v)


def test_what_a_device_planned_on_another_stream_is_awaited(cuda: Any) -> None:
    bounds = wl.Bounds(max_requests=4, max_q_rows=8, max_kv_len=4096)
    attention = decoding(cuda, bounds=bounds)
    good = on_device(cuda, [0, 1, 2, 3], [0, 20, 60, 100])
    falling = on_device(cuda, [0, 1, 2, 3], [0, 20, 10, 100])
    attention.plan(*good)
    attention.check_plan()
    with busy_stream():
        attention.plan(*falling)
    with pytest.raises(BatchRefused):
        attention.check_plan()
    with busy_stream():
        attention.plan(*on_device(cuda, [0, 2, 2, 3], [0, 20, 60, 90]))
    assert attention.planned is not None
    assert attention.planned.plan.segments["kv_len"].tolist() == [20, 40, 30]
    assert "90 keys" in str(attention.explain())


def test_wrappers_that_share_a_workspace_wait_for_each_other(cuda: Any) -> None:
    size = decoding(cuda).workspace_size(wl.Bounds(4, 8, 8192))
    memory = torch.empty(size.total, dtype=torch.uint8, device=cuda)
    first, second = (decoding(cuda, workspace=memory) for _ in range(2))
    (q, kv), lengths = tensors(cuda, 6000), ([0, 1, 2, 3], [0, 10, 5000, 6000])
    first.plan(*lengths)
    expected = first.run(q, kv)
    torch.cuda.synchronize()
    with busy_stream():
        out = first.run(q, kv)  # reads its plan after what follows, unless that waits
    second.plan([0, 3], [0, 50])
    second.run(q, (kv[0][:50], kv[1][:50]))
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("is_kept", [True, False])
def test_memory_that_a_new_wrapper_clears_is_awaited(is_kept: bool, cuda: Any) -> None:
    options = {"bounds": wl.Bounds(4, 8, 8192), "cuda_graph": True}
    size = decoding(cuda, **options).workspace_size()  # loads what is needed
    memory = torch.empty(size.total, dtype=torch.uint8, device=cuda)
    first = decoding(cuda, workspace=memory)
    torch.cuda.synchronize()
    with busy_stream() as stream:
        second = decoding(cuda, workspace=memory, **options)  # clears its counters there
    if not is_kept:
        del second
    first.plan([0, 1, 2, 3], [0, 10, 5000, 6000])
    torch.cuda.current_stream().synchronize()
    assert stream.query()


def test_a_first_plan_waits_for_the_stream_that_made_its_wrapper(cuda: Any) -> None:
    options = {"bounds": wl.Bounds(4, 8, 8192), "cuda_graph": True}
    decoding(cuda, **options)
    torch.cuda.synchronize()
    with busy_stream() as stream:
        made = decoding(cuda, **options)
    made.plan([0, 1, 2, 3], [0, 10, 5000, 6000])
    torch.cuda.current_stream().synchronize()
    assert stream.query()


def test_the_status_of_another_wrappers_plan_is_not_read(cuda: Any) -> None:
    bounds = wl.Bounds(4, 8, 4096)
    size = decoding(cuda, bounds=bounds).workspace_size()
    memory = torch.empty(size.total, dtype=torch.uint8, device=cuda)
    first, second = (decoding(cuda, bounds=bounds, workspace=memory) for _ in range(2))
    lengths = on_device(cuda, [0, 1, 2, 3], [0, 20, 60, 100])
    first.plan(*lengths)
    first.check_plan()
    second.plan(*lengths)
    with pytest.raises(PlanMismatch, match="another wrapper's since"):
        first.check_plan()
    second.check_plan()


def test_captures_on_two_streams_at_once_do_not_disturb_each_other(cuda: Any) -> None:
    q = torch.randn(1, 1, 4, 64, dtype=torch.float16, device=cuda)
    caches = torch.randn(2, 2, 1, 20_000, 4, 64, dtype=torch.float16, device=cuda)
    expected = [wl.attention(q, k, v) for k, v in caches]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        wl.attention(q, *caches[1])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    outs: list[list[torch.Tensor]] = [[], []]
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            outs[1] = [wl.attention(q, *caches[1]) for _ in range(20)]
        outs[0] = [wl.attention(q, *caches[0]) for _ in range(20)]
        torch.cuda.current_stream().wait_stream(side)
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    for found, wanted in zip(outs, expected, strict=True):
        assert all(torch.equal(out, wanted) for out in found)


def test_a_copy_is_kept_for_its_last_writer(cuda: Any) -> None:
    """Another stream allocated it, and could give its memory away."""
    q, (k, v) = tensors(cuda, 200)
    given = q[None], k[None], v[None]
    other = wl.Alibi(torch.rand(4))  # which the wrappers are made with, and keep
    wl.attention(*given, variant=other)
    slopes = torch.rand(4)
    expected = wl.attention(*given, variant=wl.Alibi(2 * slopes))
    wl.attention(*given, variant=wl.Alibi(slopes))
    copies = attention_args._copies._copies[slopes].values()
    (copy,) = (weakref.ref(made.tensor) for made in copies)
    address = copy().data_ptr()  # type: ignore[union-attr]
    slopes *= 2
    with busy_stream() as stream:
        wl.attention(*given, variant=other)
        wl.attention(*given, variant=wl.Alibi(slopes))  # writes the copy
        torch.cuda._sleep(60 * LONG)  # so long that the loop below ends before, on a busy host too
        out = wl.attention(*given, variant=wl.Alibi(slopes))
    del slopes, copies
    assert copy() is None
    others = [torch.empty(4, device=cuda) for _ in range(20_000)]  # more than is free of small ones
    assert not stream.query()
    assert address not in {other.data_ptr() for other in others}
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_a_host_tensor_is_copied_anew_behind_who_reads_its_copy(cuda: Any) -> None:
    slopes = torch.rand(4)
    variant = wl.Alibi(slopes)
    q, (k, v) = tensors(cuda, 200)
    given = q[None], k[None], v[None]
    expected = wl.attention(*given, variant=variant)
    with busy_stream():  # whose kernels and plans are its own
        wl.attention(*given, variant=variant)
    torch.cuda.synchronize()
    for _ in range(2):
        with busy_stream():
            out = wl.attention(*given, variant=variant)
        slopes *= 3
        changed = wl.attention(*given, variant=variant)
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
        assert not torch.equal(changed, expected)
        expected = changed


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_captures_are_those_of_a_device_and_not_of_the_current_one() -> None:
    first, second = (torch.device("cuda", i) for i in range(2))
    with torch.cuda.device(second):
        graph, x = torch.cuda.CUDAGraph(), torch.zeros(4, device=second)
        # by default, torch captures on a stream of the device that was current at the first capture
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(second)):
            x += 1
            with torch.cuda.device(first):
                found = is_capturing(first), is_capturing(second)
    assert found == (False, True)


def test_branches_of_one_capture_share_a_wrapper(cuda: Any) -> None:
    """Its runs use the same partial results, so that a branch waits for the other."""
    attention = decoding(cuda)
    attention.plan([0, 1, 2, 3], [0, 10, 20_000, 40_000])  # is split, and merged
    cases = [tensors(cuda, 40_000) for _ in range(2)]
    expected = [attention.run(*case) for case in cases]
    torch.cuda.synchronize()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    outs: list[list[torch.Tensor]] = [[], []]
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        for _ in range(10):
            outs[0].append(attention.run(*cases[0]))
            with torch.cuda.stream(side):
                outs[1].append(attention.run(*cases[1]))
        main.wait_stream(side)
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        for of_case, truth in zip(outs, expected, strict=True):
            assert all(torch.equal(out, truth) for out in of_case)


def test_inputs_of_a_plan_outlive_the_runs_that_read_them(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Allocated on another stream, to which their memory would go back when they are dropped."""
    monkeypatch.setenv("WARPLOOM_VERIFY_PLANS", "0")  # which waits for each plan
    heads = {"num_q_heads": 4, "head_dim": 64, "dtype": "float16", "device": cuda}
    attention = wl.AttentionWrapper(wl.Alibi("input"), **heads)
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()
    (q, kv), lengths = tensors(cuda, 60), ([0, 1, 2, 3], [0, 20, 40, 60])
    slopes = torch.full((4,), 0.5, device=cuda)
    attention.plan(*lengths, slopes=slopes)
    expected = attention.run(q, kv)
    for cycles in (1, 60 * LONG):  # once without a pause: to load a kernel waits for all streams
        side.wait_stream(here)
        with torch.cuda.stream(side):
            own = slopes.clone()
        here.wait_stream(side)
        attention.plan(*lengths, slopes=own)
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        out = attention.run(q, kv)
        attention.plan(*lengths, slopes=slopes)
        at = own.data_ptr()
        del own
        with torch.cuda.stream(side):  # one would have that memory, and be written before the run
            others = [torch.full((4,), 99.0, device=cuda) for _ in range(50)]
        is_busy = not here.query()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
    assert is_busy
    assert at not in {other.data_ptr() for other in others}
