"""Captured and bound tensors without values of their own, and those whose values change unseen."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

import warploom as wl
from warploom.errors import ArgumentError, CannotTrace, NoGradient, WrongCall

torch.manual_seed(0)
Q, K, V = torch.randn(3, 1, 8, 2, 16)
TABLE = torch.randn(8)
dual: Any = forward_ad.make_dual


def flexed(table: Any) -> wl.Variant:
    return wl.flex(lambda s, b, h, i, j: s + table[j] * i, lambda b, h, i, j: i >= j)


def aliases(slopes: Any) -> wl.Variant:
    return wl.Alibi(slopes[:2] if isinstance(slopes, torch.Tensor) else slopes)


WITH_TABLE = flexed(TABLE)
EXPECTED = wl.attention(Q, K, V, variant=WITH_TABLE)


def captured(table: Any, q: Any = Q, k: Any = K, v: Any = V, made: Any = flexed) -> Any:
    return wl.attention(q, k, v, variant=made(table))


def test_a_fake_mode_does_not_see_what_variants_read() -> None:
    with FakeTensorMode() as mode:
        out = wl.attention(*map(mode.from_tensor, (Q, K, V)), variant=WITH_TABLE)
        real = captured(TABLE)  # traced and run inside
    assert torch.equal(real, EXPECTED)
    assert isinstance(out, FakeTensor) and out.shape == Q.shape


@pytest.mark.parametrize("made", [flexed, aliases])
def test_captured_fakes_give_fakes(made: Any) -> None:
    with FakeTensorMode() as mode:
        x = mode.from_tensor(Q)
        assert isinstance(captured(torch.ones(8), x, x, x, made=made), FakeTensor)
        with pytest.raises(ArgumentError, match="make all of them fake"):
            captured(torch.ones(8), made=made)


@pytest.mark.parametrize("made", [flexed, aliases])
def test_derivatives_by_what_is_captured_or_bound_are_refused(made: Any) -> None:
    for transform in (
        lambda: torch.func.grad(lambda x: captured(x, made=made).sum())(TABLE),
        lambda: torch.func.jvp(lambda x: captured(x, made=made), (TABLE,), (TABLE,)),
        lambda: torch.func.jacrev(lambda x: captured(x, made=made))(TABLE),
        lambda: torch.func.grad(lambda q: wl.attention(q, K, V, variant=WITH_TABLE).sum())(Q),
        lambda: torch.func.jvp(lambda q: wl.attention(q, K, V, variant=WITH_TABLE), (Q,), (Q,)),
    ):
        with pytest.raises(NoGradient):
            transform()
    with pytest.raises(ArgumentError, match=r"mapped by torch\.vmap"):
        torch.vmap(lambda x: captured(x, made=made))(TABLE[None])
    with forward_ad.dual_level():
        captured(TABLE, made=made)
        with pytest.raises(NoGradient):
            captured(dual(TABLE, TABLE), made=made)
        with pytest.raises(NoGradient):
            wl.AttentionWrapper(
                made(dual(TABLE, TABLE)), num_q_heads=2, head_dim=16, dtype="float32", device="cpu"
            )


def test_functionalize_and_subclasses_reach_what_is_captured() -> None:
    assert torch.equal(torch.func.functionalize(captured)(TABLE), EXPECTED)
    both = captured(TwoTensor(TABLE, 2 * TABLE))
    assert torch.equal(both.a, EXPECTED) and torch.equal(both.b, captured(2 * TABLE))
    one, two = TwoTensor(TABLE, TABLE), TwoTensor(-TABLE, -TABLE)  # neither has an address
    variant = wl.flex(lambda s, b, h, i, j: s + one[j] * i + two[j] * i)
    found: Any = wl.attention(Q, K, V, variant=variant)
    plain = wl.attention(Q, K, V)
    torch.testing.assert_close(found.a, plain)


@pytest.mark.parametrize("made", [flexed, aliases])
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_graphs_hold_what_is_captured_as_an_input(mode: Any, made: Any) -> None:
    def call(table: Any, q: Any, k: Any, v: Any) -> Any:
        return captured(table, q, k, v, made=made)

    graph = make_fx(call, tracing_mode=mode)(TABLE, Q, K, V)
    gc.collect()  # of the variant, too, but for the graph
    other = torch.rand(8)
    assert torch.equal(graph(other, Q, K, V), captured(other, made=made))


class Biased(torch.nn.Module):
    """Makes its variant at each call."""

    def __init__(self, made: Callable[[Any], wl.Variant]) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.rand(8), requires_grad=False)
        self.made = made

    def forward(self, q: torch.Tensor) -> Any:
        return wl.attention(q, K, V, variant=self.made(self.bias))


@pytest.mark.parametrize("made", [flexed, aliases])
def test_export_holds_parameters_of_variants_made_inside(made: Any) -> None:
    model = Biased(made)
    exported = torch.export.export(model, (Q,), strict=False)
    gc.collect()
    expected = model(2 * Q)
    torch.testing.assert_close(exported.module()(2 * Q), expected)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_a_trace_of_jit_is_refused_before_the_variant_is_traced() -> None:
    for call in (captured, lambda q: wl.attention(q, K, V, variant=WITH_TABLE)):
        with pytest.raises(WrongCall, match=r"torch\.jit\.trace"):
            torch.jit.trace(call, (TABLE,), check_trace=False)


@pytest.mark.filterwarnings("ignore:The PyTorch API of", "ignore:Sparse CSR")
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: torch.eye(8).to_sparse(), "layout torch.sparse_coo; use .to_dense()"),
        (lambda: torch.eye(8).to_sparse_csr(), "layout torch.sparse_csr; use .to_dense()"),
        (lambda: torch.eye(8).to_mkldnn(), "layout torch._mkldnn; use .to_dense()"),
        (lambda: torch.nested.nested_tensor([TABLE]), "is a nested tensor; pad it"),
        (lambda: torch.nested.as_nested_tensor([TABLE], layout=torch.jagged), "is a nested tensor"),
        (lambda: np.ma.masked_array(np.ones(8), np.eye(8)[0]), "is a masked array; fill it"),
    ],
)
def test_what_is_no_table_is_refused_by_name(make: Callable[[], Any], told: str) -> None:
    odd = make()
    with pytest.raises(ArgumentError) as caught:
        wl.flex(lambda s, b, h, i, j: s + odd[i])
    assert str(caught.value).startswith("odd: ") and told in str(caught.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_subclasses_that_do_not_know_the_operator_are_named() -> None:
    hidden = torch.masked.masked_tensor(TABLE, TABLE > 0)
    with pytest.raises(ArgumentError, match="MaskedTensor does not know the operator"):
        captured(hidden)


def test_block_masks_without_values_are_refused() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    with FakeTensorMode():
        mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 8, 8, device="cpu")
    with pytest.raises(ArgumentError, match="without values"):
        wl.flex(block_mask=mask)


def test_freed_tables_are_not_read() -> None:
    table = TABLE.clone()
    variant = flexed(table)
    wl.attention(Q, K, V, variant=variant)
    table.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match="was it freed"):
        wl.attention(Q, K, V, variant=variant)


@pytest.mark.parametrize("kind", ["data", "numpy", "replaced"])
def test_converted_tables_follow_writes_that_torch_does_not_count(kind: str) -> None:
    table, new = torch.zeros(8, dtype=torch.float64), torch.randn(8)
    variant = wl.flex(lambda s, b, h, i, j: s + table[j])
    wl.attention(Q, K, V, variant=variant)
    if kind == "data":
        table.data.copy_(new)
    elif kind == "numpy":
        table.numpy()[:] = new.numpy()
    else:
        table.data = torch.cat((new.double(), new.double()))
    expected = wl.attention(Q, K, V, variant=wl.flex(lambda s, b, h, i, j: s + new[j]))
    torch.testing.assert_close(wl.attention(Q, K, V, variant=variant), expected)


def test_numbers_of_no_dimensions_may_be_indexed_by_nothing() -> None:
    scale = torch.tensor(0.5)
    found = wl.attention(Q, K, V, variant=wl.flex(lambda s, b, h, i, j: s * scale[()] + s[...]))
    torch.testing.assert_close(
        found, wl.attention(Q, K, V, variant=wl.flex(lambda s, b, h, i, j: s * 1.5))
    )


def test_methods_that_change_a_value_say_what_to_write() -> None:
    with pytest.raises(CannotTrace, match=r"\.add_\(\) in place .*Values do not change"):
        wl.flex(lambda s, b, h, i, j: s.add_(1))


def test_torch_compile_goes_around_variants_that_are_made_inside() -> None:
    def model(q: torch.Tensor) -> Any:
        return wl.attention(q, K, V, variant=wl.SlidingWindow(3))

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="eager")(Q), model(Q))
