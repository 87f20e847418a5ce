"""Processes that form a group and run what a test asks of them, one call after another.

Importing torch takes seconds, so a fork server imports it once for all processes, and a test module
starts each group once.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_ROOM = "warploom.serving.distributed"
_LONGEST = 120.0  # seconds of a call


class Ranks:
    """A group of `world` processes.

    Args:
        world: processes.
        folder: where they meet.
        timeout: seconds, of the group.
        backend: of the group; with "nccl" each process has a GPU of its own.
    """

    def __init__(
        self, world: int, folder: Path, timeout: float = 60.0, backend: str = "gloo"
    ) -> None:
        self.world = world
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([f"{_ROOM}.decode", f"{_ROOM}.prefill"])
        meeting = str(folder / f"meeting-{world}-{os.getpid()}-{id(self)}")
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(world):
            here, there = context.Pipe()
            given = (there, meeting, rank, world, timeout, backend)
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self.processes.append(process)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Have all ranks call a function of an importable module."""
        for pipe in self._pipes:
            pipe.send((function, args))

    def result(self, rank: int, seconds: float = _LONGEST) -> Any:
        """What the call of a rank returned; an exception is returned, not raised."""
        if not self._pipes[rank].poll(seconds):
            raise TimeoutError(f"rank {rank} of {self.world} is still at it after {seconds} s")
        return self._pipes[rank].recv()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function on all ranks; returns what each returned, by rank.

        Raises:
            AssertionError: a rank failed, with its traceback.
        """
        self.start(function, *args)
        results = [self.result(rank) for rank in range(self.world)]
        for result in results:
            if isinstance(result, BaseException):
                raise AssertionError("".join(traceback.format_exception(result))) from result
        return results

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(2)
            process.kill()


def _serve(
    pipe: Connection, meeting: str, rank: int, world: int, timeout: float, backend: str
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, f"file://{meeting}", timedelta(seconds=timeout), world, rank)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:  # the test is over
            os._exit(0)
        try:
            result = function(*args)
        except BaseException as error:
            result = error
        with suppress(OSError):  # the test has ended without it
            pipe.send(result)
