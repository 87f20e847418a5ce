"""`out` and `lse` of the caller's are checked on every way through `run`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException

import warploom as wl
from warploom import errors

ROWS, HEADS, DIM = 5, 2, 64


def compiled(run: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(run, fullgraph=True, backend="eager")


def plain(run: Callable[..., Any]) -> Callable[..., Any]:
    return run


# back end, whether q wants a gradient, how run is called
WAYS = [("cpu", False, plain), ("cpu", True, plain), ("reference", False, plain),
        ("cpu", False, compiled), ("reference", True, plain)]  # fmt: skip

# torch.compile wraps what is raised while it traces
REFUSED = errors.WrongDType, errors.WrongShape, TorchDynamoException


class Call:
    """One `run` with results of the caller's."""

    def __init__(self, backend: str, wants_gradient: bool, way: Callable[..., Any]) -> None:
        torch.manual_seed(0)
        self.wrapper = wl.AttentionWrapper(
            wl.Causal(), num_q_heads=HEADS, head_dim=DIM, dtype="bfloat16", device="cpu",
            backend=backend,
        )  # fmt: skip
        self.wrapper.plan([0, ROWS], [0, ROWS])
        self.q, self.k, self.v = torch.randn(3, ROWS, HEADS, DIM).bfloat16()
        self.q.requires_grad_(wants_gradient)
        self._run = way(self.wrapper.run)

    def __call__(self, **results: Any) -> Any:
        return self._run(self.q, (self.k, self.v), **results)


@pytest.fixture(params=WAYS, ids=lambda way: f"{way[0]}-{way[1]}-{way[2].__name__}")
def call(request: pytest.FixtureRequest) -> Call:
    return Call(*request.param)


def test_results_are_written_where_they_are_wanted(call: Call) -> None:
    expected, sums = call(return_lse=True)
    out, lse = torch.empty(ROWS, HEADS, DIM).bfloat16(), torch.empty(ROWS, HEADS)
    call(out=out, lse=lse)
    assert torch.equal(out, expected)
    assert torch.equal(lse, sums)


def test_results_of_another_type_or_shape_are_refused(call: Call) -> None:
    for name, wrong in (
        ("out", torch.empty(ROWS, HEADS, DIM)),
        ("out", torch.empty(3, ROWS, HEADS, DIM).bfloat16()),
        ("lse", torch.empty(ROWS, HEADS).bfloat16()),
        ("lse", torch.empty(2, ROWS, HEADS)),
    ):
        with pytest.raises(REFUSED, match=f"{name}.* expected"):
            call(**{name: wrong})


@pytest.mark.parametrize("way", [way for way in WAYS if way[2] is plain])
def test_results_that_overlap_are_refused(way: Any) -> None:
    call = Call(*way)
    with pytest.raises(errors.ArgumentError, match="reaches into the memory of q"):
        call(out=call.q.detach())
    with pytest.raises(errors.WrongStride, match="expanded"):
        call(out=torch.empty(1, HEADS, DIM).bfloat16().expand(ROWS, HEADS, DIM))
    with pytest.raises(errors.WrongStride, match="elements that overlap"):
        call(out=torch.empty(ROWS + HEADS, DIM).bfloat16().unfold(0, HEADS, 1).mT[:ROWS])
    with pytest.raises(errors.WrongStride, match="elements that overlap"):
        call(lse=torch.empty(ROWS + HEADS).as_strided((ROWS, HEADS), (1, 1)))


@pytest.mark.parametrize("way", [way for way in WAYS if way[2] is plain])
def test_results_that_want_a_gradient_are_refused_where_torch_would_count_it(way: Any) -> None:
    call = Call(*way)
    out = torch.empty(ROWS, HEADS, DIM).bfloat16().requires_grad_()
    for _ in range(2):
        with pytest.raises(errors.ArgumentError, match=r"requires a gradient.* out.detach\(\)"):
            call(out=out)
    with torch.no_grad():
        assert call(out=out) is out


def test_strided_results_that_do_not_overlap_are_written() -> None:
    call = Call(*WAYS[0])
    expected = call()
    for out in (
        torch.empty(HEADS, ROWS, DIM).bfloat16().transpose(0, 1),
        torch.empty(2 * ROWS, 3 * HEADS, DIM).bfloat16()[::2, ::3],
    ):
        assert torch.equal(call(out=out), expected)


class Biased(wl.Variant):
    bias = wl.Tensor("float32", ("kv_pos",))

    def logits_transform(self, logits: Any, at: wl.Position) -> Any:
        return logits + self.bias[at.kv_pos]


@pytest.mark.parametrize("name", ["out", "lse"])
def test_results_over_what_a_run_reads_are_refused(name: str) -> None:
    """Of a plan, a page table or a field; each ended the process, or gave other numbers."""
    shape: dict[str, Any] = {"num_q_heads": HEADS, "head_dim": 16, "dtype": "float32"}
    memory, size = torch.zeros(1 << 20), {"out": (3, HEADS, 16), "lse": (3, HEADS)}[name]
    kv = torch.randn(4, HEADS, 16), torch.randn(4, HEADS, 16)
    over = memory[:96].view(3, HEADS, 16) if name == "out" else memory[: 3 * HEADS].view(size)
    q = torch.randn(3, HEADS, 16)

    def refuses(wrapper: wl.AttentionWrapper, kv: Any, what: str, **inputs: Any) -> None:
        free = torch.empty(size)
        for result in (over, free, over):
            if result is free:
                wrapper.run(q, kv, **{name: free}, **inputs)
                continue
            with pytest.raises(errors.ArgumentError, match=f"{name}: reaches .* {what}"):
                wrapper.run(q, kv, **{name: result}, **inputs)

    shared = wl.AttentionWrapper(workspace=memory.view(torch.uint8), **shape, device="cpu")
    shared.plan([0, 3], [0, 4])
    refuses(shared, kv, "workspace")
    bound = wl.AttentionWrapper(Biased(bias=memory[:4]), **shape, device="cpu")
    bound.plan([0, 3], [0, 4])
    refuses(bound, kv, "bias")
    other = wl.AttentionWrapper(Biased(bias=torch.zeros(4)), **shape, device="cpu")
    other.plan([0, 3], [0, 4])
    refuses(other, kv, "bias", bias=memory[:4])
    paged = wl.PageSelectionWrapper(kv_format=wl.Paged(4), **shape, device="cpu")
    chosen = memory.view(torch.int32)[:HEADS].view(1, HEADS, 1).zero_()
    paged.plan([0, 3], [0, 1], chosen, [4])
    refuses(paged, torch.randn(1, 2, 4, HEADS, 16), "selection")
