"""Messages between the ranks of a group, by sends and receives that name whom they are for.

All exchanges are point to point, since only those tell which rank was lost: a collective that
breaks says that something did. NCCL makes one kernel of the sends and receives that are posted
together, which is what it does for an all-to-all. Nothing here waits for the device.

gloo matches messages by a tag, made here of whose they are: a rank whose call is another one than
its peer's waits for it, and is told in the end. NCCL has no tags and matches by order alone.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from warploom.errors import ArgumentError
from warploom.serving.distributed.errors import OutOfStep, RankLost
from warploom.serving.distributed.timeouts import checked_timeout

_GRACE = timedelta(seconds=2)  # for exchanges with others, after one has failed
_TAG = struct.Struct("=qqq")  # whose, which of theirs, how many bytes
_numbers: WeakKeyDictionary[Any, Iterator[int]] = WeakKeyDictionary()  # of each group


class Peers:
    """The ranks of a process group, as one wrapper sees them.

    All ranks make those of a group in the same order.

    Args:
        group: a `torch.distributed` group with a backend for the tensors' device; None is the
            default one.
        timeout: seconds that a rank may take to answer; None leaves it to the group. On NCCL
            nobody waits on the host, and the group's own timeout holds alone.

    Attributes:
        rank, world: this process and how many there are.
        sent: bytes that this process has sent.

    Raises:
        ArgumentError: there is no process group, this process is not in it, or a bad timeout.
    """

    def __init__(self, group: Any = None, timeout: float | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            reason = "there is no process group; call torch.distributed.init_process_group(...)"
            raise ArgumentError(name="group", reason=reason)
        self._group: Any = dist.group.WORLD if group is None else group
        self.rank, self.world = dist.get_rank(self._group), dist.get_world_size(self._group)
        if self.rank < 0:
            raise ArgumentError(name="group", reason="this process is not in it")
        self.sent = 0
        self._failure: str | None = None
        self._timeout = None if timeout is None else timedelta(seconds=checked_timeout(timeout))
        # a group may have one backend for each type of devices
        parts = dist.get_backend_config(self._group).split(",")
        self._backends = dict(part.split(":") for part in parts)
        self._number = next(_numbers.setdefault(self._group, itertools.count()))
        self._exchanges = 0

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """All exchanges of a run; once the block fails on this rank, no other may begin.

        Raises:
            OutOfStep: an earlier one failed.
        """
        if self._failure is not None:
            raise OutOfStep(world=self.world, own=self.rank, reason=self._failure)
        try:
            yield
        except BaseException as error:
            self._failure = _shown(error)
            raise

    def start(
        self,
        sends: Mapping[int, Sequence[torch.Tensor]],
        receives: Mapping[int, Sequence[torch.Tensor]],
        what: str,
    ) -> Exchange:
        """Post sends and receives; tensors must stay as they are until `wait`.

        Both sides must name the same tensors in the same order; those without elements are not
        sent.

        Args:
            sends: contiguous tensors for each rank.
            receives: contiguous tensors to be filled from each rank.
            what: the exchange, for messages.
        """
        posted = [
            (operation, _as_bytes(tensor), rank)
            for operation, given in ((dist.isend, sends), (dist.irecv, receives))
            for rank, tensors in given.items()
            for tensor in tensors
            if tensor.numel()
        ]
        self.sent += sum(
            tensor.nbytes for operation, tensor, _ in posted if operation is dist.isend
        )
        self._exchanges += 1
        if posted and self._backends.get(posted[0][1].device.type) == "nccl":
            return Exchange(self, what, self._together(posted))
        works, failed = [], None
        for operation, tensor, rank in posted:
            try:
                to, tag = self._global(rank), self._tag(tensor)
                works.append((rank, operation(tensor, to, self._group, tag)))
            except RuntimeError as error:  # others still wait for what follows
                failed = failed or self.lost(rank, what, error)
        return Exchange(self, what, works, self._timeout, failed)

    def _together(self, posted: Sequence[tuple[Any, torch.Tensor, int]]) -> list[tuple[int, Any]]:
        """One launch for all, which a CUDA graph can hold."""
        if not posted:
            return []
        operations = [
            dist.P2POp(operation, tensor, self._global(rank), self._group)
            for operation, tensor, rank in posted
        ]
        # one work for all: should it fail on the host, the first rank stands for any of them
        return [(posted[0][2], work) for work in dist.batch_isend_irecv(operations)]

    def _tag(self, tensor: torch.Tensor) -> int:
        """Unlike that of other wrappers' messages, of other calls, and of those of other sizes."""
        of = _TAG.pack(self._number, self._exchanges, tensor.nbytes)
        return zlib.crc32(of) & 0x7FFFFFFF

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self._group, rank)

    def lost(self, rank: int, what: str, error: Exception) -> RankLost:
        """The error for a rank that is gone or silent."""
        return RankLost(rank=rank, world=self.world, own=self.rank, what=what, reason=_shown(error))


class Exchange:
    """Sends and receives under way.

    Args:
        peers: the ranks.
        what: the exchange, for messages.
        works: what torch waits with, and the rank that each is for.
        timeout: of each; None is the group's.
        failed: the error that posting met.
    """

    def __init__(
        self,
        peers: Peers,
        what: str,
        works: Sequence[tuple[int, Any]],
        timeout: timedelta | None = None,
        failed: RankLost | None = None,
    ) -> None:
        self._peers, self._what, self._works = peers, what, works
        self._timeout, self._failed = timeout, failed

    def wait(self) -> None:
        """Let what follows see the tensors: the host on gloo, the current stream on NCCL.

        Raises:
            RankLost: a rank ended, or did not answer in time.
        """
        failed, timeout = self._failed, self._timeout
        for rank, work in self._works:
            # Ranks that live still wait for what this one has to send: what is dropped now would
            # keep them until their timeout.
            limit = timeout if failed is None else _GRACE
            try:
                # NCCL's wait is the stream's, and one with a timeout would be the host's
                work.wait() if limit is None else work.wait(limit)
            except RuntimeError as error:
                failed = failed or self._peers.lost(rank, self._what, error)
        if failed is not None:
            raise failed


def _shown(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory; backends lack some types, and bytes they all have."""
    return tensor.view(-1).view(torch.uint8)
