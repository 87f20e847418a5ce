"""What simulations are given, looked at before it is used: it would fail far from the mistake."""

from __future__ import annotations

from warploom.simulation_errors import BadSetup


def check_kind(name: str, got: object, kind: type | tuple[str, ...], expected: str) -> None:
    """Raise BadSetup for another object, or for a class in place of its instance.

    Args:
        name: of the argument.
        got: its value.
        kind: its class, or names that it must have, where it only follows a protocol.
        expected: a sentence's end.
    """
    if isinstance(kind, type):
        fits = isinstance(got, kind)
    else:
        fits = not isinstance(got, type) and all(hasattr(got, one) for one in kind)
    if fits:
        return
    shown = f"the class {got.__name__}" if isinstance(got, type) else repr(got)
    made = f"; write {got.__name__}(...)" if isinstance(got, type) else ""
    raise BadSetup(name=name, got=shown, expected=expected + made)


def check_quantile(got: float) -> None:
    """Raise BadSetup for what is no number from 0 to 1."""
    try:
        fits = 0 <= got <= 1
    except TypeError:
        fits = False
    if not fits:
        expected = "a number from 0 to 1: 0.5 is the median, 0.99 what 1 % exceed"
        raise BadSetup(name="quantile", got=repr(got), expected=expected)
