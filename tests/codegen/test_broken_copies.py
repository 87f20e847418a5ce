"""Copies that ptxas of CUDA 13.0 breaks: found in cubins; kernels are compiled without them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from warploom.codegen.compilers import nvrtc
from warploom.codegen.compilers.arch import arch_named
from warploom.codegen.compilers.cubin import has_broken_copies
from warploom.codegen.compilers.headers import CudaToolchain
from warploom.codegen.compilers.nvrtc import run_nvrtc
from warploom.codegen.compilers.nvrtc_worker import Reply, Request
from warploom.errors import CompileError

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("cache")]

SM90 = arch_named("sm_90a")
PLAIN = "-DWARPLOOM_NO_CACHE_HINTS"
COPIES = """extern "C" __global__ void warploom_kernel(float* x, const float4* from) {
  extern __shared__ float4 to[];
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to + threadIdx.x));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from + threadIdx.x));
  asm volatile("cp.async.wait_all;");
  x[threadIdx.x] = to[threadIdx.x].x;
}"""


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


def broken(cubin: bytes) -> bytes:
    """The cubin whose copies lack the descriptor of their source, as ptxas 13.0.88 wrote some.

    Sigmoid attention over 64 and 40 lanes in two roles was such a kernel, and ended with "illegal
    instruction" on an H100 and an H200; since its text has changed, ptxas writes it right.
    """
    words = np.frombuffer(cubin[: len(cubin) // 8 * 8], np.uint64).copy()
    copies = (words & 0xFFF) == 0xFAE
    assert 1 <= copies.sum() <= 2  # the copy, and a number that looks like it at most
    words[copies] ^= 0xFAE ^ 0xDAE
    return words.tobytes() + cubin[len(words) * 8 :]


@pytest.mark.parametrize("name", ["sm_80", "sm_90a", "sm_100", "sm_120"])
def test_a_kernel_with_broken_copies_is_compiled_without_hints(
    name: str, toolchain: CudaToolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Request] = []
    ask = nvrtc._in_worker

    def breaks_hinted(request: Request) -> Reply:
        asked.append(request)
        reply = ask(request)
        assert reply.cubin is not None and not has_broken_copies(reply.cubin)
        if PLAIN in request.flags:
            return reply
        assert has_broken_copies(broken(reply.cubin))
        return replace(reply, cubin=broken(reply.cubin))

    monkeypatch.setattr(nvrtc, "_in_worker", breaks_hinted)
    made = run_nvrtc(COPIES, arch_named(name), "copies")
    assert not has_broken_copies(made.cubin)
    assert [PLAIN in request.flags for request in asked] == [False, True]


def test_others_are_compiled_once(
    toolchain: CudaToolchain, compiles: list[tuple[Request, Reply]]
) -> None:
    for arch in ("sm_80", "sm_90a", "sm_100", "sm_120"):
        run_nvrtc(COPIES, arch_named(arch), "copies")
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
