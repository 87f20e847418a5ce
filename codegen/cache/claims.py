"""Folders in which one process builds, and how to tell that it died.

    <folder>/.draft-<name>.lock    locked by the system as long as its maker lives
    <folder>/.draft-<name>/        what it builds

The lock is there before the draft and goes after it. So a draft whose lock can be taken belongs to
nobody, however its process ended, and whoever builds next in that folder removes it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import time
from contextlib import suppress
from types import TracebackType

from warploom import forks
from warploom.codegen.cache.folder import FOLDER_MODE, Folder, Untrusted

DRAFT = ".draft-"
_LOCK = ".lock"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # of some network file systems
_OLD_SECONDS = 3600.0  # ... where age must do: no build takes that long
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_MODE = 0o600
_TRIES = 20  # more than sweepers meet one builder

_held: set[int] = set()  # descriptors of this process's locks


class Aside:
    """A new folder that is removed when it is closed, if it was not renamed, or by others later.

    Attributes:
        name: in the folder it was made in.
        folder: open.
    """

    def __init__(self, parent: Folder, name: str, mode: int, lock: int) -> None:
        """Make it, with a lock that is held."""
        self.name = name
        self._parent = parent
        self._lock = lock
        _held.add(lock)
        try:
            parent.remove(name)  # of one that died
            self.folder = parent.folder(name, make=mode)
        except BaseException:
            self._leave()
            raise

    def close(self) -> None:
        self.folder.close()
        self._leave()

    def _leave(self) -> None:
        _remove(self._parent, self.name)
        _held.discard(self._lock)
        os.close(self._lock)

    def __enter__(self) -> Aside:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def aside(
    parent: Folder, name: str = "", *, prefix: str = DRAFT, mode: int = FOLDER_MODE
) -> Aside | None:
    """A folder to build in, beside what will be there when it is done.

    Args:
        parent: where; it must stay open.
        name: of what only one process shall build; by default nobody else builds under this name.
        prefix: what drafts there begin with.
        mode: of the new folder.

    Returns:
        None if another process builds under this name.

    Raises:
        Untrusted: the file system gives what is made there to another user.
        OSError: it cannot be made.
    """
    for _ in range(_TRIES):
        draft = prefix + (name or secrets.token_hex(8))
        lock = _claim(parent, draft)
        if lock is not None:
            return Aside(parent, draft, mode, lock)
        if name:
            return None
        # Somebody sweeps the lock that we made and had not taken yet: under another name.
    raise OSError(errno.EAGAIN, "no lock that is made here can be taken", str(parent.path))


def sweep(parent: Folder, prefix: str = DRAFT) -> None:
    """Remove what processes of this user left behind that died while they built."""
    names = [name for name in parent.names() if name.startswith(prefix)]
    for name in dict.fromkeys(name.removesuffix(_LOCK) for name in names):
        with suppress(OSError):  # somebody else's, or a disk that fails: another time
            lock = _claim(parent, name)
            if lock is not None:
                if _is_mine(parent, name):
                    _remove(parent, name)
                os.close(lock)


def discard(parent: Folder, name: str) -> None:
    """Remove a folder, if it can be at once: then no part of it is ever left under its name.

    Raises:
        OSError: it stays, or a part of it does.
    """
    draft = DRAFT + secrets.token_hex(8)
    try:
        parent.move(name, parent, draft)
    except FileNotFoundError:  # another process removes it, too
        return
    except OSError:  # overlays, as of containers, rename no folder of a layer below
        draft = name
    parent.remove(draft)


def _is_mine(parent: Folder, name: str) -> bool:
    try:
        return os.stat(name, dir_fd=parent.fd, follow_symlinks=False).st_uid == os.geteuid()
    except FileNotFoundError:
        return True


def _remove(parent: Folder, name: str) -> None:
    with suppress(OSError):  # what stays here is swept by the next who builds
        parent.remove(name)
        parent.remove(name + _LOCK)


def _claim(parent: Folder, name: str) -> int | None:
    """A descriptor that holds a draft's lock; None if its process lives, or is another user's."""
    name += _LOCK
    while True:
        fd, is_new = _open(parent, name)
        try:
            mine = os.fstat(fd)
            if is_new and mine.st_uid != os.geteuid():
                os.unlink(name, dir_fd=parent.fd)  # or nobody ever would: sweepers leave it alone
                raise Untrusted(
                    f"what this process makes in {parent.path} belongs to user {mine.st_uid}, as "
                    "on network mounts that map owners (root squash)"
                )
            held = mine.st_uid == os.geteuid() and _locked(fd, is_new)
            if held and _is_at(parent, name, mine):
                return fd
        except OSError:
            os.close(fd)
            raise
        os.close(fd)
        if not held and not is_new:
            return None
        # Its holder had removed it when we came, or somebody sweeps what we just made: once more.


def _is_at(parent: Folder, name: str, file: os.stat_result) -> bool:
    try:
        there = os.stat(name, dir_fd=parent.fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, file)


def _open(parent: Folder, name: str) -> tuple[int, bool]:
    """A descriptor, and whether the file was made for it."""
    while True:
        with suppress(FileExistsError):
            return os.open(name, _OPEN | os.O_CREAT | os.O_EXCL, _MODE, dir_fd=parent.fd), True
        with suppress(FileNotFoundError):
            return os.open(name, _OPEN, dir_fd=parent.fd), False


def _locked(fd: int, is_new: bool) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return is_new or time.time() - os.fstat(fd).st_mtime > _OLD_SECONDS
    return True


def _leave_to_parent() -> None:
    """A forked process builds nothing yet: the locks are those of the process it came from."""
    for fd in _held:
        with suppress(OSError):
            os.close(fd)
    _held.clear()


forks.after(_leave_to_parent)
