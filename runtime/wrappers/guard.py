"""One call at a time on a wrapper, whichever thread it comes from.

A call has the turn until its kernel is done or enqueued: native code runs without the interpreter's
lock, so nothing else keeps two calls apart. Runs wait for each other. No call waits for a plan, and
no plan for a call: where one thread plans and another one runs, which batch it gets is luck.
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
    """Whose turn it is.

    A function that takes the turn keeps its guard in a local variable named `held`, by which a
    thread that would wait for itself is found; so a turn that nobody contests costs a lock alone.
    An exception of a signal's handler may come between taking the turn and the block that gives it
    back, or within that. The thread finds a turn that it has lost so, since none of its functions
    has it, and takes it anew with its next call; until then others wait, or are told of a run that
    has ended. (Functions of another stack of the thread, as greenlets have, are not found.)

    Attributes:
        is_mine: whether this thread has the turn already, for whatever reason: `wait`.
        try_enter: `try_enter(False)` takes the turn if no other thread has it, and else is False:
            `wait`.
        leave: gives it back.
    """

    def __init__(self, owner: str, torn: Callable[[], None]) -> None:
        """Begin with nobody inside.

        Args:
            owner: the class that users know, for messages.
            torn: method that is called where things were left half done: by another thread, which
                a forked process lacks, or by a plan that lost its turn.
        """
        self._lock = lock = cast(Any, threading.RLock())
        self._owner = owner
        self._torn = WeakMethod(torn)
        self._is_planning = False
        self._plans = 0  # begun so far
        self.is_mine: Callable[[], bool] = lock._is_owned  # as threading.Condition asks it
        self.try_enter: Callable[[bool], bool] = lock.acquire
        self.leave: Callable[[], None] = lock.release
        _guards.add(self)

    def wait(self) -> None:
        """Take the turn when the run that has it is done.

        Raises:
            InUse: a plan has the turn, or got it meanwhile, or this thread has it itself.
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
        """Take the turn for what changes the batch.

        Raises:
            InUse: another call has it.
        """
        self._regain(sys._getframe(1).f_back)
        if not self.try_enter(False):
            user = "another plan()" if self._is_planning else "a run of another thread"
            raise InUse(call=self._owner, user=user)
        self._is_planning = True
        self._plans += 1

    def leave_plan(self) -> None:
        """Give the turn back that `enter_plan` took."""
        self._is_planning = False
        self.leave()

    def _regain(self, calling: FrameType | None) -> None:
        """Give back a turn that this thread has lost.

        Args:
            calling: who calls the function that asks for the turn.

        Raises:
            InUse: a function up the stack has it.
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
        """Take the turn from a thread that a fork has left behind."""
        if self.is_mine():  # its functions go on here, and give it back
            return
        if self.try_enter(False):
            self.leave()
            return
        self._lock._at_fork_reinit()
        self._tear()


def _holds(frame: FrameType | None, guard: Guard) -> bool:
    """True if a function up the stack has the turn."""
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
