"""Device math: every function compiles for every architecture, and is accurate on a GPU."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom.codegen.compilers.arch import ARCHS, arch_for_capability
from warploom.codegen.compilers.nvrtc import compile_cuda
from warploom.dsl.types.accuracy import FAST_ERROR
from warploom.dsl.types.ir import UNARY_MATH
from warploom.dsl.values import functions

UNARY = sorted(UNARY_MATH - {"neg"})
TESTS = {"is_nan": "isnan", "is_inf": "isinf"}
NAMES = (*UNARY, *(f"precise::{name}" for name in UNARY), *TESTS)
# exact where results are small, too
RELATIVE = ("log1p", "expm1", "tan", "atan", "sinh", "cosh", "tanh", "erf")
SOURCE = (
    "#include <warploom/variant.cuh>\n"
    'extern "C" __global__ void all_math(int n, const float* x, float* y) {\n'
    "  const int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
    "  if (i >= n) return;\n"
    + "".join(f"  y[{f} * n + i] = warploom::{name}(x[i]);\n" for f, name in enumerate(NAMES))
    + "}\n"
)
# Inside the namespace, as all rendered code is: outside, CUDA's own functions are candidates too.
OTHERS = """
#include <warploom/variant.cuh>
namespace warploom {
template <class T> __device__ T all(T a, T b) {
  return floordiv(a, b) + mod(a, b) * min(a, b) - max(a, b) + abs(a) + pow(a, b) + fmod(a, b);
}
extern "C" __global__ void others(const int* a, const wide* b, const half_t* h,
                                  const bfloat16_t* g, float* out, half_t* out_h) {
  const int i = clamp_index(int(threadIdx.x), 100);
  out[i] = float(all(a[i], a[i + 1])) + float(all(b[i], b[i + 1])) + load(h, i) + load(g, i);
  out[i] += pow(out[i], 2.5f) + floordiv(out[i], 2.0f) + mod(out[i], 3.0f) - kInfinity;
  out_h[i] = from_float<half_t>(min(out[i], max(out[i], kNaN)));
}
}
"""
LIMIT = 2e-6  # absolute, and relative where the value is above 1
# fp32 cannot hold the exponent of a large power of e more exactly; tanh.approx promises 2^-10.987.
LIMITS = {"exp": 20 * LIMIT, "exp2": 20 * LIMIT, "tanh": 2**-10.98}


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_all_functions_compile(arch: str) -> None:
    assert compile_cuda(SOURCE, ARCHS[arch], "math")
    assert compile_cuda(OTHERS, ARCHS[arch], "others")


def launch(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """All functions of x: [function, element]."""
    torch = pytest.importorskip("torch")
    driver = pytest.importorskip("cuda.bindings.driver")
    arch = arch_for_capability(*torch.cuda.get_device_capability())
    given = torch.from_numpy(x).cuda()
    out = torch.empty(len(NAMES), len(x), device="cuda")
    _, module = driver.cuModuleLoadData(compile_cuda(SOURCE, arch, "math"))
    _, kernel = driver.cuModuleGetFunction(module, b"all_math")
    values = (len(x), given.data_ptr(), out.data_ptr())
    types = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    blocks = (len(x) + 255) // 256
    stream = torch.cuda.current_stream().cuda_stream
    status = driver.cuLaunchKernel(kernel, blocks, 1, 1, 256, 1, 1, 0, stream, (values, types), 0)
    assert int(status[0]) == 0
    found: np.ndarray[Any, Any] = out.cpu().numpy()
    return found


@pytest.mark.gpu
def test_device_math_is_accurate() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(-12, 12, 20000), rng.uniform(-1e6, 1e6, 20000), [0.0]])
    x = x.astype(np.float32)
    with np.errstate(all="ignore"):
        for name, found in zip(NAMES, launch(x), strict=True):
            function = name.removeprefix("precise::")
            exact = getattr(functions, TESTS.get(function, function))(x.astype(np.float64))
            fits = np.isfinite(exact) & (np.abs(exact) < 1e37)
            error = np.abs(found - exact)[fits] / np.maximum(np.abs(exact[fits]), 1.0)
            assert error.max() < LIMITS.get(name, LIMIT), name
            if limit := FAST_ERROR.get(function):
                assert limit.allows(found[fits], exact[fits]), name


@pytest.mark.gpu
def test_device_math_is_accurate_near_zero() -> None:
    rng = np.random.default_rng(1)
    x = np.exp(rng.uniform(np.log(1e-37), np.log(1e4), 40000)) * rng.choice([-1, 1], 40000)
    x = x.astype(np.float32)
    with np.errstate(all="ignore"):
        for name, found in zip(NAMES, launch(x), strict=True):
            function = name.removeprefix("precise::")
            if function in RELATIVE:
                exact = getattr(functions, function)(x.astype(np.float64))
                fits = np.isfinite(exact) & (np.abs(exact) < 1e37)
                assert np.abs(found / exact - 1)[fits].max() < LIMITS.get(name, LIMIT), name


@pytest.mark.gpu
def test_device_math_at_infinity() -> None:
    x = np.array([-np.inf, np.inf], np.float32)
    found = dict(zip(NAMES, launch(x), strict=True))
    assert found["is_inf"].tolist() == [1.0, 1.0] and found["is_nan"].tolist() == [0.0, 0.0]
    assert launch(np.array([np.nan], np.float32))[-2:].tolist() == [[1.0], [0.0]]
    for space in ("", "precise::"):
        assert found[space + "exp"].tolist() == [0.0, np.inf]
        assert found[space + "exp2"].tolist() == [0.0, np.inf]
        assert found[space + "tanh"].tolist() == [-1.0, 1.0]
        assert found[space + "sigmoid"].tolist() == [0.0, 1.0]
        assert found[space + "erf"].tolist() == [-1.0, 1.0]
        assert found[space + "expm1"].tolist() == [-1.0, np.inf]
        assert found[space + "sinh"].tolist() == [-np.inf, np.inf]
        assert found[space + "cosh"].tolist() == [np.inf, np.inf]
        assert np.isnan(found[space + "log1p"][0]) and found[space + "log1p"][1] == np.inf


class HashSparse(wl.Variant):
    """Low bits of a product that does not fit: the same with and without wrapping."""

    def logits_mask(self, at: wl.Position) -> Any:
        return ((at.kv_pos * 1103515245 + 12345) & 1023) < 300


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 40, 300])
def test_integers_wrap(rows: int, cuda: Any) -> None:
    q = torch.zeros(1, rows, 1, 64, dtype=torch.float16, device=cuda)
    k = torch.zeros(1, 256, 1, 64, dtype=torch.float16, device=cuda)
    for first in range(0, 256, 64):
        v = torch.zeros(256, 64, dtype=torch.float16, device=cuda)
        v[first : first + 64] = torch.eye(64)
        out = wl.attention(q, k, v[None, :, None], variant=HashSparse())[0, -1, 0] > 0
        keys = range(first, first + 64)
        assert out.tolist() == [((j * 1103515245 + 12345) & 1023) < 300 for j in keys]
