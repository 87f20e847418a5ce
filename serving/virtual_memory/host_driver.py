"""Pages of the host: a file in memory, whose parts mmap puts at any address without a copy.

The twin of the CUDA driver's virtual memory management: addresses are reserved without access,
a page is a part of the file, and moving it to another address moves no byte. Touching an address
without a page ends the process, as it ends a CUDA context. The file has no name, so that nothing
is left of it when the process is killed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch

from warploom.memory_errors import NoVirtualMemory, PageFailed, ReservationFailed
from warploom.serving.virtual_memory.driver import Addresses
from warploom.tables import in_bytes

_NO_ACCESS, _READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_FIXED = 0x10  # MAP_FIXED, which Python does not name: exactly there, in place of what there is
_POPULATE = 0x8000  # MAP_POPULATE: touched for the first time here, and not by kernels
_PUNCH_HOLE = 0x1 | 0x2  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_FAILED = ctypes.c_void_p(-1).value


class HostDriver:
    """See `Driver`. Kernels of the CPU are done when their call returns, so there are no fences."""

    def __init__(self, page_bytes: int, num_pages: int) -> None:
        """Make a file in memory that has room for the pages, without memory yet.

        Raises:
            NoVirtualMemory: not on Linux.
            PageFailed: the file is refused.
        """
        self.page_bytes = page_bytes
        if not hasattr(os, "memfd_create"):
            remedy = "Use the CPU twin on Linux, or a CUDA device."
            reason = "this system has no files in memory (memfd_create)"
            raise NoVirtualMemory(device="the CPU", reason=reason, remedy=remedy)
        self._file = os.memfd_create("warploom-pages", os.MFD_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._file)
        try:
            os.truncate(self._file, page_bytes * num_pages)
        except OSError as error:
            raise self._failed("ftruncate", num_pages, error) from error

    def reserve(self, size: int) -> int:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            return _mmap(None, size, _NO_ACCESS, flags)
        except OSError as error:
            raise ReservationFailed(size=in_bytes(size), reason=error.strerror) from error

    def free(self, address: int, size: int) -> None:
        if _libc().munmap(address, size) != 0:
            raise self._failed("munmap", size // self.page_bytes, _last_error())

    def create(self, page: int) -> int:
        offset = page * self.page_bytes
        try:
            os.posix_fallocate(self._file, offset, self.page_bytes)
        except OSError as error:
            raise self._failed("fallocate", 1, error) from error
        return offset

    def destroy(self, handle: int) -> None:
        if _libc().fallocate(self._file, _PUNCH_HOLE, handle, self.page_bytes) != 0:
            raise self._failed("fallocate", 1, _last_error())

    def map(self, address: int, handles: Sequence[int]) -> None:
        flags = mmap.MAP_SHARED | _FIXED | _POPULATE
        try:
            for place, offset, pages in _runs(handles, self.page_bytes):
                at, size = address + place * self.page_bytes, pages * self.page_bytes
                _mmap(at, size, _READ_WRITE, flags, self._file, offset)
        except OSError as error:
            raise self._failed("mmap", len(handles), error) from error

    def unmap(self, address: int, pages: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED
        try:
            _mmap(address, pages * self.page_bytes, _NO_ACCESS, flags)
        except OSError as error:
            raise self._failed("mmap", pages, error) from error

    def fence(self) -> None:
        return None

    def wait(self, fence: Any) -> None:
        return None

    def follow(self, fence: Any) -> None:
        return None

    def drain(self) -> None:
        return None

    def refuse_under_capture(self, what: str) -> None:
        return None

    def enter_thread(self) -> None:
        return None

    def tensor(self, addresses: Addresses) -> torch.Tensor:
        memory: Any = (ctypes.c_char * addresses.size).from_address(addresses.first)
        memory.addresses = addresses  # torch keeps the array, and so the array keeps these
        return torch.frombuffer(memory, dtype=torch.uint8)

    def close(self) -> None:
        self._close()

    def _failed(self, call: str, pages: int, error: OSError) -> PageFailed:
        remedy = "Make a smaller pool, or larger pages (page_bytes); see vm.max_map_count, too."
        size = in_bytes(pages * self.page_bytes)
        return PageFailed(call=call, size=size, reason=error.strerror, remedy=remedy)


def _runs(offsets: Sequence[int], page_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Place, offset and pages of each run of neighbours in the file, each of which is one call."""
    first = 0
    for i in range(1, len(offsets) + 1):
        if i == len(offsets) or offsets[i] != offsets[i - 1] + page_bytes:
            yield first, offsets[first], i - first
            first = i


def _mmap(
    address: int | None, size: int, access: int, flags: int, file: int = -1, offset: int = 0
) -> int:
    """mmap(2), which Python's own module does not offer for an address; raises OSError."""
    found = _libc().mmap(address, size, access, flags, file, offset)
    if found is None or found == _FAILED:
        raise _last_error()
    return int(found)


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = pointer
    libc.mmap.argtypes = (pointer, size, number, number, number, ctypes.c_int64)
    libc.munmap.argtypes = (pointer, size)
    libc.fallocate.argtypes = (number, number, ctypes.c_int64, ctypes.c_int64)
    return libc
