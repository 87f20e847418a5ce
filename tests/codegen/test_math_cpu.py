"""Host math: accuracy against float64, special values, and that loops over it vectorise."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from warploom.dsl.types.accuracy import FAST_ERROR
from warploom.dsl.values import functions

OPTIMISED = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
FLAGS = (*OPTIMISED, "-march=native")
FAST = ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sigmoid", "sin", "cos")
# exact where results are small, too
RELATIVE = ("log1p", "expm1", "tan", "atan", "sinh", "cosh", "tanh", "erf")
FAST += RELATIVE
TESTS = {"is_nan": "isnan", "is_inf": "isinf"}
VECTORISED = (*FAST, "floor", "ceil", "abs", *TESTS)

SOURCE = "#include <warploom/variant.hpp>\n" + "\n".join(
    f'extern "C" void {name}_(int n, const float* __restrict x, float* __restrict y) '
    f"{{ for (int i = 0; i < n; ++i) y[i] = warploom::{name}(x[i]){choice}; }}"
    for name in VECTORISED
    for choice in (" ? 1.0f : 0.0f" if name in TESTS else "",)
)
PRECISE = "#include <warploom/variant.hpp>\n" + "\n".join(
    f'extern "C" void {name}_(int n, const float* x, float* y) '
    f"{{ for (int i = 0; i < n; ++i) y[i] = warploom::precise::{name}(x[i]); }}"
    for name in VECTORISED
    if name not in TESTS
)
# where each function is tried: (least, greatest)
DOMAINS = {
    "exp": (-87, 88),
    "exp2": (-125, 127.9),
    "log": (1e-30, 1e30),
    "log2": (1e-30, 1e30),
    "sqrt": (0, 1e9),
    "rsqrt": (1e-9, 1e9),
    "sin": (-1e6, 1e6),
    "cos": (-1e6, 1e6),
    "log1p": (-0.999, 1e30),
    "expm1": (-100, 88.7),
    "tan": (-1e6, 1e6),
    "atan": (-1e30, 1e30),
    "sinh": (-89.4, 89.4),
    "cosh": (-89.4, 89.4),
    "tanh": (-12, 12),
    "erf": (-12, 12),
}


# Of each kind of functions: "oldest" are the fast ones for the oldest of the compiler's processors,
# which on x86 cannot fuse products and sums.
KINDS = {
    "fast": (SOURCE, *FLAGS),
    "oldest": (SOURCE, *OPTIMISED),
    "precise": (PRECISE, "-O1"),
}


@pytest.fixture
def fast(compile_cpp: Callable[..., ctypes.CDLL]) -> ctypes.CDLL:
    return compile_cpp(*KINDS["fast"])


def run(library: ctypes.CDLL, name: str, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    x = np.ascontiguousarray(x, np.float32)
    y = np.empty_like(x)
    pointers = (a.ctypes.data_as(ctypes.c_void_p) for a in (x, y))
    getattr(library, f"{name}_")(len(x), *pointers)
    return y


def samples(name: str) -> np.ndarray[Any, Any]:
    low, high = DOMAINS.get(name, (-12, 12))
    rng = np.random.default_rng(0)
    if low > 0:
        return np.exp(rng.uniform(np.log(low), np.log(high), 20000)).astype(np.float32)
    spread = rng.uniform(low, high, 20000)
    return np.concatenate([spread, rng.uniform(-1, 1, 5000), [0.0]]).clip(low).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_accuracy(kind: str, compile_cpp: Callable[..., ctypes.CDLL]) -> None:
    library = compile_cpp(*KINDS[kind])
    for name in FAST:
        x = samples(name)
        exact = getattr(functions, name)(x.astype(np.float64))
        found = run(library, name, x)
        error = np.abs(found - exact) / np.maximum(np.abs(exact), 1.0)
        assert error.max() < 5e-7, (name, error.max(), x[error.argmax()])
        assert name not in FAST_ERROR or FAST_ERROR[name].allows(found, exact), name


def test_relative_accuracy_where_results_are_small(fast: ctypes.CDLL) -> None:
    x = np.linspace(-85, 0, 5000, dtype=np.float32)
    for name, exact in (("exp", np.exp), ("exp2", np.exp2)):
        assert np.abs(run(fast, name, x) / exact(x.astype(np.float64)) - 1).max() < 3e-7


@pytest.mark.parametrize("kind", KINDS)
def test_relative_accuracy_at_every_size(
    kind: str, compile_cpp: Callable[..., ctypes.CDLL]
) -> None:
    library = compile_cpp(*KINDS[kind])
    rng = np.random.default_rng(1)
    for name in RELATIVE:
        low, high = DOMAINS[name]
        sizes = np.exp(rng.uniform(np.log(1e-37), np.log(high), 40000)) * rng.choice([-1, 1], 40000)
        x = np.concatenate([sizes, rng.uniform(low, min(high, 100), 20000)])
        x = x.clip(low, high).astype(np.float32)
        exact = getattr(functions, name)(x.astype(np.float64))
        error = np.abs(run(library, name, x) / np.where(exact == 0, 1, exact) - (exact != 0))
        assert error.max() < 5e-7, (name, error.max(), x[error.argmax()])


# not -ffast-math, whose start-up code would flush small numbers to zero in this whole process
FINITE = ("-O3", "-march=native", "-ffinite-math-only", "-fno-signed-zeros")


@pytest.mark.parametrize("flags", [FLAGS, FINITE, ("-O0",)])
def test_infinities_and_nan_are_told_whatever_the_flags(
    flags: tuple[str, ...], compile_cpp: Callable[..., ctypes.CDLL]
) -> None:
    library = compile_cpp(SOURCE, *flags)
    bits = np.random.default_rng(2).integers(0, 2**32, 100000, dtype=np.uint32)
    x = bits.view(np.float32)
    x[:200] = np.repeat([np.inf, -np.inf, np.nan, 0.0], 50)
    for name, numpy_name in TESTS.items():
        np.testing.assert_array_equal(run(library, name, x), getattr(np, numpy_name)(x))


BINARY = {
    "fmod": np.fmod,
    "mod": np.remainder,
    "floordiv": np.floor_divide,
    "min": np.minimum,
    "max": np.maximum,
}
OF_TWO = "#include <warploom/variant.hpp>\n" + "\n".join(
    f'extern "C" void {name}_(int n, const float* __restrict a, const float* __restrict b, '
    f"float* __restrict y) {{ for (int i = 0; i < n; ++i) y[i] = warploom::{name}(a[i], b[i]); }}"
    for name in BINARY
)


def pairs_of_floats() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(3)
    anything = rng.integers(0, 2**32, (2, 100000), dtype=np.uint32).view(np.float32)
    usual = rng.normal(size=(2, 100000)) * [[50.0], [1.0]]
    quotients = usual[1] * rng.integers(-9, 9, 100000)  # whole, but for rounding
    ends = [0.0, -0.0, 1.0, -3.0, 1e-45, 3.4e38, np.inf, -np.inf, np.nan]
    pairs = (anything, usual, [quotients, usual[1]], np.array(list(product(ends, ends))).T)
    with np.errstate(all="ignore"):
        a, b = np.concatenate(pairs, axis=1).astype(np.float32)
    return a, b


@pytest.mark.parametrize("flags", [FLAGS, ("-O2",)])
@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_floats_are_exact_and_keep_nan(
    name: str, flags: tuple[str, ...], compile_cpp: Callable[..., ctypes.CDLL]
) -> None:
    a, b = pairs_of_floats()
    y = np.empty_like(a)
    pointers = (x.ctypes.data_as(ctypes.c_void_p) for x in (a, b, y))
    getattr(compile_cpp(OF_TWO, *flags), f"{name}_")(len(a), *pointers)
    with np.errstate(all="ignore"):
        expected = BINARY[name](a, b)
    np.testing.assert_array_equal(y, expected)
    if name in ("mod", "floordiv"):  # zeros have the signs of Python's
        is_zero = expected == 0
        assert (np.signbit(expected[is_zero]) != np.signbit(a[is_zero])).any()
        np.testing.assert_array_equal(np.signbit(y[is_zero]), np.signbit(expected[is_zero]))


def test_special_values(fast: ctypes.CDLL) -> None:
    inf, nan = np.inf, np.nan
    expected = {
        "exp": [(-inf, 0), (inf, inf), (0, 1), (-200, 0), (100, inf), (nan, nan), (88.7, None)],
        "exp2": [(-inf, 0), (inf, inf), (0, 1), (-130, 0), (128, inf), (10, 1024), (nan, nan)],
        "log": [(0, -inf), (inf, inf), (1, 0), (-1, nan), (nan, nan)],
        "log2": [(0, -inf), (inf, inf), (1, 0), (8, 3), (0.25, -2), (-1, nan)],
        "tanh": [(inf, 1), (-inf, -1), (0, 0), (nan, nan)],
        "sigmoid": [(inf, 1), (-inf, 0), (0, 0.5), (-100, 0)],
        "erf": [(inf, 1), (-inf, -1), (0, 0)],
        "sin": [(0, 0)],
        "cos": [(0, 1)],
        "log1p": [(-1, -inf), (-1.5, nan), (inf, inf), (-inf, nan), (nan, nan), (0, 0)],
        "expm1": [(-inf, -1), (inf, inf), (88.8, inf), (88.72, None), (nan, nan), (0, 0)],
        "tan": [(0, 0), (inf, nan), (-inf, nan), (nan, nan)],
        "atan": [(inf, np.pi / 2), (-inf, -np.pi / 2), (nan, nan), (0, 0)],
        "sinh": [(inf, inf), (-inf, -inf), (89.5, inf), (89.41, None), (nan, nan), (0, 0)],
        "cosh": [(inf, inf), (-inf, inf), (-89.5, inf), (89.41, None), (nan, nan), (0, 1)],
        "is_nan": [(nan, 1), (-nan, 1), (inf, 0), (-inf, 0), (0, 0), (1e-42, 0)],
        "is_inf": [(nan, 0), (inf, 1), (-inf, 1), (3.4e38, 0), (0, 0), (1e-42, 0)],
    }
    for name, pairs in expected.items():
        found = run(fast, name, np.array([x for x, _ in pairs]))
        for (x, y), got in zip(pairs, found, strict=True):
            if y is None:
                assert np.isfinite(got)
            else:
                np.testing.assert_allclose(got, y, atol=3e-7, err_msg=f"{name}({x})")


def test_loops_vectorise(compile_cpp: Callable[..., ctypes.CDLL], tmp_path: Path) -> None:
    compiler = subprocess.run(["c++", "--version"], capture_output=True, text=True).stdout
    if "Free Software Foundation" not in compiler:
        pytest.skip("reads GCC's vectorisation report")
    report = tmp_path / "report.txt"
    compile_cpp(SOURCE, *FLAGS, f"-fopt-info-vec={report}")
    of_two = tmp_path / "of_two.txt"
    compile_cpp(OF_TWO, *FLAGS, f"-fopt-info-vec={of_two}")
    for read, names in ((report, VECTORISED), (of_two, BINARY)):
        lines = {line.split(":")[1] for line in read.read_text().splitlines() if "loop vec" in line}
        wanted = {str(i + 2): name for i, name in enumerate(names)}
        assert {name for line, name in wanted.items() if line not in lines} == set()


INTEGERS = """
#include <warploom/variant.hpp>
template <class T> void all(int n, const T* a, const T* b, T* out) {
  for (int i = 0; i < n; ++i) {
    out[4 * i] = warploom::floordiv(a[i], b[i]);
    out[4 * i + 1] = warploom::mod(a[i], b[i]);
    out[4 * i + 2] = warploom::min(a[i], b[i]);
    out[4 * i + 3] = warploom::max(a[i], b[i]);
  }
}
extern "C" void narrow(int n, const int* a, const int* b, int* out) { all(n, a, b, out); }
extern "C" void wide(int n, const long long* a, const long long* b, long long* out) {
  all(n, a, b, out);
}
"""


@pytest.mark.parametrize(("name", "dtype"), [("narrow", np.int32), ("wide", np.int64)])
def test_integers_are_pythons(
    name: str, dtype: type, compile_cpp: Callable[..., ctypes.CDLL]
) -> None:
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    tops = [least, least + 1, most]
    pairs = [*product(range(-20, 21), range(-7, 8)), *product(tops, (*range(-7, 8), *tops))]
    a, b = np.array(pairs, dtype).T.copy()
    out = np.empty((len(a), 4), dtype)
    getattr(compile_cpp(INTEGERS), name)(
        len(a), *(x.ctypes.data_as(ctypes.c_void_p) for x in (a, b, out))
    )
    for (x, y), row in zip(pairs, out.tolist(), strict=True):
        quotient, rest = (x // y, x % y) if y else (0, 0)
        if quotient > most:  # least // -1 stays as it is, as in NumPy, and does not trap
            quotient = least
        assert row == [quotient, rest, min(x, y), max(x, y)], (x, y)


CONVERSIONS = """
#include <warploom/variant.hpp>
using namespace warploom;
extern "C" void half_to_float(int n, const half_t* x, float* y) {
  for (int i = 0; i < n; ++i) y[i] = load(x, i);
}
extern "C" void brain_to_float(int n, const bfloat16_t* x, float* y) {
  for (int i = 0; i < n; ++i) y[i] = load(x, i);
}
extern "C" void float_to_half(int n, const float* x, half_t* y) {
  for (int i = 0; i < n; ++i) y[i] = from_float<half_t>(x[i]);
}
extern "C" void float_to_brain(int n, const float* x, bfloat16_t* y) {
  for (int i = 0; i < n; ++i) y[i] = from_float<bfloat16_t>(x[i]);
}
"""


def test_16_bit_floats(compile_cpp: Callable[..., ctypes.CDLL]) -> None:
    library = compile_cpp(CONVERSIONS, "-O3", "-march=native")

    def convert(name: str, x: np.ndarray[Any, Any], out_type: Any) -> np.ndarray[Any, Any]:
        y = np.empty(len(x), out_type)
        getattr(library, name)(len(x), *(a.ctypes.data_as(ctypes.c_void_p) for a in (x, y)))
        return y

    bits = np.arange(2**16, dtype=np.uint16)
    halves = bits.view(np.float16)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(convert("half_to_float", bits, np.float32), halves)
        as_brain = (bits.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(convert("brain_to_float", bits, np.float32), as_brain)

        rng = np.random.default_rng(0)
        anything = rng.integers(0, 2**32, 200000, dtype=np.uint32).view(np.float32)
        near = (rng.normal(size=200000) * 10.0 ** rng.integers(-9, 6, 200000)).astype(np.float32)
        ties = (np.arange(4096, dtype=np.uint32) * 2**12 + 0x38000000).view(np.float32)
        x = np.concatenate([anything, near, ties, -ties])
        np.testing.assert_array_equal(
            convert("float_to_half", x, np.uint16).view(np.float16), x.astype(np.float16)
        )
        torch = pytest.importorskip("torch")
        expected = torch.from_numpy(x).to(torch.bfloat16).float().numpy()
        found = convert("float_to_brain", x, np.uint16).astype(np.uint32) << 16
        np.testing.assert_array_equal(found.view(np.float32), expected)
