"""Tensors without memory of their own, and those who watch operators: results, or our errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import warploom as wl
from warploom.errors import ArgumentError, NoGradient, WrongCall

torch.manual_seed(0)
Q, K, V = torch.randn(3, 8, 4, 32)
CAUSAL = wl.Causal()
TABLE = ([0, 1], [0, 1], [7], [1])

Call = Callable[..., Any]


class Plain(torch.Tensor):
    """A subclass whose memory is its own."""


def attention(q: Any = Q, k: Any = K, v: Any = V, **rest: Any) -> Any:
    return wl.attention(q[None], k[None], v[None], variant=CAUSAL, **rest)[0]


@pytest.fixture(scope="module")
def wrapper() -> wl.AttentionWrapper:
    made = wl.AttentionWrapper(CAUSAL, num_q_heads=4, head_dim=32, dtype="float32", device="cpu")
    made.plan([0, 8], [0, 8])
    return made


@pytest.fixture(params=["attention", "run"])
def call(request: pytest.FixtureRequest, wrapper: wl.AttentionWrapper) -> Iterator[Call]:
    """Both ways in; each has just served plain tensors of the same shapes."""

    def run(q: Any = Q, k: Any = K, v: Any = V, **rest: Any) -> Any:
        return wrapper.run(q, (k, v), **rest)

    found = attention if request.param == "attention" else run
    found()
    yield found
    torch.testing.assert_close(found(), EXPECTED)  # nothing is left behind


EXPECTED = attention()


def freed(tensor: torch.Tensor, size: int = 0) -> torch.Tensor:
    found = tensor.clone()
    found.untyped_storage().resize_(size)
    return found


def test_fakes_give_fakes_whose_shapes_are_right(call: Call) -> None:
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(x) for x in (Q, K, V))
        out = call(q, k, v)
    assert isinstance(out, FakeTensor) and out.shape == EXPECTED.shape
    assert isinstance(call(q, k, v), FakeTensor)  # the mode is over, the tensors are what they are
    with pytest.raises(ArgumentError, match="make all of them fake"):
        call(q)


def test_real_tensors_under_a_fake_mode_are_real() -> None:
    rows = torch.randn(5, 4, 32)
    batched = Q[None], K[None], V[None]
    with FakeTensorMode():
        one = wl.attention(*batched, variant=CAUSAL)
        made = wl.AttentionWrapper(num_q_heads=4, head_dim=32, dtype="float32", device="cpu")
        made.plan([0, 5], [0, 8])
        out = made.run(rows, (K, V))
    assert torch.equal(one[0], EXPECTED)
    assert type(out) is torch.Tensor and torch.equal(out, made.run(rows, (K, V)))


def test_functionalize_gives_the_result(call: Call) -> None:
    assert torch.equal(torch.func.functionalize(lambda q, k, v: call(q, k, v))(Q, K, V), EXPECTED)
    assert torch.equal(torch.func.functionalize(lambda x: call() + x)(torch.zeros(1)), EXPECTED)


def test_functionalize_writes_results(wrapper: wl.AttentionWrapper) -> None:
    out = torch.empty_like(Q)
    torch.func.functionalize(lambda out: wrapper.run(Q, (K, V), out=out))(out)
    assert torch.equal(out, EXPECTED)


def test_subclasses_get_results_of_their_kind(call: Call) -> None:
    assert torch.equal(call(Q.as_subclass(Plain)).as_subclass(torch.Tensor), EXPECTED)
    both = call(TwoTensor(Q, 2 * Q), TwoTensor(K, K), TwoTensor(V, V))
    assert torch.equal(both.a, EXPECTED) and torch.equal(both.b, call(2 * Q))


def test_make_fx_traces_the_operator(call: Call) -> None:
    for mode in ("real", "fake", "symbolic"):
        graph = make_fx(lambda q, k, v: call(q, k, v) + 1, tracing_mode=mode)(Q, K, V)
        assert "torch.ops.warploom." in graph.code
        assert torch.equal(graph(2 * Q, K, V), call(2 * Q) + 1)  # and not what was traced


def test_modes_of_the_users_see_the_operator(call: Call) -> None:
    class Seen(TorchDispatchMode):
        names: tuple[str, ...] = ()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            self.names += (str(func),)
            return func(*args, **(kwargs or {}))

    with Seen() as mode:
        out = call()
    assert torch.equal(out, EXPECTED)
    assert any(name.startswith("warploom.") for name in mode.names)


def test_no_graph_holds_an_append() -> None:
    new, cache = torch.ones(1, 2, 32), torch.zeros(8, 2, 4, 2, 32)

    def step(new: Any, cache: Any) -> Any:
        wl.append(new, new, cache, *TABLE)
        return cache

    with pytest.raises(WrongCall, match="no recorded graph repeats"):
        make_fx(step)(new, cache)
    with FakeTensorMode():
        step(new, cache)
    assert cache[7, :, 0].all() and cache.sum() == 2 * 2 * 32
    appender = wl.Appender(
        kv_format=wl.Paged(4), num_kv_heads=2, head_dim=32, dtype="float32", device="cpu"
    )
    appender(new, new, cache, *TABLE)
    with pytest.raises(ArgumentError, match="k: needs"):
        appender(freed(new), new, cache, *TABLE)
    with pytest.raises(ArgumentError, match="kv: needs"):
        appender(new, new, freed(cache), *TABLE)
    with pytest.raises(ArgumentError, match="TwoTensor, whose values lie elsewhere"):
        appender(TwoTensor(new, new), new, cache, *TABLE)
    with pytest.raises(ArgumentError, match=r"mapped by torch\.vmap"):
        torch.vmap(lambda k: appender(k, new, cache, *TABLE))(new[None])


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_transforms_that_cannot_be_had_are_refused_by_name(call: Call) -> None:
    with pytest.raises(ArgumentError, match=r"q is mapped|q: is mapped by torch\.vmap"):
        torch.vmap(lambda q: call(q))(Q[None])
    for transform in (
        lambda: torch.func.grad(lambda q: call(q).sum())(Q),
        lambda: torch.func.jvp(lambda q: call(q), (Q,), (Q,)),
        lambda: torch.func.jacrev(lambda k: call(k=k))(K),
    ):
        with pytest.raises(NoGradient):
            transform()
    with pytest.raises(WrongCall, match=r"torch\.jit\.trace"):
        torch.jit.trace(lambda q: call(q), (Q,), check_trace=False)


def test_what_a_transform_does_not_follow_is_served(wrapper: wl.AttentionWrapper) -> None:
    found = torch.func.grad(lambda x: (wrapper.run(Q, (K, V)) * x).sum())(torch.ones(()))
    torch.testing.assert_close(found, EXPECTED.sum())


def test_tangents_are_not_dropped(call: Call) -> None:
    with forward_ad.dual_level():
        call()
        dual: Any = forward_ad.make_dual
        with pytest.raises(NoGradient):
            call(dual(Q, Q))


def test_freed_memory_is_not_read(wrapper: wl.AttentionWrapper) -> None:
    wrapper.run(Q, (K, V))
    for name in "qkv":
        given = {"q": Q[None], "k": K[None], "v": V[None]}
        given[name] = freed(given[name])
        with pytest.raises(ArgumentError, match=f"{name}: needs 4096 bytes"):
            wl.attention(*given.values(), variant=CAUSAL)
        q, k, v = (freed(x) if at == name else x for at, x in zip("qkv", (Q, K, V), strict=True))
        with pytest.raises(ArgumentError, match=f"{name}: needs 4096 bytes"):
            wrapper.run(q, (k, v))
    wrapper.plan([0, 8], [0, 8])
    with pytest.raises(ArgumentError, match="q: needs 4096 bytes"):
        wrapper.run(freed(Q, 64), (K, V))  # it still has an address


def test_freed_results_are_not_written(wrapper: wl.AttentionWrapper) -> None:
    out, lse = torch.empty_like(Q), torch.empty(8, 4)
    for _ in range(2):  # the second time, their like is known
        with pytest.raises(ArgumentError, match="out: needs"):
            wrapper.run(Q, (K, V), out=freed(out), lse=lse)
        with pytest.raises(ArgumentError, match="lse: needs"):
            wrapper.run(Q, (K, V), out=out, lse=freed(lse))
        wrapper.run(Q, (K, V), out=out, lse=lse)
    assert torch.equal(out, EXPECTED)


def test_lazy_zeros_are_zero(call: Call) -> None:
    zero = torch._efficientzerotensor(8, 4, 32)  # type: ignore[attr-defined]
    assert torch.equal(call(zero), call(torch.zeros(8, 4, 32)))


@pytest.mark.parametrize(
    "stand_in", [freed, lambda x: TwoTensor(x, x), FakeTensorMode().from_tensor]
)
def test_lengths_and_values_of_fields_have_memory(stand_in: Any, wrapper: Any) -> None:
    ends = torch.tensor([0, 8], dtype=torch.int32)
    slopes = torch.rand(4)
    wrapper.plan(ends, ends)
    for qo, kv in ((stand_in(ends), ends), (ends, stand_in(ends)), (stand_in(ends), [0, 8])):
        with pytest.raises(ArgumentError, match="_indptr: "):
            wrapper.plan(qo, kv)
    wrapper.plan(ends, ends)
    with pytest.raises(ArgumentError, match="slopes: "):
        wl.AttentionWrapper(
            wl.Alibi(stand_in(slopes)), num_q_heads=4, head_dim=32, dtype="float32", device="cpu"
        )
    with pytest.raises(ArgumentError, match="workspace: "):
        wl.AttentionWrapper(
            num_q_heads=4, head_dim=32, dtype="float32", device="cpu",
            workspace=stand_in(torch.zeros(1 << 20, dtype=torch.uint8)),
        )  # fmt: skip


def test_a_default_device_does_not_matter(call: Call) -> None:
    torch.set_default_device("meta")
    try:
        made = wl.AttentionWrapper(
            wl.Alibi("input"), num_q_heads=4, head_dim=32, dtype="float32", device="cpu"
        )
        made.plan([0, 8], [0, 8], slopes=[0.1, 0.2, 0.3, 0.4])
        assert made.run(Q, (K, V)).device.type == "cpu"
        assert torch.equal(call(), EXPECTED)
    finally:
        torch.set_default_device(None)  # type: ignore[no-untyped-call]
