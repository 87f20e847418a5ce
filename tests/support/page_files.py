"""Files without a name that hold the pages of virtual caches, as a system sees them."""

from __future__ import annotations

import os
from pathlib import Path


def page_files(process: int) -> set[int]:
    """Inodes of files of pages that a process has open; none of them has a name."""
    files = [file for file in list(Path(f"/proc/{process}/fd").iterdir()) if file.is_symlink()]
    pages = [file for file in files if "warploom-pages" in os.readlink(file)]
    assert all(os.readlink(file).endswith("(deleted)") for file in pages)
    return {file.stat().st_ino for file in pages}


def holders(inode: int) -> set[int]:
    """Processes that have pages of this file mapped."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except OSError:  # it is gone, or another user's
            continue
        named = (line.split() for line in lines if "memfd:warploom-pages" in line)
        if any(int(parts[4]) == inode for parts in named):
            found.add(int(maps.parent.name))
    return found
