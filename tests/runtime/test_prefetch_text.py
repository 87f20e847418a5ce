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
from warploom.runtime.launching.prefetch import cut, cut_rows, one_by_one
from warploom.serving.prefetch.blocks import Block, within

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
        if request.param == "host":
            records = one_by_one(records)
        table = np.zeros(1 + len(records), SPAN)
        table["offset"][0] = len(records)
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
    expected, left = [], most
    for offset, size, source in spans:
        expected.append(((FIRST, SECOND)[source] + offset, min(size, left)))
        left -= expected[-1][1]
    assert set(lines_of(found)) == lines_around(expected, line_of(found))


def line_of(found: Any) -> int:
    """Bytes of a line of the back end that has asked: 64 of a CPU, 128 of a GPU."""
    return 64 if len(found) and found[0, 1] == 64 else 128


def lines_of(found: Any) -> list[int]:
    """Numbers of the lines that were asked for, each as often as that."""
    line = line_of(found)
    sectors = (at for first, size in found.tolist() for at in range(first, first + size, 32))
    return [at // line for at in sectors if at % line == 0]


def lines_around(blocks: list[tuple[int, int]], line: int) -> set[int]:
    """Numbers of the lines that hold bytes of blocks, given as (begin, size)."""
    spans = (range(at // line, (at + size - 1) // line + 1) for at, size in blocks if size)
    return {number for span in spans for number in span}


@settings(max_examples=25, deadline=None)
@given(
    lines=st.integers(1, 200), gap=st.integers(1, 100), rows=st.integers(2, 70),
    odd=st.integers(0, 127), shift=st.integers(0, 127), asked_lines=st.integers(1, 3000),
    columns=st.booleans(),
)  # fmt: skip
def test_rows_that_lie_apart(
    asks: Any, lines: int, gap: int, rows: int, odd: int, shift: int, asked_lines: int,
    columns: bool,
) -> None:  # fmt: skip
    """Each line of what a budget takes of a matrix once, where rows begin with lines."""
    bytes_of_row = 128 * lines - odd
    matrix = Block(shift, bytes_of_row, rows, 128 * (lines + gap))
    blocks = within([matrix], 128 * asked_lines, columns)
    found = asks(np.concatenate([cut_rows(*block) for block in blocks]))
    each = ((x, row) for x in blocks for row in range(x.rows))
    wanted = [(FIRST + x.address + row * x.stride, x.bytes) for x, row in each]
    got = lines_of(found)
    assert set(got) == lines_around(wanted, line_of(found))
    if not shift:
        assert len(got) == len(set(got))


def test_ctas_take_spans_in_turn(asks: Any) -> None:
    """The order of the table is that in which memory is asked for."""
    count = 40
    spans = np.arange(count, dtype=np.int64) * 4096
    found = asks(cut(spans, np.full(count, 256), np.zeros(count, np.int64), count * 256))
    order = list(dict.fromkeys(((found[:, 0] - FIRST) // 4096).tolist()))
    assert sorted(order) == list(range(count))
    assert len(order) == count
