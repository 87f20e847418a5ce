"""A cubin on a device, launched through the driver: no torch on the way, no synchronisation."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from warploom.codegen.build import Artifact
from warploom.codegen.tiles import LaunchShape
from warploom.errors import LaunchError, NoCudaCompiler
from warploom.runtime.device import cuda_facts
from warploom.runtime.params import Block

_INVALID_CONTEXT = 201


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
            LaunchError: the driver refuses the cubin.
        """
        self.name = name
        self._driver = load_driver()
        self._device = device
        self._threads, self._shared = shape.threads, shape.shared_bytes
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()  # makes the device's context current
            self._context = self._call("cuCtxGetCurrent")
            self._module = self._call("cuModuleLoadData", Path(artifact.path).read_bytes())
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
        if self.ctas_per_sm == 0:
            raise LaunchError(kernel=name, reason="the device cannot hold one CTA of it")
        self.num_ctas = self.ctas_per_sm * cuda_facts(device).num_sms
        self._function = function
        self._launch = self._driver.cuLaunchKernel

    def launch(self, params: Block, stream: int) -> None:
        """Enqueue one launch; the driver copies the parameters.

        Args:
            params: the filled parameters.
            stream: the caller's stream handle.

        Raises:
            LaunchError: the driver refuses.
        """
        if torch.cuda.current_device() == self._device:
            status = self._enqueue(params.arguments, stream)
        else:
            with torch.cuda.device(self._device):
                status = self._enqueue(params.arguments, stream)
        if status == _INVALID_CONTEXT:  # a thread that has not touched CUDA yet
            self._call("cuCtxSetCurrent", self._context)
            status = self._enqueue(params.arguments, stream)
        if status != 0:
            raise LaunchError(kernel=self.name, reason=self._reason(int(status)))

    def _enqueue(self, arguments: int, stream: int) -> Any:
        return self._launch(
            self._function, self.num_ctas, 1, 1, self._threads, 1, 1, self._shared, stream,
            arguments, 0,
        )[0]  # fmt: skip

    def _call(self, name: str, *args: Any) -> Any:
        """Call the driver; its one result, or None."""
        status, *results = getattr(self._driver, name)(*args)
        if int(status) != 0:
            raise LaunchError(kernel=self.name, reason=f"{name}: {self._reason(int(status))}")
        return results[0] if results else None

    def _reason(self, status: int) -> str:
        code = self._driver.CUresult(status)
        text = self._driver.cuGetErrorString(code)[1]
        return f"{code.name} ({text.decode() if isinstance(text, bytes) else text})"


def load_driver() -> Any:
    try:
        driver = import_module("cuda.bindings.driver")  # only where there is a GPU
    except ImportError as error:
        extra = "cu12" if (torch.version.cuda or "").startswith("12") else "cu13"
        raise NoCudaCompiler(what="the package cuda-bindings", extra=extra) from error
    return driver
