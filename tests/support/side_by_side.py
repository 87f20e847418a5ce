"""Work in several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_threads(work: Callable[[T], object], arguments: Sequence[T]) -> None:
    """Call `work` with each argument, each in a thread of its own, and raise what any raises."""
    all_there = threading.Barrier(len(arguments))

    def one(argument: T) -> None:
        all_there.wait()
        work(argument)

    with ThreadPoolExecutor(len(arguments)) as pool:
        for done in [pool.submit(one, argument) for argument in arguments]:
            done.result()
