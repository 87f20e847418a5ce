"""What is asked of the CUDA driver to load and launch, with a driver that only takes notes."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from warploom.codegen.build import Artifact
from warploom.codegen.compilers.arch import ARCHS
from warploom.codegen.compilers.cubin import Resources
from warploom.codegen.launch_shape import LaunchShape
from warploom.dsl.types.dtypes import dtype
from warploom.dsl.types.formats import Ragged
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace
from warploom.dsl.variants.variant import Variant
from warploom.errors import LaunchError
from warploom.runtime.devices import cuda
from warploom.runtime.devices.device import CudaFacts
from warploom.runtime.devices.params import STRIDES, ParamBlock

INVALID_CONTEXT = 201


class FakeDriver:
    """Answers every call with success and a plausible result, unless told otherwise."""

    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.status: dict[str, list[int]] = {}
        self.results = {
            "cuOccupancyMaxActiveBlocksPerMultiprocessor": 2,
            "cuModuleGetFunction": 77,
            "cuDriverGetVersion": 13000,
        }
        self.overlapped: list[bool] = []
        self._launch = cuda._LaunchKernelEx(self.launch)  # the driver's own code stands here

    def launch(self, at: int, function: int, arguments: int, extra: int | None) -> int:
        config = cuda._LaunchConfig.from_address(at)
        params = ctypes.c_void_p.from_address(arguments).value
        assert params is not None
        copied = ctypes.string_at(params, 8)  # the driver copies the parameters now
        shape = (*config.grid, *config.block, config.shared_bytes)
        assert extra is None
        assert config.num_attributes == (0 if config.attributes is None else 1)
        if config.attributes is not None:
            attribute = cuda._Attribute.from_address(config.attributes)
            assert ctypes.sizeof(attribute) == 72 and (attribute.id, attribute.value) == (6, 1)
        self.overlapped.append(config.num_attributes == 1)
        self.calls.append(("cuLaunchKernelEx", (function, *shape, config.stream, copied)))
        left = self.status.get("cuLaunchKernelEx", [])
        return left.pop(0) if left else 0

    def cuGetProcAddress(self, name: bytes, version: int, flags: int) -> tuple[int, int, int]:
        assert (name, version, flags) == (b"cuLaunchKernelEx", 11080, 0)
        return 0, ctypes.cast(self._launch, ctypes.c_void_p).value or 0, 0

    def CUresult(self, status: int) -> Any:
        return SimpleNamespace(name=f"CUDA_ERROR_{status}")

    def cuGetErrorString(self, code: Any) -> tuple[int, bytes]:
        return 0, b"no luck"

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append((name, args))
            left = self.status.get(name, [])
            return (left.pop(0) if left else 0, self.results.get(name))

        return call


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    found = FakeDriver()
    monkeypatch.setattr(cuda, "load_driver", lambda: found)
    monkeypatch.setattr(
        cuda, "cuda_facts", lambda index: CudaFacts("GPU", ARCHS["sm_90a"], 100, 2**25)
    )
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    stream = SimpleNamespace(query=lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    return found


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    path = tmp_path / "kernel.cubin"
    return Artifact(path, path, "warploom_kernel", None, 0.0, compiled=False, content=b"cubin")


SHAPE = LaunchShape(threads=128, shared_bytes=60_000, ctas_per_sm=3)


def params() -> ParamBlock:
    return ParamBlock(AttentionSpec(trace(Variant()), 64, 64, dtype("float16"), Ragged()))


def test_loading_asks_for_shared_memory_and_sizes_the_grid(
    driver: FakeDriver, artifact: Artifact
) -> None:
    kernel = cuda.CudaKernel("name", artifact, SHAPE, device=0)
    asked = dict(driver.calls)
    assert asked["cuModuleLoadData"] == (b"cubin",)
    assert asked["cuModuleGetFunction"][1] == b"warploom_kernel"
    assert asked["cuFuncSetAttribute"] == (77, 8, 60_000)
    assert asked["cuOccupancyMaxActiveBlocksPerMultiprocessor"] == (77, 128, 60_000)
    assert [name for name, _ in driver.calls].index("cuFuncLoad") < len(driver.calls)
    assert (kernel.ctas_per_sm, kernel.num_ctas) == (2, 200)


def test_groups_of_warps_exchange_the_registers_that_there_are(
    driver: FakeDriver, artifact: Artifact
) -> None:
    """They would wait for ever for others."""
    fewer = replace(artifact, resources=Resources(160, 0, 0, 384))
    shape = replace(SHAPE, registers=168)
    with pytest.raises(LaunchError, match=r"name .* has 160 registers, .* exchange those of 168"):
        cuda.CudaKernel("name", fewer, shape, device=0)
    assert driver.calls == []
    cuda.CudaKernel("name", fewer, SHAPE, device=0)
    cuda.CudaKernel("name", replace(fewer, resources=Resources(168, 0, 0, 384)), shape, device=0)


def test_a_launch_passes_grid_shared_memory_stream_and_parameters(
    driver: FakeDriver, artifact: Artifact
) -> None:
    kernel = cuda.CudaKernel("name", artifact, SHAPE, device=0)
    block = params()
    enqueue = kernel.bind(block)
    for q, stream in ((0x1234, 9), (2**48, 10)):
        block.set_pointers(q, 2, 3, 4, 5)
        enqueue(stream)
        name, args = driver.calls[-1]
        assert name == "cuLaunchKernelEx"
        assert args == (77, 200, 1, 1, 128, 1, 1, 60_000, stream, q.to_bytes(8, "little"))


@pytest.mark.parametrize(
    ("wanted", "version", "overlaps"),
    [(True, 13000, True), (True, 12020, False), (False, 13000, False)],
)
def test_launches_overlap_where_kernels_and_graphs_can(
    driver: FakeDriver, artifact: Artifact, wanted: bool, version: int, overlaps: bool
) -> None:
    driver.results["cuDriverGetVersion"] = version
    block = params()
    shape = replace(SHAPE, overlaps=wanted)
    cuda.CudaKernel("name", artifact, shape, device=0).bind(block)(0)
    assert driver.overlapped == [overlaps]


def test_a_thread_without_a_context_gets_the_kernels(
    driver: FakeDriver, artifact: Artifact
) -> None:
    driver.results["cuCtxGetCurrent"] = 5
    kernel = cuda.CudaKernel("name", artifact, SHAPE, device=0)
    driver.status["cuLaunchKernelEx"] = [INVALID_CONTEXT]
    block = params()
    kernel.bind(block)(0)
    assert [name for name, _ in driver.calls[-3:]] == [
        "cuLaunchKernelEx",
        "cuCtxSetCurrent",
        "cuLaunchKernelEx",
    ]
    assert driver.calls[-2][1] == (5,)


def test_refusals_name_the_kernel_and_the_call(driver: FakeDriver, artifact: Artifact) -> None:
    kernel = cuda.CudaKernel("name", artifact, SHAPE, device=0)
    driver.status["cuLaunchKernelEx"] = [700]
    block = params()
    with pytest.raises(LaunchError, match=r"launching name failed: CUDA_ERROR_700 \(no luck\)"):
        kernel.bind(block)(0)
    driver.status["cuModuleLoadData"] = [209]
    with pytest.raises(LaunchError, match="cuModuleLoadData: CUDA_ERROR_209"):
        cuda.CudaKernel("name", artifact, SHAPE, device=0)
    driver.results["cuOccupancyMaxActiveBlocksPerMultiprocessor"] = 0
    with pytest.raises(LaunchError, match="cannot hold one CTA"):
        cuda.CudaKernel("name", artifact, SHAPE, device=0)


def test_parameters_keep_their_place_and_address() -> None:
    block = params()
    address = block.address
    block.set_pointers(1, 2, 3, 4, 5)
    block.set_strides(tuple(range(100, 100 + len(STRIDES))))
    block.set("sm_scale", 0.5)
    block.set("group_size", 4)
    block.set("indices", 2**48)
    names = ("q", "k", "v", "o", "lse", "q_batch_stride", "lse_head_stride", "group_size")
    assert [block.get(name) for name in names] == [1, 2, 3, 4, 5, 100, 114, 4]
    assert (block.get("sm_scale"), block.get("indices")) == (0.5, 2**48)
    assert block.address == address
