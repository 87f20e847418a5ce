"""Pages of memory that the virtual caches of several models share."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

import torch

from warploom.errors import ArgumentError
from warploom.memory_errors import BudgetTooLarge, BudgetTooSmall
from warploom.runtime.declaring.declare import checked_count, checked_flag
from warploom.runtime.devices.device import resolve_device
from warploom.serving.virtual_memory.driver import Driver
from warploom.serving.virtual_memory.ledger import Ledger
from warploom.serving.virtual_memory.mapper import Mapper, PoolStats

if TYPE_CHECKING:
    from rich.table import Table

_PAGE_OF_GPUS = 2 << 20


class MemoryPool:
    """Physical pages that `VirtualCache`s map where they need them (xLLM, section 4.3).

    Each model has what it uses: a page that one has released serves another at once, without a
    copy. What a model is guaranteed is kept for it; beyond that, first come, first served.
    Any thread may call, and calls wait for each other. A forked process cannot use its parent's
    pool. When the process ends, however it ends, the system takes all memory back.

    Attributes:
        device: where the pages are.
        page_bytes: size of a page: what is mapped, and given from model to model, at a time.
        num_pages: of the pool.
    """

    def __init__(
        self,
        num_bytes: int,
        device: torch.device | str | int | None = None,
        *,
        page_bytes: int | None = None,
        preallocate: bool = True,
    ) -> None:
        """Take the memory.

        Args:
            num_bytes: of memory, rounded down to whole pages.
            device: the current CUDA device by default, or the CPU.
            page_bytes: of a page; a multiple of the device's granularity, which is the default
                (2 MiB on NVIDIA GPUs). On the CPU a multiple of the system's pages, and 2 MiB by
                default, as on a GPU.
            preallocate: take all memory now, so that no request waits for it or fails; else each
                page when it is first needed.

        Raises:
            BudgetTooSmall: less than a page.
            BudgetTooLarge: more than the memory of the device, or of the machine, in all.
            ArgumentError: arguments of a wrong type, or pages of a size that there is not.
            NoGpu, NoCudaCompiler: the device or its driver's package is missing.
            NoVirtualMemory: the device cannot.
            PageFailed: there is not so much memory.
        """
        checked_count("num_bytes", num_bytes)
        if page_bytes is not None:
            checked_count("page_bytes", page_bytes)
        preallocate = checked_flag("preallocate", preallocate)
        self.device = resolve_device(device)
        total = _memory_of(self.device)
        if num_bytes > total:
            device = "the machine" if self.device.type == "cpu" else self.device
            raise BudgetTooLarge(got=num_bytes, device=device, total=total)
        driver = _driver(self.device, page_bytes, num_bytes)
        self.page_bytes = driver.page_bytes
        self.num_pages = num_bytes // self.page_bytes
        if self.num_pages == 0:
            driver.close()
            raise _below_a_page(num_bytes, self.page_bytes)
        self._mapper = Mapper(driver, Ledger(self.num_pages, self.page_bytes), preallocate)
        # caches hold their pool, so that nobody is left who might hold the lock
        weakref.finalize(self, self._mapper.close_or_leave).atexit = False

    def stats(self) -> PoolStats:
        """Pages in each state, of each model, and what the driver has done."""
        return self._mapper.stats()

    def trim(self) -> int:
        """Unmap all pages that no request holds, of all models; returns their bytes.

        They serve whoever comes next anyway; this moves the time that unmapping takes to here.
        It waits for kernels that may still read them.
        """
        return sum(map(self._mapper.trim, self._mapper.models())) * self.page_bytes

    def close(self) -> None:
        """Give the memory back; caches that are open lose theirs. Closing again does nothing.

        Raises:
            PageFailed: the driver refuses to unmap or to give back a page. The pool stays open,
                some of its caches are closed; close it again.
            ForbiddenUnderCapture: a CUDA graph is being captured.
        """
        self._mapper.close()

    def __enter__(self) -> MemoryPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        stats = self.stats()
        return (
            f"MemoryPool({stats.pages} pages of {stats.page_bytes} bytes on {self.device}: "
            f"{stats.free} free, {stats.allocated} allocated, {stats.mapped} mapped, "
            f"{stats.reusable} reusable)"
        )

    def __rich__(self) -> Table:
        """A table of the models, for `rich.print`."""
        from warploom.tables import in_bytes, new_table

        stats = self.stats()
        table = new_table("model", "requests", "used", "reusable", "guaranteed", "limit")
        table.title = f"{stats.pages} pages of {in_bytes(stats.page_bytes)} on {self.device}"
        for model in stats.models:
            pages = model.used, model.reusable, model.guaranteed, model.limit
            sizes = (in_bytes(count * stats.page_bytes) for count in pages)
            table.add_row(model.name, str(model.requests), *sizes)
        table.add_row("free", "", in_bytes(stats.free * stats.page_bytes), "", "", "")
        return table


def _memory_of(device: torch.device) -> int:
    """Bytes in all: a CPU hands out what it does not have, and then ends processes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _driver(device: torch.device, page_bytes: int | None, num_bytes: int) -> Driver:
    if device.type == "cuda":
        from warploom.serving.virtual_memory.cuda_driver import CudaDriver

        return CudaDriver(device, page_bytes)
    import mmap

    from warploom.serving.virtual_memory.host_driver import HostDriver

    page_bytes = _PAGE_OF_GPUS if page_bytes is None else page_bytes
    if page_bytes % mmap.PAGESIZE:
        reason = f"is {page_bytes}; expected a multiple of {mmap.PAGESIZE}"
        raise ArgumentError(name="page_bytes", reason=reason)
    if num_bytes < page_bytes:
        raise _below_a_page(num_bytes, page_bytes)
    return HostDriver(page_bytes, num_bytes // page_bytes)


def _below_a_page(num_bytes: int, page_bytes: int) -> BudgetTooSmall:
    return BudgetTooSmall(name="num_bytes", got=num_bytes, needed=page_bytes, what="one page")
