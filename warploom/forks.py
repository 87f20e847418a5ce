"""Forked processes: threads do not come with them, and what those held must be let go.

A lock that another thread held at the fork would never be free again in the child. Ours guard
dictionaries, whose single changes are whole or not made at all, so they are simply freed there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from weakref import WeakSet


def lock() -> threading.Lock:
    """A lock that is free in a forked process, whoever held it."""
    made = threading.Lock()
    _locks.add(made)
    return made


def after(work: Callable[[], object]) -> None:
    """Have something done in each forked process, first of all."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=work)


def _free() -> None:
    for made in list(_locks):
        if made.locked():
            made.release()


_locks: WeakSet[threading.Lock] = WeakSet()
after(_free)
