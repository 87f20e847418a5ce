"""Copies that ptxas of CUDA 13.0 breaks: found in cubins; kernels are compiled without them."""

from __future__ import annotations

import pytest

import warploom as wl
from warploom.codegen.attention.templates import HOPPER
from warploom.codegen.compilers import nvrtc
from warploom.codegen.compilers.arch import arch_named
from warploom.codegen.compilers.cubin import has_broken_copies
from warploom.codegen.compilers.headers import CudaToolchain
from warploom.codegen.compilers.nvrtc import run_nvrtc
from warploom.codegen.compilers.nvrtc_worker import Reply, Request
from warploom.codegen.source import TileConfig
from warploom.dsl.types.dtypes import dtype
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace
from warploom.errors import CompileError
from warploom.scheduler.layout import c_structs

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("cache")]

SM90 = arch_named("sm_90a")
PLAIN = "-DWARPLOOM_NO_CACHE_HINTS"
# Ended with "illegal instruction" on an H100 and an H200 when it was compiled by 13.0.88.
TILE = TileConfig(128, 128, 8, 2, "hopper", 2, decode=TileConfig(16, 320, 10, 2))
SPEC = AttentionSpec(trace(wl.FlashSigmoid(bias=-2.0)), 64, 40, dtype("float16"), wl.Ragged())


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Request, Reply]]:
    """What compilers are asked and answer."""
    found: list[tuple[Request, Reply]] = []
    ask = nvrtc._in_worker

    def kept(request: Request) -> Reply:
        found.append((request, ask(request)))
        return found[-1][1]

    monkeypatch.setattr(nvrtc, "_in_worker", kept)
    return found


def test_a_kernel_with_broken_copies_is_compiled_without_hints(
    toolchain: CudaToolchain, compiles: list[tuple[Request, Reply]]
) -> None:
    source = HOPPER.kernel(SPEC, TILE).render("cuda", c_structs(roles=True))
    made = run_nvrtc(source.text, SM90, source.name)
    assert not has_broken_copies(made.cubin)
    first, *others = compiles
    assert PLAIN not in first[0].flags
    if toolchain.nvrtc_version == (13, 0):
        (again,) = others
        assert first[1].cubin is not None and has_broken_copies(first[1].cubin)
        assert PLAIN in again[0].flags and again[1].cubin == made.cubin


def test_others_are_compiled_once(
    toolchain: CudaToolchain, compiles: list[tuple[Request, Reply]]
) -> None:
    text = """extern "C" __global__ void warploom_kernel(float* x, const float4* from) {
      extern __shared__ float4 to[];
      unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to + threadIdx.x));
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from + threadIdx.x));
      asm volatile("cp.async.wait_all;");
      x[threadIdx.x] = to[threadIdx.x].x;
    }"""
    for arch in ("sm_80", "sm_90a", "sm_100a", "sm_120"):
        run_nvrtc(text, arch_named(arch), "copies")
    assert len(compiles) == 4


def test_a_compiler_that_cannot_do_without_is_refused(
    toolchain: CudaToolchain,
    compiles: list[tuple[Request, Reply]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nvrtc, "has_broken_copies", lambda cubin: True)
    with pytest.raises(CompileError, match="install a newer nvidia-cuda-nvrtc"):
        run_nvrtc('extern "C" __global__ void warploom_kernel() {}', SM90, "nothing")
    assert [PLAIN in request.flags for request, _ in compiles] == [False, True]
