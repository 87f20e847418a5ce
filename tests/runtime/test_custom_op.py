"""torch.compile(fullgraph=True) over attention() and AttentionWrapper.run, and the operators."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from warploom.dsl.library.alibi import Alibi
from warploom.dsl.library.causal import Causal
from warploom.dsl.library.flash_sigmoid import FlashSigmoid
from warploom.dsl.library.sliding_window import SlidingWindow
from warploom.dsl.library.soft_cap import SoftCap
from warploom.dsl.types.formats import Paged
from warploom.dsl.values.functions import where
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.fields import Scalar, Tensor
from warploom.dsl.variants.variant import Variant
from warploom.errors import ArgumentError, NoGradient
from warploom.runtime.calls.attention import attention
from warploom.runtime.operators import custom_op
from warploom.runtime.wrappers.wrapper import AttentionWrapper

VARIANT = Causal() & SoftCap(5.0)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tensors(rows: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, rows, 4, 64, generator=generator)
    k, v = torch.randn(2, 2, 21, 2, 64, generator=generator)
    return q, k, v


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, fullgraph=True, **{"backend": "aot_eager", **options})


def test_attention_compiles_whole_with_inductor() -> None:
    def layer(q: Any, k: Any, v: Any) -> Any:
        out, lse = attention(q * 2, k, v, variant=VARIANT, return_lse=True)
        return out.flatten(-2) + 1, lse

    q, k, v = tensors()
    torch.testing.assert_close(compiled(layer, backend="inductor")(q, k, v), layer(q, k, v))


def test_shapes_may_be_dynamic() -> None:
    def layer(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, variant=VARIANT) + 1

    fast = compiled(layer, dynamic=True)
    for rows in (9, 5, 13):
        q, k, v = tensors(rows)
        torch.testing.assert_close(fast(q, k, v), layer(q, k, v))


def test_inputs_and_options_pass_through() -> None:
    window = SlidingWindow(3) & Alibi("input") & SoftCap(4.0)

    def layer(q: Any, k: Any, v: Any, slopes: Any, lens: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return attention(
            q, k, v, variant=window, layout="HND", sm_scale=0.2, kv_lens=lens, slopes=slopes,
            left=2, cap=3.0,
        )  # fmt: skip

    args = (*tensors(), torch.rand(4), torch.tensor([21, 7], dtype=torch.int32))
    torch.testing.assert_close(compiled(layer)(*args), layer(*args))


class Doubled(Variant):
    """Logits twice, if that is asked for."""

    on = Scalar("bool", default=False)

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return where(self.on, logits * 2.0, logits)


def test_truths_pass_through() -> None:
    variant = Doubled()

    def layer(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, variant=variant, on=True)

    q, k, v = tensors()
    expected = layer(q, k, v)
    assert torch.equal(compiled(layer)(q, k, v), expected)
    wrapper = AttentionWrapper(
        variant, num_q_heads=4, num_kv_heads=2, head_dim=64, dtype="float32", device="cpu"
    )
    wrapper.plan([0, 9], [0, 21])
    asking = q[0].clone().requires_grad_()  # goes through the operator
    assert torch.equal(wrapper.run(asking, (k[0], v[0]), on=True), expected[0])


class Layer(torch.nn.Module):
    """A module that holds a variant."""

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.variant = Causal() & SoftCap(cap)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return attention(q, k, v, variant=self.variant)


def test_a_gradient_is_refused_when_it_is_asked_for_and_not_when_it_is_compiled() -> None:
    class Shifted(Variant):
        is_on = Scalar("bool")
        shift = Tensor("float32", ("q_head",))

        def logits_transform(self, logits: Value, at: Position) -> Value:
            return where(self.is_on, logits + self.shift[at.q_head], logits)

    shift = torch.randn(4)
    wrapper = AttentionWrapper(
        Shifted(shift=shift, is_on=True), num_q_heads=4, num_kv_heads=2, head_dim=64,
        dtype="float32", device="cpu",
    )  # fmt: skip
    wrapper.plan([0, 9], [0, 21])

    def call(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, variant=Shifted, shift=shift, is_on=True)

    q, k, v = tensors()
    for function, given in ((call, (q, k, v)), (wrapper.run, (q[0], (k[0], v[0])))):
        wanted = given[0].clone().requires_grad_()
        out = compiled(function)(wanted, *given[1:])
        torch.testing.assert_close(out, function(*given))  # type: ignore[operator]
        with pytest.raises(NoGradient):
            out.sum().backward()


class Learnt(Variant):
    bias = Tensor("float32", ("q_head",))
    seen = Tensor("float32", ("kv_pos",))

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return logits + self.bias[at.q_head]

    def logits_mask(self, at: Position) -> Value:
        return self.seen[at.kv_pos] > 0.0


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("name", ["bias", "seen"])
def test_values_of_fields_are_refused_a_gradient_too(name: str, backend: str | None) -> None:
    plain: dict[str, Any] = {"bias": torch.randn(4), "seen": torch.ones(21)}
    asking = {**plain, name: torch.nn.Parameter(plain[name])}
    q, k, v = tensors()

    def make(values: dict[str, torch.Tensor]) -> AttentionWrapper:
        made = AttentionWrapper(
            Learnt(**values), num_q_heads=4, num_kv_heads=2, head_dim=64, dtype="float32",
            device="cpu", backend=backend,
        )  # fmt: skip
        made.plan([0, 9], [0, 21])
        return made

    planned = make(asking)
    known = make(plain)
    expected = known.run(q[0], (k[0], v[0]))
    assert not expected.requires_grad
    calls = [
        lambda: planned.run(q[0], (k[0], v[0])),
        lambda: attention(q, k, v, variant=Learnt(**asking), backend=backend)[0],
        lambda: attention(q, k, v, variant=Learnt(**plain), backend=backend, **asking)[0],
    ]
    if name == "bias":  # another tensor for the mask needs another plan
        calls.append(lambda: known.run(q[0], (k[0], v[0]), bias=asking["bias"]))
    for call in calls * 2:  # the second time, calls are known
        out = call()
        torch.testing.assert_close(out, expected)
        with pytest.raises(NoGradient):
            out.sum().backward()
        with torch.no_grad():
            assert not call().requires_grad
    planned.plan([0, 9], [0, 21], **plain)
    assert not planned.run(q[0], (k[0], v[0])).requires_grad


def test_compiled_calls_refuse_values_a_gradient() -> None:
    bias, seen = torch.nn.Parameter(torch.randn(4)), torch.ones(21)
    wrapper = AttentionWrapper(
        Learnt(bias=bias, seen=seen), num_q_heads=4, num_kv_heads=2, head_dim=64,
        dtype="float32", device="cpu",
    )  # fmt: skip
    wrapper.plan([0, 9], [0, 21])
    q, k, v = tensors()

    def given(q: Any, bias: Any) -> Any:
        return attention(q, k, v, variant=Learnt, bias=bias, seen=seen)[0]

    def kept(q: Any, bias: Any) -> Any:
        return wrapper.run(q[0], (k[0], v[0]))

    expected = given(q, bias)
    for function in (given, kept):
        out = compiled(function)(q, bias)
        torch.testing.assert_close(out, expected)
        with pytest.raises(NoGradient):
            out.sum().backward()


def test_each_module_has_its_own_variant() -> None:
    q, k, v = tensors()
    for cap in (1.0, 3.0):
        layer = Layer(cap)
        torch.testing.assert_close(compiled(layer)(q, k, v), layer(q, k, v))


def test_no_variant_and_a_class_for_one() -> None:
    q, k, v = tensors()
    for variant in (None, Causal):

        def layer(q: Any, k: Any, v: Any, variant: Any = variant) -> Any:
            return attention(q, k, v, variant=variant)

        torch.testing.assert_close(compiled(layer)(q, k, v), layer(q, k, v))


def test_a_compiled_function_follows_its_module_to_another_variant() -> None:
    q, k, v = tensors()
    layer = Layer(1.0)
    fast = compiled(layer)
    fast(q, k, v)
    layer.variant = Causal() & SoftCap(3.0)
    torch.testing.assert_close(fast(q, k, v), layer(q, k, v))


def test_a_compiled_graph_keeps_no_variant_alive() -> None:
    q, k, v = tensors()
    layer = Layer(1.0)
    compiled(layer)(q, k, v)
    gone = weakref.ref(layer.variant)
    del layer
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


def test_a_variant_made_inside_is_refused() -> None:
    def one(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, variant=FlashSigmoid(scale=2.0))

    def composed(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, variant=Causal() & SoftCap(2.0))

    for layer in (one, composed):  # their values would be lost, and defaults taken
        with pytest.raises(
            Exception, match="made outside of the compiled function: make it before"
        ):
            compiled(layer)(*tensors())


def test_the_wrapper_compiles_whole_and_follows_its_plans() -> None:
    wrapper = AttentionWrapper(
        VARIANT, kv_format=Paged(8), num_q_heads=4, num_kv_heads=2, head_dim=64, dtype="float32",
        device="cpu",
    )  # fmt: skip
    cache = torch.randn(6, 2, 8, 2, 64)

    def layer(q: Any, cache: Any) -> Any:
        out, lse = wrapper.run(q * 2, cache, return_lse=True, cap=3.0)
        return out + 1, lse

    fast = compiled(layer)
    for qo, pages in (([0, 2, 5], [3, 1, 4]), ([0, 4, 5], [5, 0, 2])):
        wrapper.plan(qo, [0, 1, 3], pages, [8, 3])
        q = torch.randn(5, 4, 64)
        torch.testing.assert_close(fast(q, cache), layer(q, cache))
        out = torch.empty(5, 4, 64)
        got = compiled(lambda q, out: wrapper.run(q, (cache[:, 0], cache[:, 1]), out=out))(q, out)
        assert torch.equal(out, wrapper.run(q, cache))
        assert torch.equal(got, out)


def test_operators_pass_torchs_own_checks() -> None:
    wrapper = AttentionWrapper(
        VARIANT, num_q_heads=4, num_kv_heads=2, head_dim=64, dtype="float32", device="cpu"
    )
    wrapper.plan([0, 9], [0, 21])
    q, k, v = (x[0] for x in tensors())
    checks = ("test_schema", "test_faketensor")
    for return_lse in (True, False):
        args = (q, k, v, [], [], [], [2.0], "cap", wrapper.handle, return_lse, False, [])
        torch.library.opcheck(custom_op.run_op, args, test_utils=checks)
    handle = custom_op.register_variant(VARIANT)
    rest = ([], [], [], [], "", handle, None, True, True, "NHD", "e", None, [])
    torch.library.opcheck(custom_op.attention_op, (*tensors(), None, *rest), test_utils=checks)


def test_what_no_schema_holds_is_refused() -> None:
    def layer(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, variant=VARIANT, cap="much")

    with pytest.raises(Exception, match=r"ArgumentError.*cannot be given under"):
        compiled(layer)(*tensors())


def test_handles_of_what_is_gone() -> None:
    q, k, v = tensors()
    wrapper = AttentionWrapper(
        num_q_heads=4, num_kv_heads=2, head_dim=64, dtype="float32", device="cpu",
        backend="reference",
    )  # fmt: skip
    handle = wrapper.handle
    del wrapper
    with pytest.raises(ArgumentError, match="the wrapper of a compiled graph is gone"):
        custom_op.run_op(q[0], k[0], v[0], [], [], [], [], "", handle, False, False, [])
    with pytest.raises(ArgumentError, match="the variant of a compiled graph is gone"):
        rest = "", 10**9, None, False, False, "NHD", "e", None, []
        custom_op.attention_op(q, k, v, None, *([],) * 4, *rest)


EXPORT = """
import sys, torch, warploom as wl
bias = torch.ones(4, 300)
variant = wl.flex(lambda s, b, h, i, j: s + bias[h, j])
class Layer(torch.nn.Module):
    def forward(self, q, k, v):
        return wl.attention(q, k, v, variant=variant)
given = tuple(torch.ones(1, 4, 4, 16) for _ in range(3))
torch.export.save(torch.export.export(Layer(), given), sys.argv[1])
"""


def test_programs_of_another_process_run_no_variant_of_this_one(tmp_path: Path) -> None:
    path = tmp_path / "program.pt2"
    subprocess.run([sys.executable, "-c", EXPORT, str(path)], check=True, cwd=tmp_path)
    q = torch.ones(1, 4, 4, 16)
    kept = [Causal() & SoftCap(float(cap)) for cap in range(1, 4)]
    for variant in kept:  # whatever number they had in a process of their own
        custom_op.register_variant(variant)
    program = torch.export.load(path).module()
    with pytest.raises(ArgumentError, match="another process exported or saved holds none"):
        program(q, q, q)


EAGER = """
import sys, torch, warploom as wl
q, k = torch.ones(1, 2, 4, 64), torch.ones(1, 5, 2, 64)
wl.attention(q, k, k, variant=wl.Causal(), backend="reference")
wrapper = wl.AttentionWrapper(num_q_heads=4, num_kv_heads=2, head_dim=64, dtype="float32",
                              device="cpu", backend="reference")
wrapper.plan([0, 2], [0, 5])
wrapper.run(q[0], (k[0], k[0]))
assert "warploom.runtime.operators.custom_op" in sys.modules
assert "torch._dynamo" not in sys.modules
"""


def test_eager_calls_do_not_wait_for_dynamo(tmp_path: Path) -> None:
    """Importing it takes seconds, which the first call of a process would pay."""
    subprocess.run([sys.executable, "-c", EAGER], check=True, timeout=120, cwd=tmp_path)
