"""A disk that fails, or a process that dies, at the n-th file operation of the cache."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from warploom.codegen.cache import claims, folder, store, upkeep

MODULES = (folder, claims, store, upkeep)  # every file operation of the cache is in these
# what each can answer; the first two of a list are tried
ERRORS = {
    "open": (errno.EACCES, errno.ENOSPC),
    "write": (errno.ENOSPC, errno.EIO),
    "read": (errno.EIO,),
    "mkdir": (errno.ENOSPC, errno.EACCES),
    "rename": (errno.EACCES, errno.EIO),
    "fchmod": (errno.EPERM,),
    "unlink": (errno.EACCES, errno.EIO),
    "rmdir": (errno.EACCES, errno.EIO),
    "stat": (errno.EIO, errno.ENOENT),
    "fstat": (errno.EIO,),
    "lstat": (errno.EACCES,),
    "utime": (errno.EROFS,),
    "listdir": (errno.EIO, errno.EACCES),
}


Instead = Callable[[str, Callable[..., Any], Any], Any]


class FaultyOs:
    """The module `os`, whose n-th file operation does something else.

    Attributes:
        count: operations so far.
    """

    def __init__(self, n: int, instead: Instead, lasting: bool = False) -> None:
        """Count from 1.

        Args:
            n: which operation.
            instead: called with its name, the operation and its arguments.
            lasting: whether it is called for all that follow, too.
        """
        self.count = 0
        self._lasting = lasting
        self._n = n
        self._instead = instead

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in ERRORS:
            return real

        def operation(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self._n or (self._lasting and self.count > self._n):
                return self._instead(name, lambda *a: real(*(a or args), **kwargs), args)
            return real(*args, **kwargs)

        return operation


@contextmanager
def in_place(faulty: FaultyOs) -> Iterator[None]:
    """Inside, the cache uses it."""
    kept = [module.os for module in MODULES]
    for module in MODULES:
        vars(module)["os"] = faulty
    try:
        yield
    finally:
        for module, real in zip(MODULES, kept, strict=True):
            vars(module)["os"] = real


def failing(which: int) -> Instead:
    """The operation fails, by its first or second error; without a second one it is done."""

    def fail(name: str, operation: Callable[..., Any], args: Any) -> Any:
        errors = ERRORS[name]
        if which >= len(errors):
            return operation()
        raise OSError(errors[which], os.strerror(errors[which]))

    return fail


def full(name: str, operation: Callable[..., Any], args: Any) -> Any:
    """Nothing more can be made or written."""
    makes = name in ("write", "mkdir") or (name == "open" and args[1] & os.O_CREAT)
    if makes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return operation()


def dying(name: str, operation: Callable[..., Any], args: Any) -> Any:
    """The process is killed before the operation; of what it writes, half is written."""
    if name == "write":
        fd, data = args
        operation(fd, data[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)
