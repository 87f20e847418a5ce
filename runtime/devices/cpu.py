"""A compiled host kernel: loaded with ctypes, run on the caller's and further threads."""

from __future__ import annotations

import ctypes
from typing import Final

import torch

from warploom import env
from warploom.codegen.build import Artifact
from warploom.errors import LaunchError
from warploom.runtime.devices.library import load_library
from warploom.runtime.devices.params import Block

# Threads help CTAs of others when their own has no more items, so that they end together though
# cores may be slow or busy. With more CTAs than threads items of long requests are smaller; each
# CTA can cost two partial results, so not many more.
CTAS_PER_THREAD = 4
_REASONS: Final = {1: "there is no memory for the threads' tiles"}


def default_threads() -> int:
    """Threads of a run: what `torch.set_num_threads` says, unless WARPLOOM_THREADS is set."""
    return env.cpu_threads(torch.get_num_threads())


def default_num_ctas() -> int:
    """Size of the grid to plan for on this machine."""
    return CTAS_PER_THREAD * default_threads()


class CpuKernel:
    """One kernel, loaded into this process.

    Attributes:
        name: for messages.
    """

    def __init__(self, name: str, artifact: Artifact) -> None:
        """Load the shared library.

        Raises:
            LaunchError: the system refuses to load it, or it lacks the entry.
        """
        self.name = name
        try:
            library = load_library(artifact)
            self._function = library[artifact.entry]
        except (OSError, AttributeError) as error:
            raise LaunchError(kernel=name, reason=str(error)) from error
        self._function.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
        self._function.restype = ctypes.c_int

    def launch(self, params: Block, num_ctas: int, num_threads: int | None = None) -> None:
        """Run all items of the plan and return when they are done; the GIL is released meanwhile.

        Args:
            params: the filled parameters.
            num_ctas: CTAs of the plan.
            num_threads: threads, the caller's included; default `default_threads()`.

        Raises:
            LaunchError: out of memory.
        """
        threads = default_threads() if num_threads is None else num_threads
        status = self._function(params.address, num_ctas, threads)
        if status != 0:
            raise LaunchError(kernel=self.name, reason=_REASONS.get(status, f"status {status}"))
