"""Each mistake in the use of a wrapper has its own error, which says what, where and what to do."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from warploom import errors
from warploom.dsl.library.causal import Causal
from warploom.dsl.library.prefix_lm import PrefixLM
from warploom.dsl.library.sliding_window import SlidingWindow
from warploom.dsl.library.soft_cap import SoftCap
from warploom.dsl.types.formats import Dense, Paged
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.fields import Scalar, Tensor
from warploom.dsl.variants.variant import Variant
from warploom.runtime.calls.attention import attention
from warploom.runtime.devices.cuda import load_driver
from warploom.runtime.wrappers.wrapper import AttentionWrapper

SHAPE: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": "float32"}


class Biased(Variant):
    bias = Tensor("float32", ("q_head", "kv_pos"))
    gain = Scalar("float32")

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return self.gain * logits + self.bias[at.q_head, at.kv_pos]


def planned(variant: Any = None, **inputs: Any) -> AttentionWrapper:
    """A wrapper with a plan for one request of 3 rows and 5 keys. It needs no compiler."""
    wrapper = AttentionWrapper(variant, device="cpu", backend="reference", **SHAPE)
    wrapper.plan([0, 3], [0, 5], **inputs)
    return wrapper


def compiled(variant: Any = None, **inputs: Any) -> AttentionWrapper:
    wrapper = AttentionWrapper(variant, device="cpu", **SHAPE)
    wrapper.plan([0, 3], [0, 5], **inputs)
    return wrapper


@pytest.fixture(params=[planned, compiled], ids=["reference", "cpu"])
def make(request: pytest.FixtureRequest) -> Any:
    return request.param


Q, K = torch.zeros(3, 4, 64), torch.zeros(5, 2, 64)


def test_keys_of_another_type_than_declared() -> None:
    wrapper = AttentionWrapper(device="cpu", kv_dtype=torch.float8_e5m2, **SHAPE)
    wrapper.plan([0, 3], [0, 5])
    narrow = K.to(torch.float8_e5m2)
    assert wrapper.run(Q, (narrow, narrow)).dtype == torch.float32
    for k, v, name in ((K, narrow, "k"), (narrow, K.to(torch.float8_e4m3fn), "v")):
        with pytest.raises(errors.WrongDType, match=f"{name} has dtype .* torch.float8_e5m2"):
            wrapper.run(Q, (k, v))
    with pytest.raises(errors.WrongDType, match="v has dtype"):
        attention(Q[None], narrow[None], K[None])


@pytest.mark.parametrize(
    ("q", "k", "v", "error", "text"),
    [
        (Q.half(), K, K, errors.WrongDType, r"q has dtype torch.float16; .* or declare dtype="),
        (Q, K, K.bfloat16(), errors.WrongDType, "v has dtype torch.bfloat16"),
        (Q.to("meta"), K, K, errors.WrongDevice, "q is on meta; expected cpu"),
        (Q, K.to("meta"), K, errors.WrongDevice, "k is on meta"),
        (Q[:2], K, K, errors.WrongShape, r"q has shape \(2, 4, 64\); expected \(3, 4, 64\)"),
        (Q[None], K, K, errors.WrongShape, "row, head, dim"),
        (Q, K[:4], K, errors.WrongShape, "k has shape .*token>=5, head=2, dim=64"),
        (Q, K, K[:, :1], errors.WrongShape, "v has shape"),
        (Q, K[..., :32], K, errors.WrongShape, "dim=64"),
        ([1.0], K, K, errors.ArgumentError, "q: a list is neither"),
    ],
)
def test_wrong_tensors(
    make: Any, q: Any, k: Any, v: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        make().run(q, (k, v))


@pytest.mark.parametrize(
    ("results", "error", "text"),
    [
        ({"out": torch.zeros(3, 4, 32)}, errors.WrongShape, "out has shape"),
        ({"out": torch.zeros(3, 4, 64).half()}, errors.WrongDType, r"Allocate out with dtype="),
        ({"out": torch.zeros(1, 4, 64).expand(3, 4, 64)}, errors.WrongStride, "expanded"),
        ({"out": Q}, errors.ArgumentError, "out: reaches into the memory of q"),
        ({"lse": torch.zeros(3, 4, 1)}, errors.WrongShape, "lse has shape"),
        ({"lse": torch.zeros(3, 4).half()}, errors.WrongDType, "lse has dtype"),
        ({"lse": torch.zeros(3, 4).to("meta")}, errors.WrongDevice, "lse is on meta"),
    ],
)
def test_wrong_result_tensors(results: Any, error: type[Exception], text: str) -> None:
    wrapper = compiled()
    wrapper.run(Q, (K, K), out=torch.zeros(3, 4, 64))  # a good run before changes nothing
    with pytest.raises(error, match=text):
        wrapper.run(Q, (K, K), **results)


def test_results_that_reach_into_other_memory() -> None:
    """Also when only addresses differ from those of the run before."""
    wrapper = compiled()
    buffer = torch.zeros(8, 4, 64)
    q, out = buffer[:3], buffer[3:6]
    lse = torch.zeros(3, 4)
    inside_out = out.view(-1)[7:19].view(3, 4)
    wrapper.run(q, (K, K), out=out, lse=lse)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"out": buffer[1:4]}, "out: reaches into the memory of q"),
        ({"lse": inside_out, "out": out}, "lse: reaches into the memory of out"),
        ({"lse": q.view(-1)[-12:].view(3, 4)}, "lse: reaches into the memory of q"),
    ]
    for given, text in cases:
        for _ in range(2):
            with pytest.raises(errors.ArgumentError, match=text):
                wrapper.run(q, (K, K), **given)
    wrapper.run(q, (K, K), out=out, lse=lse)


def test_read_only_arrays_for_results(make: Any) -> None:
    for name, shape in (("out", (3, 4, 64)), ("lse", (3, 4))):
        result = np.zeros(shape, np.float32)
        result.flags.writeable = False
        with pytest.raises(errors.ArgumentError, match=f"{name}: is a read-only array"):
            make().run(Q, (K, K), **{name: result})


def test_wrong_kv(make: Any) -> None:
    with pytest.raises(errors.ArgumentError, match=r"kv: has 3 tensors; expected \(k, v\)"):
        make().run(Q, (K, K, K))
    with pytest.raises(errors.ArgumentError, match=r"expected the pair \(k, v\)"):
        make().run(Q, K)


@pytest.mark.parametrize("page", [6, 2**31 - 2, 2**31 - 1])
def test_a_page_of_any_size_beyond_the_cache(page: int) -> None:
    wrapper = AttentionWrapper(kv_format=Paged(4), device="cpu", **SHAPE)
    lists = ([0, 1], [0, 2], [1, page], [2])
    wrapper.plan(*(np.array(values, np.int32) for values in lists))
    expected = rf"kv_indices\[1\] is {page}; valid are 0 to 5"
    with pytest.raises(errors.IndexOutOfRange, match=expected):
        wrapper.run(Q[:1], torch.zeros(6, 2, 4, 2, 64))


def test_a_page_beyond_the_cache() -> None:
    wrapper = AttentionWrapper(kv_format=Paged(4), device="cpu", **SHAPE)
    wrapper.plan([0, 1], [0, 2], [1, 6], [2])
    cache = torch.zeros(6, 2, 4, 2, 64)
    with pytest.raises(errors.IndexOutOfRange, match=r"kv_indices\[1\] is 6; valid are 0 to 5"):
        wrapper.run(Q[:1], cache)
    with pytest.raises(errors.IndexOutOfRange, match=r"\[1\] is 6; the cache has no pages\.$"):
        wrapper.run(Q[:1], cache[:0])
    with pytest.raises(errors.WrongShape, match="token=4"):
        wrapper.run(Q[:1], torch.zeros(7, 2, 3, 2, 64))
    with pytest.raises(errors.WrongShape, match=r"\[pages, 2, ...\]"):
        wrapper.run(Q[:1], cache[:, 0])


@pytest.mark.parametrize(
    ("inputs", "error", "text"),
    [
        (
            {"gain": 1.0},
            errors.MissingInput,
            "Biased reads 'bias'.*float32 tensor .q_head=4, kv_pos>=5",
        ),
        ({"bias": torch.zeros(4, 5)}, errors.MissingInput, "Biased reads 'gain'"),
        (
            {"gain": 1.0, "slope": 2.0},
            errors.UnknownInput,
            "no input 'slope'. It takes: gain, bias",
        ),
        ({"gian": 1.0}, errors.UnknownInput, "no input 'gian'. Did you mean 'gain'[?] It takes"),
        ({"retrun_lse": True}, errors.UnknownInput, "Did you mean 'return_lse'[?]"),
        ({"lse_base": "2"}, errors.UnknownInput, "option of the wrapper: .*lse_base=..."),
        ({"gain": 1e300}, errors.ArgumentError, "1e[+]300 does not fit into float32"),
        ({"gain": "much"}, errors.WrongDType, "gain has dtype str.*Give a Python float or int"),
        ({"gain": 1.0, "bias": torch.zeros(4, 4)}, errors.WrongShape, "kv_pos>=5"),
        ({"gain": 1.0, "bias": torch.zeros(5, 5)}, errors.WrongShape, "q_head=4"),
        ({"gain": 1.0, "bias": torch.zeros(4)}, errors.WrongShape, "q_head, kv_pos"),
        (
            {"gain": 1.0, "bias": torch.zeros(4, 5).half()},
            errors.WrongDType,
            "torch.float16.*declare the field of Biased",
        ),
        (
            {"gain": 1.0, "bias": torch.zeros(4, 5).to("meta")},
            errors.WrongDevice,
            "bias is on meta",
        ),
    ],
)
def test_wrong_inputs(make: Any, inputs: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make(Biased()).run(Q, (K, K), **inputs)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ([1.7], errors.WrongDType, "prefix_len has dtype torch.float32; expected torch.int32"),
        ([True], errors.WrongDType, "prefix_len has dtype torch.bool"),
        ([2**40], errors.ArgumentError, r"prefix_len: its value .* does not fit into int32"),
        ([2**70], errors.ArgumentError, "prefix_len: is no tensor"),
        ([[1], [2, 3]], errors.ArgumentError, "prefix_len: is no tensor"),
        (["a"], errors.ArgumentError, "prefix_len: is no tensor"),
    ],
)
def test_lists_are_checked_as_tensors_are(given: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        planned(PrefixLM(), prefix_len=given)


def test_lists_of_ints_serve_where_floats_are_declared() -> None:
    wrapper = planned(Biased(), bias=[[1, 2, 3, 4, 5]] * 4, gain=1)
    assert torch.equal(wrapper._inputs.tensors["bias"][1], torch.arange(1.0, 6.0))


def test_run_before_plan() -> None:
    with pytest.raises(errors.NotPlanned, match="Call plan"):
        AttentionWrapper(device="cpu", **SHAPE).run(Q, (K, K))


def test_misspelt_arguments_are_found_before_anything_else(make: Any) -> None:
    wrapper = AttentionWrapper(device="cpu", backend="reference", **SHAPE)
    with pytest.raises(errors.UnknownInput, match="Did you mean 'lse'"):
        wrapper.run("no tensor", (K, K), lsee=K)  # before NotPlanned, too
    with pytest.raises(errors.UnknownInput, match="Did you mean 'kv_indices'"):
        wrapper.plan([1, 2], [5], kv_indexes=[0])
    with pytest.raises(errors.UnknownInput, match="Did you mean 'kv_lens'"):
        attention("no tensor", K, K, kv_len=[1])
    known = make()
    known.run(Q, (K, K))
    with pytest.raises(errors.UnknownInput, match="Did you mean 'out'"):
        known.run(Q, (K, K), outt=Q)
    with pytest.raises(errors.UnknownInput, match="option of the wrapper"):
        known.run(Q, (K, K), lse_base="2")


def test_lengths_that_are_no_integers() -> None:
    wrapper = AttentionWrapper(device="cpu", backend="reference", **SHAPE)
    with pytest.raises(errors.WrongDType, match=r"qo_indptr has dtype float64.*are integers: conv"):
        wrapper.plan([0.0, 3.0], [0, 5])


def test_run_that_disagrees_with_the_plan(make: Any) -> None:
    wrapper = make(SlidingWindow(4))
    with pytest.raises(errors.PlanMismatch, match=r"left is 3, but plan\(\) was called for 4"):
        wrapper.run(Q, (K, K), left=3)
    wrapper.run(Q, (K, K), left=4)
    wrapper = make(PrefixLM(), prefix_len=[2])
    with pytest.raises(errors.PlanMismatch, match="prefix_len"):
        wrapper.run(Q, (K, K), prefix_len=torch.tensor([3], dtype=torch.int32))


def test_scalars_of_the_mask_are_needed_by_plan() -> None:
    class Near(Variant):
        reach = Scalar("int32")

        def logits_mask(self, at: Position) -> Value:
            return at.kv_pos >= at.q_pos - self.reach

    wrapper = AttentionWrapper(Near(), device="cpu", **SHAPE)
    with pytest.raises(errors.MissingInput, match="Near reads 'reach'"):
        wrapper.plan([0, 1], [0, 1])
    with pytest.raises(
        errors.WrongDType, match="reach has dtype float; expected one number of int32"
    ):
        wrapper.plan([0, 1], [0, 1], reach=1.5)
    with pytest.raises(errors.ArgumentError, match="does not fit into int32"):
        wrapper.plan([0, 1], [0, 1], reach=2**40)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"head_dim": 60}, errors.BadHeadDim, r"head_dim=60.*Pad .*\(x, \(0, 4\)\).*60\*\*-0\.5"),
        ({"head_dim": 264}, errors.BadHeadDim, "8 up to 256. No kernel serves heads"),
        ({"head_dim_v": 4}, errors.BadHeadDim, "head_dim_v=4"),
        ({"num_kv_heads": 3}, errors.ArgumentError, "4 is no positive multiple of num_kv_heads=3"),
        ({"num_q_heads": 4.0}, errors.ArgumentError, r"num_q_heads: is 4.0; expected an int"),
        ({"sm_limit": 0}, errors.ArgumentError, "sm_limit: is 0; expected an int of at least 1"),
        ({"tile": (16, 64)}, errors.ArgumentError, "expected a TileConfig"),
        ({"dtype": "int8"}, errors.UnsupportedSpec, "dtype int8"),
        ({"kv_dtype": "uint8"}, errors.UnsupportedSpec, "float8_e4m3fn, float8_e5m2, int8"),
        ({"kv_dtype": torch.float16}, errors.UnsupportedSpec, "kv_dtype torch.float16 with dtype"),
        ({"dtype": torch.float8_e5m2}, errors.UnsupportedSpec, "float16, bfloat16, float32"),
        ({"dtype": torch.float64}, errors.UnsupportedSpec, "float16, bfloat16, float32"),
        ({"device": "meta"}, errors.UnsupportedSpec, "back ends are cuda and cpu"),
        ({"backend": "cuda"}, errors.ArgumentError, "'cuda' was asked .* on cpu; .* out for 'cpu'"),
        ({"backend": "tpu"}, errors.ArgumentError, "cuda, cpu and reference"),
        ({"lse_base": "10"}, errors.ArgumentError, "'10'; expected string 'e' or '2'"),
        ({"lse_base": 2}, errors.ArgumentError, "lse_base: 2; expected string 'e' or '2'"),
        ({"sm_scale": float("nan")}, errors.ArgumentError, "sm_scale: nan is no finite float32"),
        ({"sm_scale": 1e39}, errors.ArgumentError, "no finite float32"),
        ({"cuda_graph": True}, errors.ArgumentError, "bounds: cuda_graph=True needs them"),
        ({"variant": "causal"}, errors.ArgumentError, "'causal' is no Variant"),
        ({"variant": SoftCap}, errors.ArgumentError, r"class, and .*'cap'; .* SoftCap\(cap\)"),
        ({"variant": lambda s, b, h, q, k: s}, errors.ArgumentError, "warploom.flex"),
        ({"workspace": torch.zeros(8)}, errors.WrongDType, "workspace has dtype"),
        ({"workspace": torch.zeros(64, dtype=torch.uint8)[::2]}, errors.WrongStride, "contiguous"),
        ({"workspace": torch.zeros(8, device="meta")}, errors.WrongDevice, "workspace is on meta"),
    ],
)
def test_wrong_declarations(changes: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        AttentionWrapper(**{**SHAPE, "device": "cpu", **changes})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(errors.NoGpu, match="Use CPU tensors"):
        AttentionWrapper(**SHAPE, device="cuda")


D = torch.zeros(2, 3, 4, 64)


@pytest.mark.parametrize(
    ("q", "k", "v", "options", "error", "text"),
    [
        (D[0], D, D, {}, errors.WrongShape, "4 dimensions"),
        (D[:1], D, D, {}, errors.WrongShape, "batch 1, as q"),
        (D, D, D[:, :2], {}, errors.WrongShape, "before the head dimension, as k"),
        (D, D, D, {"layout": "NDH"}, errors.ArgumentError, "neither 'NHD' nor 'HND'"),
        (D, D, D, {"kv_lens": [3]}, errors.WrongShape, "kv_lens has shape"),
        (D, D, D, {"kv_lens": [3, 4]}, errors.BadLength, "is 4; expected 0 to 3, since k has 3 k"),
        (D, D, D, {"gain": 3.0}, errors.UnknownInput, "nothing, since it has no fields; attention"),
        (D, D.half(), D, {}, errors.WrongDType, "k has dtype"),
        (D.double(), D, D, {}, errors.UnsupportedSpec, "float64"),
    ],
)
def test_wrong_calls_of_attention(
    q: Any, k: Any, v: Any, options: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        attention(q, k, v, **options)


def test_dense_wrappers_have_one_number_of_rows() -> None:
    wrapper = AttentionWrapper(kv_format=Dense(), device="cpu", **SHAPE)
    with pytest.raises(errors.BadLength):
        wrapper.plan([0, 1, 3], [0, 1, 2])


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(errors.NoHostCompiler, match="backend='reference'"):
        AttentionWrapper(Causal(), device="cpu", **SHAPE)
    wrapper = AttentionWrapper(Causal(), device="cpu", backend="reference", **SHAPE)
    wrapper.plan([0, 3], [0, 5])
    assert wrapper.run(Q, (K, K)).shape == (3, 4, 64)


def test_no_cuda_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(errors.NoCudaCompiler, match=r"pip install 'warploom\[cu1[23]\]'"):
        load_driver()


def test_gradients_are_refused_where_they_are_asked_for(make: Any) -> None:
    q = Q.clone().requires_grad_()
    wrapper = make()
    with torch.no_grad():
        assert not wrapper.run(q, (K, K)).requires_grad
    out = wrapper.run(q, (K, K))
    with pytest.raises(errors.NoGradient, match="serves inference"):
        out.sum().backward()
    whole = attention(q[None], K[None], K[None])
    with pytest.raises(errors.NoGradient):
        whole.sum().backward()


def test_missing_packages_are_named() -> None:
    code = (
        "import sys; sys.modules['hypothesis'] = sys.modules['transformers'] = None\n"
        "import warploom, warploom.testing, warploom.errors as e\n"
        "check = lambda: warploom.testing.check(warploom.Causal())\n"
        "for call in (warploom.register_huggingface, check):\n"
        "    try: call()\n"
        "    except e.MissingPackage as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert "pip install 'transformers>=5'" in done.stdout, done.stderr
    assert "pip install 'hypothesis>=6.100'" in done.stdout
