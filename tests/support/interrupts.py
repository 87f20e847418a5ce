"""An interrupt at any opcode, as a signal's handler raises it at some of them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def interrupted_at(step: int, *classes: type) -> Iterator[list[bool]]:
    """Raise KeyboardInterrupt within, before the step-th opcode of the classes' methods.

    What is yielded has a member once it came.
    """
    came: list[bool] = []
    left = [step]
    codes = {
        each.__code__
        for one in classes
        for f in vars(one).values()
        for each in (getattr(f, "fget", f), inspect.unwrap(getattr(f, "func", f)))
        if hasattr(each, "__code__")
    }

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code not in codes:
            return trace if event == "call" else None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left[0] -= 1
            if left[0] < 0 and not came:
                came.append(True)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield came
    except KeyboardInterrupt:
        if not came:
            raise
    finally:
        sys.settrace(before)
