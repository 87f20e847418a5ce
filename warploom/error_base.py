"""What all errors have in common; they are in `warploom.errors` and the files beside it.

A class holds a sentence with blanks; raising it fills them in. The sentence says what is wrong,
what was expected and what to do. Errors made inside a user's functor also carry the place, and
print the line with a caret under the column.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from warploom.dsl.types.ir import Source


# Errors made since `gathered` began, the first one first; None outside of it.
_MADE: ContextVar[list[WarploomError] | None] = ContextVar("made", default=None)


class WarploomError(Exception):
    """Base of all; `except warploom.errors.WarploomError` catches every one.

    Attributes:
        facts: the values that fill the message's blanks.
        source: place in the user's functor, if there is one.
    """

    message: ClassVar[str] = "{reason}"

    def __init__(self, *, source: Source | None = None, **facts: object) -> None:
        self.facts = facts
        self.source = source
        super().__init__(self.message.format(**facts) + _place(source))
        made = _MADE.get()
        if made is not None and self._is_gathered():
            made.append(self)

    def _is_gathered(self) -> bool:
        """False for AttributeErrors, which hasattr() and getattr() catch by design."""
        return not isinstance(self, AttributeError)

    def __reduce__(self) -> tuple[object, ...]:  # picklable, so that worker processes can raise it
        return _rebuild, (type(self), self.source, self.facts)


@contextmanager
def gathered() -> Iterator[list[WarploomError]]:
    """Gather the errors that are made meanwhile, whoever catches them.

    A functor that catches a refusal would go on, and become a kernel of something else.
    """
    made: list[WarploomError] = []
    token = _MADE.set(made)
    try:
        yield made
    except BaseException:
        made.clear()  # frames of the traceback hold it: an error that is in it would hold itself
        raise
    finally:
        _MADE.reset(token)


def take_back(source: Source | None) -> None:
    """Forget the gathered errors of a place, where a library has caught them and found its way."""
    made = _MADE.get()
    if made and source is not None:
        made[:] = [error for error in made if error.source != source]


def _rebuild(
    cls: type[WarploomError], source: Source | None, facts: dict[str, object]
) -> WarploomError:
    return cls(source=source, **facts)


def _place(source: Source | None) -> str:
    if source is None:
        return ""
    text = source.text.rstrip("\n")
    stripped = text.lstrip()
    lines = [f"\n  File {source.file!r}, line {source.line}, in {source.function}"]
    if stripped:  # text given to exec or `python -c` is not kept
        lines.append(f"    {stripped}")
    if source.column and stripped:
        lines.append("    " + " " * (source.column - 1 - (len(text) - len(stripped))) + "^")
    return "\n".join(lines)


def kind_of(value: object) -> str:
    """The type of a value with its article, as messages say it: "an int", "a list"."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
