"""Whether CUDA graphs still exist that read something of ours.

A captured graph reads a plan at every replay, and torch tells nobody when a graph is destroyed. The
driver does: a *user object* that a graph retains is destroyed with the graph and all that was
instantiated from it. The destructor runs on a thread of the driver, so it is no Python but
`sem_post` of the C library, and whoever wants to know looks at the semaphore.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from typing import Any, Generic, TypeVar

import torch

from warploom.runtime.devices.cuda import load_driver
from warploom.runtime.tensors.shortcuts import raw_stream

T = TypeVar("T")

_SEM_BYTES = 64  # sem_t has 32 on 64-bit Linux
_NO_SYNC, _MOVE = 1, 1  # CU_USER_OBJECT_NO_DESTRUCTOR_SYNC, CU_GRAPH_USER_OBJECT_MOVE


class GraphHold:
    """The graphs that hold one thing."""

    def __init__(self) -> None:
        self._semaphores: dict[int, int] = {}  # by the number of the capture
        self._forever = False

    def attach(self, device: torch.device) -> None:
        """Count the graph that the device's current stream is being captured into.

        If the driver refuses, the graph is taken to exist forever: what it reads must stay.
        """
        driver = load_driver()
        status, _, number, graph, *_ = driver.cuStreamGetCaptureInfo(raw_stream(device.index))
        if int(status) == 0 and int(number) in self._semaphores:
            return
        semaphore = _new_semaphore()
        if int(status) == 0 and _retain(driver, graph, semaphore):
            self._semaphores[int(number)] = semaphore
        else:
            self._forever = True

    def is_released(self) -> bool:
        """True once all of the graphs are gone."""
        libc = _libc()
        for number, semaphore in list(self._semaphores.items()):
            if libc.sem_trywait(semaphore) == 0:
                libc.free(semaphore)  # one that is never posted is never freed: a graph may outlive
                del self._semaphores[number]  # the interpreter
        return not (self._semaphores or self._forever)


class KeptForGraphs(Generic[T]):
    """Things that CUDA graphs read at each replay, kept until those graphs are gone.

    They are told apart by identity. Its user needs a lock if threads share it.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[T, GraphHold]] = []

    def keep(self, thing: T, device: torch.device) -> None:
        """Keep a thing for the graph that the device's current stream is being captured into."""
        hold = next((hold for kept, hold in self._kept if kept is thing), None)
        if hold is None:
            hold = GraphHold()
            self._kept.append((thing, hold))
        hold.attach(device)

    def drop_released(self) -> None:
        """Let go of what no graph reads any more."""
        self._kept = [kept for kept in self._kept if not kept[1].is_released()]

    def __iter__(self) -> Iterator[T]:
        return iter([thing for thing, _ in self._kept])

    def __contains__(self, thing: object) -> bool:
        return any(kept is thing for kept, _ in self._kept)


def _retain(driver: Any, graph: Any, semaphore: int) -> bool:
    """Let the graph post the semaphore when it is destroyed; False if the driver refuses."""
    post = ctypes.cast(_libc().sem_post, ctypes.c_void_p).value
    status, held = driver.cuUserObjectCreate(semaphore, driver.CUhostFn(post), 1, _NO_SYNC)
    if int(status) != 0:
        return False
    return int(driver.cuGraphRetainUserObject(graph, held, 1, _MOVE)[0]) == 0


def _new_semaphore() -> int:
    libc = _libc()
    semaphore: int = libc.calloc(1, _SEM_BYTES)
    libc.sem_init(semaphore, 0, 0)
    return semaphore


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.calloc.restype = ctypes.c_void_p
    libc.calloc.argtypes = ctypes.c_size_t, ctypes.c_size_t
    libc.sem_init.argtypes = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
    libc.sem_trywait.argtypes = libc.free.argtypes = (ctypes.c_void_p,)
    return libc
