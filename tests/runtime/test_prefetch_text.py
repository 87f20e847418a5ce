"""The text of both prefetch kernels asks for every line of every span, and for no other."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.emulator import EMULATION, TEMPLATES

from warploom.codegen.abi import Packer
from warploom.codegen.compilers.hostcc import host_target
from warploom.codegen.prefetch import SPAN, THREADS, PrefetchSpec
from warploom.errors import NoHostCompiler
from warploom.runtime.launching.prefetch import cut

CTAS = 3
SPANS = st.lists(
    st.tuples(st.integers(-5000, 100_000), st.integers(1, 40_000), st.integers(0, 1)), max_size=8
)
FIRST, SECOND = 1 << 33, (1 << 34) + 48  # where two tensors lie; nothing reads there

# No thread waits for another, so one after another will do.
_DEVICE = """
#include <cstring>
#define __global__
#define __grid_constant__
#define __launch_bounds__(threads)
struct Index { unsigned x; };
static Index blockIdx, threadIdx, gridDim, blockDim;
%s
extern "C" __attribute__((visibility("default"))) long long emulate(const void* p, void* out) {
  warploom::num_asked = 0;
  warploom::Params params;
  std::memcpy(&params, p, sizeof(params));
  gridDim.x = %d, blockDim.x = %d;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) warploom_kernel(params);
  }
  std::memcpy(out, warploom::asked, warploom::num_asked * sizeof(warploom::Asked));
  return warploom::num_asked;
}
"""
_HOST = """
#include <cstring>
static unsigned long long asked[1 << 16][2];
static long long num_asked = 0;
static void ask(const char* line) {
  asked[num_asked][0] = reinterpret_cast<unsigned long long>(line);
  asked[num_asked++][1] = 64;
}
#define __builtin_prefetch ask
%s
extern "C" __attribute__((visibility("default"))) long long emulate(const void* p, void* out) {
  num_asked = 0;
  warploom_kernel(static_cast<const warploom::Params*>(p), 1, 1);
  std::memcpy(out, asked, num_asked * sizeof(asked[0]));
  return num_asked;
}
"""


def compiled(text: str, folders: list[Path], source: Path) -> ctypes.CDLL:
    source.write_text(text)
    library = source.with_suffix(".so")
    flags = ["-std=c++17", "-shared", "-fPIC", "-w", *(f"-I{folder}" for folder in folders)]
    subprocess.run([*host_target().command, *flags, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="module", params=["host", "sectors", "bulk"])
def asks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from a table of spans to (address, bytes) of what its text asks for."""
    source = tmp_path_factory.mktemp("prefetch") / "kernel.cpp"
    try:
        if request.param == "host":
            text = _HOST % PrefetchSpec().render("cpp").text
            folders = [TEMPLATES / "cpu", TEMPLATES / "common"]
        else:
            bulk = "#define WL_BULK_PREFETCH\n" if request.param == "bulk" else ""
            text = PrefetchSpec(keep=bool(bulk)).render("cuda").text
            text = bulk + _DEVICE % (text, CTAS, THREADS)
            folders = [EMULATION, *(TEMPLATES / x for x in ("include", "cpu", "common"))]
        library = compiled(text, folders, source)
    except NoHostCompiler as error:
        pytest.skip(str(error))
    run = library["emulate"]
    run.argtypes, run.restype = (ctypes.c_char_p, ctypes.c_void_p), ctypes.c_longlong
    packer = Packer(PrefetchSpec().fields)

    def asked(records: Any) -> Any:
        table = np.zeros(1 + len(records), SPAN)
        table[0] = len(records), 0, 0
        table[1:] = records
        values = {
            "spans": table.ctypes.data, "first_source": FIRST, "second_source": SECOND,
        }  # fmt: skip
        out = np.zeros((1 << 16, 2), np.int64)
        count = run(packer.pack(values), out.ctypes.data)
        assert count >= 0
        return out[:count]

    return asked


@settings(max_examples=25, deadline=None)
@given(spans=SPANS, most=st.integers(0, 60_000))
def test_every_line_and_no_other(asks: Any, spans: Any, most: int) -> None:
    offsets, sizes, sources = (np.array(x, np.int64) for x in zip(*spans, strict=True)) if spans \
        else (np.zeros(0, np.int64),) * 3  # fmt: skip
    found = asks(cut(offsets, sizes, sources, most))
    line = 64 if len(found) and found[0, 1] == 64 else 128
    lines = {at // line for first, size in found.tolist() for at in range(first, first + size, 32)}
    expected, left = set(), most
    for offset, size, source in spans:
        begin, size = (FIRST, SECOND)[source] + offset, min(size, left)
        left -= size
        if size:
            expected |= set(range(begin // line, (begin + size - 1) // line + 1))
    assert lines == expected


def test_ctas_take_spans_in_turn(asks: Any) -> None:
    """The order of the table is that in which memory is asked for."""
    count = 40
    spans = np.arange(count, dtype=np.int64) * 4096
    found = asks(cut(spans, np.full(count, 256), np.zeros(count, np.int64), count * 256))
    order = list(dict.fromkeys(((found[:, 0] - FIRST) // 4096).tolist()))
    assert sorted(order) == list(range(count))
    assert len(order) == count
