"""Every error warploom raises, one class per mistake.

A class holds a sentence with blanks; raising it fills them in. The sentence says what is wrong,
what was expected and what to do. Errors made inside a user's functor also carry the place, and
print the line with a caret under the column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from warploom.hints import hint

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


class BadSetting(WarploomError):
    message = (
        "the environment variable {name} is {value!r}; expected {expected}. Correct it, or unset "
        "it for the default that `warploom env` shows."
    )


# --- declaring and tracing a variant ------------------------------------------------------------


class VariantError(WarploomError):
    """Base of mistakes in a variant's declaration or functors."""


class BranchOnSymbol(VariantError):
    message = (
        "a functor decided a Python `if`, `and`, `or`, `not`, `while`, `min`, `max` or a chained "
        "comparison on a value that is known only inside the kernel. Use warploom.where(condition, "
        "a, b), minimum and maximum, and &, |, ~ for logic, with comparisons in parentheses: "
        "(a <= b) & (c < d)."
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
        "arguments: a loop with a fixed count repeats steps, super() has the base class's hook."
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
        "number, or Tensor('float32', roles) for a tensor, and give its value with the others."
    )


class PositionOfSelf(UndeclaredField):
    message = (
        "{variant} has no {name!r}: it is a part of the position, at.{name}. A functor takes self "
        "first and the position last; is one written (at, self)?"
    )


class CannotTrace(VariantError):
    message = "{what} cannot be traced into a kernel. {remedy}"


class NoNumber(CannotTrace, AttributeError):
    """Also an AttributeError: libraries ask for `.item` to tell whether a value is a number."""


class GlobalMutated(VariantError):
    message = (
        "{hook} of {variant} changed {name!r} while it was traced. A functor must be a pure "
        "function of its arguments and the variant's fields."
    )


class ImpureFunctor(VariantError):
    message = "{hook} of {variant} gave two different graphs when traced twice. Remove {cause}."


class ChainClash(VariantError):
    message = "cannot chain {left} with {right}: {reason}."


class NoUnion(VariantError):
    message = (
        "{left} | {right}: variants have no union. Write one variant whose logits_mask joins both "
        "conditions with |; {left} & {right} shows what both show."
    )


class UnsupportedSpec(WarploomError):
    message = "{what} is not supported: {reason}. {remedy}"


class BadHeadDim(UnsupportedSpec):
    message = (
        "{name}={value} is not supported: it must be a multiple of {multiple} up to 256. {remedy}"
    )

    def __init__(self, *, value: int, **facts: Any) -> None:
        facts.setdefault(
            "remedy",
            "Pad the tensors." if value <= 256 else "No kernel serves heads of more than 256.",
        )
        super().__init__(value=value, **facts)


# --- arguments of plan and run ------------------------------------------------------------------


class ArgumentError(WarploomError):
    """Base of wrong arguments to `plan`, `run` and `attention`."""

    message = "{name}: {reason}."


class BadFormat(ArgumentError):
    message = "{what} describes no KV format; expected {expected}."


class WrongDType(ArgumentError):
    message = "{name} has dtype {got}; expected {expected}. {remedy}"

    def __init__(self, *, remedy: str = "Convert it.", **facts: Any) -> None:
        super().__init__(remedy=remedy, **facts)


class WrongDevice(ArgumentError):
    message = "{name} is on {got}; expected {expected}. Move it with .to({expected!r})."


class WrongShape(ArgumentError):
    message = "{name} has shape {got}; expected {expected}."

    @classmethod
    def of_scalar(cls, name: str, got: tuple[int, ...], dtype: str) -> WrongShape:
        """For several numbers where one is declared."""
        several = f"for several, declare the field as Tensor({dtype!r}, roles)"
        return cls(name=name, got=got, expected=f"one number, as a Scalar has; {several}")


class WrongStride(ArgumentError):
    message = "{name} has strides {got}; {expected}. Call .contiguous() on it."


class BadIndptr(ArgumentError):
    message = (
        "{name} {reason}. It holds running totals of lengths: it must start at 0, never decrease, "
        "and have {expected}. np.cumsum([0, *lengths]) makes one."
    )


class IndexOutOfRange(ArgumentError):
    message = "{name}[{index}] is {value}; {valid}."

    def __init__(
        self, *, last: Any, empty: str = "the cache has no pages", of: str = "", **facts: Any
    ) -> None:
        count = f", since the cache has {last + 1} {of}{'s' if last else ''}" if of else ""
        facts["valid"] = empty if last == -1 else f"valid are 0 to {last}{count}"
        super().__init__(last=last, empty=empty, of=of, **facts)


class BadLength(ArgumentError):
    message = "{name}[{index}] is {value}; expected {expected}."


class MissingInput(ArgumentError):
    message = "{variant} reads {name!r}, which was not given. Pass {name}=... ({expected})."


class UnknownInput(ArgumentError):
    message = "{variant} has no input {name!r}.{hint} It takes: {known}."

    @classmethod
    def of(
        cls, variant: str, name: str, known: Sequence[str], arguments: Sequence[str] = (),
        call: str = "",
    ) -> UnknownInput:  # fmt: skip
        """With the nearest of the variant's inputs and of the call's own arguments as a hint."""
        found = hint(name, known, arguments)
        takes = ", ".join(known) or "nothing, since it has no fields"
        if call and not known:
            takes += f"; {call} itself takes {', '.join(arguments)}"
        variant = "attention without a variant" if variant == "Variant" else variant
        return cls(variant=variant, name=name, hint=found, known=takes)


class WrongCall(ArgumentError, TypeError):
    message = "{function}(): {reason}.{hint}"

    def __init__(self, *, hint: str = "", **facts: Any) -> None:
        super().__init__(hint=hint, **facts)


class NotPlanned(ArgumentError):
    message = "{what}. Call plan(...) with the lengths of this batch first."

    def __init__(self, *, what: str = "there is no plan yet", **facts: Any) -> None:
        super().__init__(what=what, **facts)


class InUse(ArgumentError):
    message = (
        "this {call} is in use by {user}. It serves one batch at a time: give each thread one of "
        "its own, or let threads hold a lock of yours around plan() and the runs of its batch."
    )


class PlanMismatch(ArgumentError):
    message = "{name} is {got}, but plan() was called for {expected}. Call plan() again first."


class FrozenByGraph(PlanMismatch):
    message = (
        "{name} is {got}, but the first plan() was called with {expected}, which captured launches "
        "keep under cuda_graph=True. Write new values into the first tensor, or make another "
        "wrapper."
    )


class BoundsExceeded(ArgumentError):
    message = (
        "{name} is {got}, above the declared bound {bound}. Declare Bounds({name}={got}) or larger."
    )


class CapacityExceeded(BoundsExceeded):
    message = (
        "the plan has {got} {name}; the capacity holds {bound}. Compute capacity() with the same "
        "tile sizes, heads, CTAs and split size, from bounds that admit this batch."
    )


class WorkspaceTooSmall(ArgumentError):
    message = "the workspace has {got} bytes; {need} {needed}. {remedy}"

    def __init__(
        self,
        *,
        need: str = "these bounds need",
        remedy: str = "Allocate workspace_size(bounds) bytes.",
        **facts: Any,
    ) -> None:
        super().__init__(need=need, remedy=remedy, **facts)


class NoGradient(ArgumentError):
    message = (
        "warploom computes no gradients: it serves inference. Call it under torch.no_grad() or "
        "with detached tensors, and train with torch's own attention."
    )


class ForbiddenUnderCapture(ArgumentError):
    message = "{what} while a CUDA graph is being captured. {remedy}"


class BatchRefused(ArgumentError):
    message = (
        "the device refused to plan the batch: {reason}. Runs since then computed nothing and left "
        "their outputs as they were."
    )


class PlanInvalid(WarploomError):
    message = (
        "the plan breaks an invariant: {reason}. This is a bug of warploom; please report it with "
        "the batch: all lengths, and the page table if requests share pages."
    )


# --- compiling and caching ----------------------------------------------------------------------


class CompileError(WarploomError):
    message = "{compiler} could not compile {kernel} (source kept at {path}):\n{log}"


class BuildFailed(WarploomError):
    message = "{count} of {total} kernels could not be built:\n{log}"


class CompileForbidden(WarploomError):
    message = (
        "{kernel} is not in the cache, and compilation is forbidden ({cause}). Build it before: "
        "call plan() or warm_up() once outside, or build it ahead (warploom build)."
    )


class NoHostCompiler(WarploomError):
    message = (
        "no C++ compiler found (tried {tried}). Install one (Debian: apt install g++; macOS: "
        "xcode-select --install), set CXX, or use backend='reference' for the slow NumPy reading."
    )


class NoCudaCompiler(WarploomError):
    message = (
        "{what} was not found. Install the CUDA packages with: pip install 'warploom[{extra}]'."
    )


class MissingPackage(WarploomError):
    message = "{what} needs the package {package}. Install it with: pip install '{requirement}'."


class NoGpu(WarploomError):
    message = (
        "no usable CUDA device: {reason}. Use CPU tensors, or check the driver with nvidia-smi."
    )


class UnknownArchitecture(WarploomError):
    message = "no architecture {name!r}; known are {known}."


class LaunchError(WarploomError):
    message = "launching {kernel} failed: {reason}."


class CacheWarning(UserWarning):
    """A cache or an entry is damaged, unwritable or open to others; warploom goes on without it."""


class StaleVerification(UserWarning):
    """The recorded GPU test run is older than the templates or the code generator."""
