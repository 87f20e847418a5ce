"""Errors of declaring and tracing a variant; users find them in `warploom.errors`."""

from __future__ import annotations

from typing import Any

from warploom.error_base import WarploomError


class VariantError(WarploomError):
    """Base of mistakes in a variant's declaration or functors."""


class BranchOnSymbol(VariantError):
    message = (
        "a Python `if`, `and`, `or`, `not`, `while`, `min`, `max` or a chained comparison was "
        "decided on a value that is known only inside the kernel. Use where(condition, a, b), "
        "minimum and maximum, of warploom or torch, and &, |, ~ for logic, with comparisons in "
        "parentheses: (a <= b) & (c < d)."
    )


class WrongResult(VariantError):
    message = "{hook} of {variant} returned {got}; expected {expected}."


class UnknownHook(VariantError):
    message = (
        "{variant} defines {name!r}, which is no hook of a variant. Did you mean {suggestion!r}?"
    )


class WrongSignature(VariantError):
    message = "{hook} of {variant} takes {got}; expected {expected}."


class NoFunctor(WrongSignature):
    message = "{hook} of {variant} is {got}; expected {expected}."


class EndlessFunctor(VariantError):
    message = (
        "{hook} of {variant} calls itself without end, or far too deep. Compute with its "
        "arguments: a loop with a fixed count repeats steps, and in a class super() has the hook "
        "of its base."
    )


class FieldMisuse(VariantError):
    message = "field {name!r} of {variant}: {reason}.{remedy}"

    def __init__(self, *, remedy: str = "", **facts: Any) -> None:
        super().__init__(remedy=remedy and f" {remedy.lstrip()}", **facts)


class WrongDeclaration(FieldMisuse):
    """An argument of `Scalar`, `Tensor` or `Output`, before the field has a name."""

    message = "argument {name!r} of {variant}: {reason}.{remedy}"


class UndeclaredField(VariantError, AttributeError):
    message = (
        "{variant} has no {name!r}. Declare it in the class: {name} = Scalar('float32') for a "
        "number, or Tensor('float32', axes) for a tensor, and give its value with the others."
    )

    def _is_gathered(self) -> bool:
        return bool(self.facts.get("is_asked_for"))  # and not looked for by hasattr()


class PositionOfSelf(UndeclaredField):
    message = (
        "{variant} has no {name!r}: it is a part of the position, at.{name}. A functor takes self "
        "first and the position last; is one written (at, self)?"
    )


class CannotTrace(VariantError):
    message = "{what} cannot be traced into a kernel. {remedy}"


class NoNumber(CannotTrace, AttributeError):
    """Also an AttributeError: libraries ask for `.item` to tell whether a value is a number."""

    def _is_gathered(self) -> bool:
        return bool(self.facts.get("is_asked_for"))  # and not looked for by hasattr()


class GlobalMutated(VariantError):
    message = (
        "{hook} of {variant} changed {name!r} while it was traced. It must change nothing, and "
        "compute with its arguments, and with fields of the variant or captured tensors."
    )


class ImpureFunctor(VariantError):
    message = "{hook} of {variant} gave two different graphs when traced twice. Remove {cause}."


class UnscaledTransform(VariantError):
    message = (
        "{scale} multiplies logits or the output, behind {hook}, which gets vectors without their "
        "scale and is no multiple of them. Multiply in the transform: write a variant whose {hook} "
        "first multiplies its vector with the scale, and leave {scale} out."
    )


class ScaleBehind(UnscaledTransform):
    message = (
        "{scale} stands behind {before}, whose {hook} gets what is not scaled yet and is no "
        "multiple of it. Put {scale} before {before}: {scale}(...) & {before}(...)."
    )


class ChainClash(VariantError):
    message = "cannot chain {left} with {right}: {reason}."


class NoUnion(VariantError):
    message = (
        "{left} | {right}: variants have no union. Write one variant whose logits_mask joins both "
        "conditions with |; {left} & {right} shows what both show."
    )
