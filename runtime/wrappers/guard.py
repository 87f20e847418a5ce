"""A guard that allows one call at a time on a wrapper, from any thread.

A call holds the guard until its kernel is done or enqueued: native code runs without the
interpreter's lock, so nothing else keeps two calls apart. Runs wait for each other. No call waits
for a plan, and no plan for a call: if one thread plans while another one runs, it would be
undefined which batch the run gets.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, cast
from weakref import WeakMethod, WeakSet

from warploom.errors import InUse


class Guard:
    """A reentrant lock that detects reentrant calls and repairs leaked holds.

    A function that takes the guard keeps it in a local variable named `held`. A thread that would
    wait for itself is detected by searching its stack for such a variable, so an uncontended call
    costs one lock operation. If a signal handler raises between taking the guard and the `finally`
    that releases it, or within that `finally`, the hold leaks. The thread's next call finds that
    the thread holds the lock while no function on its stack does, and releases it; until then other
    threads wait, or get an InUse that names a call that has ended. (Functions on another stack of
    the thread, as with greenlets, are not found.)

    Attributes:
        is_mine: whether this thread already holds the guard, rightly or by a leak; then call
            `wait`.
        try_enter: `try_enter(False)` takes the guard if no other thread holds it. Otherwise it
            returns False; then call `wait`.
        leave: releases the guard.
    """

    def __init__(self, owner: str, torn: Callable[[], None]) -> None:
        """Begin unheld.

        Args:
            owner: name of the public class, for messages.
            torn: method that is called where state was left half changed: by a thread that does not
                exist in a forked process, or by a plan that leaked its hold.
        """
        self._lock = lock = cast(Any, threading.RLock())
        self._owner = owner
        self._torn = WeakMethod(torn)
        self._is_planning = False
        self._plans = 0  # begun so far
        self.is_mine: Callable[[], bool] = lock._is_owned  # threading.Condition uses it, too
        self.try_enter: Callable[[bool], bool] = lock.acquire
        self.leave: Callable[[], None] = lock.release
        _guards.add(self)

    def wait(self) -> None:
        """Take the guard when the run that holds it is done.

        Raises:
            InUse: a plan holds the guard, or took it meanwhile, or this thread holds it already.
        """
        plans = self._plans
        self._regain(sys._getframe(1).f_back)
        if not self._is_planning:
            self._lock.acquire()
            if plans == self._plans:
                return
            self._lock.release()
        raise InUse(call=self._owner, user="a plan() of another thread")

    def enter_plan(self) -> None:
        """Take the guard for a call that changes the batch.

        Raises:
            InUse: another call holds it.
        """
        self._regain(sys._getframe(1).f_back)
        if not self.try_enter(False):
            user = "another plan()" if self._is_planning else "a run of another thread"
            raise InUse(call=self._owner, user=user)
        self._is_planning = True
        self._plans += 1

    def leave_plan(self) -> None:
        """Release the guard that `enter_plan` took."""
        self._is_planning = False
        self.leave()

    def _regain(self, calling: FrameType | None) -> None:
        """Release the guard if this thread has leaked it.

        Args:
            calling: frame of the caller of the function that takes the guard.

        Raises:
            InUse: a function up the stack holds the guard.
        """
        if not self.is_mine():
            return
        if _holds(calling, self):
            raise InUse(call=self._owner, user="another call of this very thread")
        if self._is_planning:
            self._tear()
        while self.is_mine():
            self.leave()

    def _tear(self) -> None:
        self._is_planning = False
        torn = self._torn()
        if torn is not None:
            torn()

    def reset(self) -> None:
        """Release the guard in a forked child if a thread that only the parent has holds it."""
        if self.is_mine():  # the holding functions continue in the child, and release it
            return
        if self.try_enter(False):
            self.leave()
            return
        self._lock._at_fork_reinit()
        self._tear()


def _holds(frame: FrameType | None, guard: Guard) -> bool:
    """True if a function up the stack holds the guard."""
    while frame is not None:
        if "held" in frame.f_code.co_varnames and frame.f_locals.get("held") is guard:
            return True
        frame = frame.f_back
    return False


_guards: WeakSet[Guard] = WeakSet()


def _after_fork() -> None:
    for guard in list(_guards):
        guard.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
