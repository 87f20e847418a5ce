"""Folders whose files will run: only those that nobody else can have written in.

A folder is opened once, checked, and everything in it is reached through its descriptor. So a name
cannot come to mean another place between the check and the use, whoever may rename the folders
above, and no symbolic link below it is followed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

FOLDER_MODE, FILE_MODE = 0o755, 0o644  # what images of containers need; never more, whatever umask
PRIVATE_MODE = 0o700
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_READ = (
    os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
)  # a pipe must not keep us waiting
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ROOT = 0
_CHUNK = 1 << 20


class Untrusted(OSError):
    """A folder or file that somebody else could have written; says why."""

    def __str__(self) -> str:
        return str(self.args[0])


class Folder:
    """An open folder.

    Attributes:
        path: its name for messages.
        fd: its descriptor, open as long as this object is.
    """

    def __init__(self, fd: int, path: Path) -> None:
        """Take over a descriptor."""
        self.fd = fd
        self.path = path

    @classmethod
    def at(cls, path: Path, make: bool = False) -> Folder:
        """The folder at a path.

        Args:
            path: where; links on the way are followed if they are ours or root's.
            make: whether it is made where it is missing, with the folders above.

        Raises:
            Untrusted: it belongs to somebody else, or others may write in it.
            OSError: it cannot be opened.
        """
        path = path.absolute()
        for place in (*reversed(path.parents), path):
            _check_link(place)
        if make:
            for place in (*reversed(path.parents), path):
                _make(place)
        return cls(os.open(path, _OPEN), path)._checked()

    @classmethod
    def open(cls, path: Path) -> Folder:
        """The folder at a path, whoever may write in it."""
        return cls(os.open(path, _OPEN), path)

    def folder(self, name: str, make: int = 0) -> Folder:
        """The folder of this name in this one.

        Args:
            name: of the folder; a link in its place is refused.
            make: its mode, if it is made where it is missing.

        Raises:
            Untrusted: it belongs to somebody else, or others may write in it.
            OSError: it cannot be opened.
        """
        made = False
        if make:
            with suppress(FileExistsError):
                os.mkdir(name, make, dir_fd=self.fd)
                made = True
        inner = Folder(self._open(name), self.path / name)._checked()
        if made:
            os.fchmod(inner.fd, make)
        return inner

    def read(self, name: str) -> bytes:
        """The content of a file.

        Raises:
            Untrusted: somebody else could have written it, or it is no file.
            OSError: it cannot be read.
        """
        fd = self._open(name, _READ)
        try:
            _check(os.fstat(fd), self.path / name, stat.S_ISREG)
            chunks = []
            while chunk := os.read(fd, _CHUNK):
                chunks.append(chunk)
            return b"".join(chunks)
        finally:
            os.close(fd)

    def write(self, name: str, content: bytes) -> None:
        """Make a file, which must not be there."""
        fd = os.open(name, _WRITE, FILE_MODE, dir_fd=self.fd)
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(fd, rest) :]
            os.fchmod(fd, FILE_MODE)
        finally:
            os.close(fd)

    def protect(self, name: str) -> None:
        """Give a file that another program made the mode of ours, if it is this user's."""
        fd = self._open(name, _READ)
        try:
            os.fchmod(fd, FILE_MODE)
        finally:
            os.close(fd)

    def check_file(self, name: str) -> os.stat_result:
        """What is known of a file; raises as `read` does."""
        found = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        _check(found, self.path / name, stat.S_ISREG)
        return found

    def move(self, name: str, target: Folder, new_name: str) -> None:
        """Rename a file, over one that is there, or a folder, over an empty one."""
        os.rename(name, new_name, src_dir_fd=self.fd, dst_dir_fd=target.fd)

    def touch(self, name: str) -> None:
        """Mark a file as used now."""
        os.utime(name, dir_fd=self.fd, follow_symlinks=False)

    def names(self) -> list[str]:
        return sorted(os.listdir(self.fd))

    def remove(self, name: str) -> None:
        """Remove a file, a link, or a folder with all that is in it; it may be gone.

        Raises:
            OSError: something stays.
        """
        try:
            os.unlink(name, dir_fd=self.fd)
        except FileNotFoundError:
            return
        except (IsADirectoryError, PermissionError):  # macOS gives the latter for folders
            try:
                with Folder(self._open(name), self.path / name) as inner:
                    for child in inner.names():
                        inner.remove(child)
                os.rmdir(name, dir_fd=self.fd)
            except FileNotFoundError:  # another process removes it, too
                return

    @property
    def place(self) -> str:
        """A path for others (compilers, the linker) that leads here whatever becomes of `path`.

        It does as long as the folder is open and this process lives. It is `path` where others may
        not look there: without /proc, or in a process that the system hides from its own user.
        """
        open_files = f"/proc/{os.getpid()}/fd"
        try:
            is_shown = os.stat(open_files).st_uid == os.geteuid()
        except OSError:
            is_shown = False
        return f"{open_files}/{self.fd}" if is_shown else str(self.path)

    def close(self) -> None:
        os.close(self.fd)

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self, name: str, flags: int = _OPEN | os.O_NOFOLLOW) -> int:
        try:
            return os.open(name, flags, dir_fd=self.fd)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise Untrusted(f"{self.path / name} is a link, or no folder") from error
            raise

    def _checked(self) -> Folder:
        try:
            _check(os.fstat(self.fd), self.path, stat.S_ISDIR)
        except BaseException:
            self.close()
            raise
        return self


def _check(found: os.stat_result, path: Path, is_kind: Callable[[int], bool]) -> None:
    if not is_kind(found.st_mode):
        raise Untrusted(f"{path} is no plain file")
    if found.st_uid not in (_ROOT, os.geteuid()):
        raise Untrusted(f"{path} belongs to user {found.st_uid}, and not to root or to you")
    if found.st_mode & _OTHERS_MAY_WRITE:
        raise Untrusted(f"others may write to {path} (if that is a mistake: chmod go-w)")


def _check_link(path: Path) -> None:
    """Links that others may turn elsewhere are not followed."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if stat.S_ISLNK(found.st_mode) and found.st_uid not in (_ROOT, os.geteuid()):
        raise Untrusted(f"{path} is a link of user {found.st_uid}")


def _make(path: Path) -> None:
    if not path.is_dir():
        with suppress(FileExistsError):
            os.mkdir(path, FOLDER_MODE)
