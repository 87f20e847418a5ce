"""A cubin on a device, launched through the driver: no torch on the way, no synchronisation."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import torch

from warploom.codegen.build import Artifact
from warploom.codegen.launch_shape import LaunchShape
from warploom.errors import LaunchError, NoCudaCompiler
from warploom.runtime.devices.device import cuda_facts
from warploom.runtime.devices.params import Block

_INVALID_CONTEXT = 201
_SINCE = 11080  # the CUDA version that brought cuLaunchKernelEx
_OVERLAP_SINCE = 12030  # ... and launches that overlap inside graphs


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of the driver API."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of the driver API; of its union, one number."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: the kernel may begin while the one before
# it ends, and waits for it itself (templates/include/warploom/device/overlap.cuh).
_OVERLAP = _Attribute(id=6, value=1)

# (config, function, array of argument addresses, extra) -> status; other threads run meanwhile
_LaunchKernelEx = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
# (device address, address of host or device, bytes, stream) -> status
_MemcpyAsync = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
)


def _check_registers(name: str, artifact: Artifact, shape: LaunchShape) -> None:
    used = artifact.resources
    if used is not None and shape.registers not in (0, used.registers):
        reason = f"a thread has {used.registers} registers, and its groups of warps would exchange "
        raise LaunchError(kernel=name, reason=f"{reason}those of {shape.registers}")


class CudaKernel:
    """One kernel, loaded on one device.

    Attributes:
        name: for messages.
        num_ctas: size of the persistent grid: what the device holds at once.
        ctas_per_sm: how many CTAs an SM holds, as the driver computes it.
    """

    def __init__(self, name: str, artifact: Artifact, shape: LaunchShape, device: int) -> None:
        """Load the cubin.

        Raises:
            NoCudaCompiler: the package cuda-bindings is missing.
            LaunchError: the driver refuses the cubin, or it has other registers than groups of its
                warps exchange.
        """
        self.name = name
        _check_registers(name, artifact, shape)
        self._driver = load_driver()
        self._device = device
        self._threads, self._shared = shape.threads, shape.shared_bytes
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()  # makes the device's context current
            self._context = self._call("cuCtxGetCurrent")
            self._module = self._call("cuModuleLoadData", artifact.content)
            function = self._call("cuModuleGetFunction", self._module, artifact.entry.encode())
            self._call("cuFuncLoad", function)  # now, and not at a launch under capture
            attributes = self._driver.CUfunction_attribute
            self._call(
                "cuFuncSetAttribute",
                function,
                attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                self._shared,
            )
            self.ctas_per_sm = int(
                self._call(
                    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
                    function,
                    self._threads,
                    self._shared,
                )
            )
        self._overlaps = shape.overlaps and self._call("cuDriverGetVersion") >= _OVERLAP_SINCE
        if self.ctas_per_sm == 0:
            raise LaunchError(kernel=name, reason="the device cannot hold one CTA of it")
        self.num_ctas = self.ctas_per_sm * cuda_facts(device).num_sms
        self._function = int(function)
        # called by its address, since cuda.bindings wraps each argument anew at each launch
        address = self._call("cuGetProcAddress", b"cuLaunchKernelEx", _SINCE, 0)[0]
        self._launch = _LaunchKernelEx(address)

    def launch(self, params: Block, stream: int) -> None:
        """Enqueue one launch on a stream, given its handle, whichever device is the current one.

        Raises:
            LaunchError: the driver refuses.
        """
        with torch.cuda.device(self._device):
            self.bind(params)(stream)

    def bind(self, params: Block) -> Callable[[int], None]:
        """A function that enqueues one launch on a stream, given its handle.

        The driver copies the parameters at each launch. `params` must outlive the function, and
        the kernel's device must be the current one when it is called. It raises LaunchError if the
        driver refuses.
        """
        attributes = ctypes.addressof(_OVERLAP) if self._overlaps else None
        config = _LaunchConfig(
            (self.num_ctas, 1, 1),
            (self._threads, 1, 1),
            self._shared,
            None,
            attributes,
            int(self._overlaps),
        )
        launch = self._launch
        # plain numbers, which ctypes converts faster than its own pointers
        arguments = ctypes.addressof(config), self._function, params.arguments, None

        def enqueue(stream: int) -> None:
            config.stream = stream
            status = launch(*arguments)
            if status == _INVALID_CONTEXT:  # a thread that has not touched CUDA yet
                self._call("cuCtxSetCurrent", self._context)
                status = launch(*arguments)
            if status != 0:
                raise LaunchError(kernel=self.name, reason=self._reason(status))

        return enqueue

    def _call(self, name: str, *args: Any) -> Any:
        """Call the driver; its one result, all of several, or None."""
        status, *results = getattr(self._driver, name)(*args)
        if int(status) != 0:
            raise LaunchError(kernel=self.name, reason=f"{name}: {self._reason(int(status))}")
        return (results[0] if len(results) == 1 else results) if results else None

    def _reason(self, status: int) -> str:
        code = self._driver.CUresult(status)
        text = self._driver.cuGetErrorString(code)[1]
        return f"{code.name} ({text.decode() if isinstance(text, bytes) else text})"


@contextmanager
def beside_captures() -> Iterator[None]:
    """Let this thread ask events and allocate while another one captures a graph.

    In the mode that threads begin with, that would break the capture.
    """
    driver, before = load_driver(), None
    exchange, mode = driver.cuThreadExchangeStreamCaptureMode, driver.CUstreamCaptureMode
    try:
        status, before = exchange(mode.CU_STREAM_CAPTURE_MODE_RELAXED)
        if int(status) != 0:
            before, reason = None, f"the driver does not change how it captures ({status})"
            raise LaunchError(kernel="plan", reason=reason)
        yield
    finally:
        if before is not None:
            exchange(before)


@cache
def copy_to_device() -> Callable[[int, int, int, int], int]:
    """The driver's copy: device address, host address, bytes, stream. Returns 0, or what is wrong.

    Host memory is pinned, or the copy waits for its stream. The device must be the current one.
    """
    return _MemcpyAsync(_entry("cuMemcpyHtoDAsync"))


@cache
def copy_on_device() -> Callable[[int, int, int, int], int]:
    """The same from another address of the device."""
    return _MemcpyAsync(_entry("cuMemcpyDtoDAsync"))


@cache
def driver_entries(*names: str) -> tuple[int, ...]:
    """Addresses of functions of the driver, for compiled code that calls them."""
    return tuple(map(_entry, names))


def _entry(name: str) -> int:
    """Address of a function of the driver."""
    status, address, *_ = load_driver().cuGetProcAddress(name.encode(), _SINCE, 0)
    if int(status) != 0:
        raise LaunchError(kernel=name, reason=f"the driver has none ({status})")
    return int(address)


def load_driver() -> Any:
    try:
        driver = import_module("cuda.bindings.driver")  # only where there is a GPU
    except ImportError as error:
        extra = "cu12" if (torch.version.cuda or "").startswith("12") else "cu13"
        raise NoCudaCompiler(what="the package cuda-bindings", extra=extra) from error
    return driver
