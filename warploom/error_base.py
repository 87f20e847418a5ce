"""What all errors have in common; they are in `warploom.errors` and the files beside it.

A class holds a sentence with blanks; raising it fills them in. The sentence says what is wrong,
what was expected and what to do. Errors made inside a user's functor also carry the place, and
print the line with a caret under the column.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from warploom.dsl.types.ir import Source


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

    def __reduce__(self) -> tuple[object, ...]:  # picklable, so that worker processes can raise it
        return _rebuild, (type(self), self.source, self.facts)


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
