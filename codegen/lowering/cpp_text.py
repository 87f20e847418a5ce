"""Texts of C++ expressions that are put together right, whatever they are made of.

An expression knows how tightly its text binds, and is made of others by the functions below alone:
they know what each place of an operator asks for, so that nobody who prints an operator has
parentheses to remember. What C++ would read right without them, but people and compilers' warnings
stumble over (`a & b == c`), has them too.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Binding(IntEnum):
    """How tightly a text binds: the loosest operator outside of its parentheses."""

    CHOICE = 0  # a ? b : c
    TEST = 1  # comparisons, bits, shifts
    SUM = 2
    PRODUCT = 3
    SIGN = 4  # -a, !a
    ATOM = 5  # names, numbers, calls


@dataclass(frozen=True)
class Text:
    """C++ text of one expression."""

    text: str
    binding: Binding

    def within(self, least: Binding) -> str:
        """The text, in parentheses if it binds less tightly than its place asks."""
        return self.text if self.binding >= least else f"({self.text})"


# sign: (what it makes, what it asks of its left side, and of its right side)
_INFIX = {
    "+": (Binding.SUM, Binding.SUM, Binding.PRODUCT),
    "-": (Binding.SUM, Binding.SUM, Binding.PRODUCT),
    "*": (Binding.PRODUCT, Binding.PRODUCT, Binding.SIGN),
    "/": (Binding.PRODUCT, Binding.PRODUCT, Binding.SIGN),
    **dict.fromkeys(("<", "<=", ">", ">=", "==", "!="), (Binding.TEST, Binding.SUM, Binding.SUM)),
    **dict.fromkeys(("&", "|", "^", "<<", ">>"), (Binding.TEST, Binding.SIGN, Binding.SIGN)),
}


def atom(text: str) -> Text:
    """A name, a literal without a sign, or a call."""
    return Text(text, Binding.ATOM)


def number(text: str) -> Text:
    """A literal, which may have a sign."""
    return Text(text, Binding.SIGN if text.startswith("-") else Binding.ATOM)


def infix(left: Text, sign: str, right: Text) -> Text:
    binding, of_left, of_right = _INFIX[sign]
    return Text(f"{left.within(of_left)} {sign} {right.within(of_right)}", binding)


def prefix(sign: str, operand: Text) -> Text:
    """`-` or `!` before an atom: two signs in a row would be another operator."""
    return Text(sign + operand.within(Binding.ATOM), Binding.SIGN)


def choice(condition: Text, then: Text, otherwise: Text) -> Text:
    """No side is a bare choice: `?` takes everything to its left, up to another `?` or `:`."""
    left, right = then.within(Binding.SUM), otherwise.within(Binding.SUM)
    return Text(f"{condition.within(Binding.TEST)} ? {left} : {right}", Binding.CHOICE)


def call(function: str, *arguments: Text) -> Text:
    """A call, or a conversion by a type's name; an argument may be anything, commas separate it."""
    return atom(f"{function}({', '.join(argument.text for argument in arguments)})")
