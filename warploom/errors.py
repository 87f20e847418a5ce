"""The errors of attention, one class per mistake.

`warploom.error_base` has what they have in common. Errors of declaring a variant are defined in
`warploom.variant_errors`, and are found here, too; families of what not all users have (deployment,
engines, graphs, memory, prefetches, recommendation, simulation) are in `warploom.*_errors` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from warploom.error_base import WarploomError as WarploomError
from warploom.hints import for_several, hint
from warploom.variant_errors import BranchOnSymbol as BranchOnSymbol
from warploom.variant_errors import CannotTrace as CannotTrace
from warploom.variant_errors import ChainClash as ChainClash
from warploom.variant_errors import EndlessFunctor as EndlessFunctor
from warploom.variant_errors import FieldMisuse as FieldMisuse
from warploom.variant_errors import GlobalMutated as GlobalMutated
from warploom.variant_errors import ImpureFunctor as ImpureFunctor
from warploom.variant_errors import NoFunctor as NoFunctor
from warploom.variant_errors import NoNumber as NoNumber
from warploom.variant_errors import NoUnion as NoUnion
from warploom.variant_errors import PositionOfSelf as PositionOfSelf
from warploom.variant_errors import ScaleBehind as ScaleBehind
from warploom.variant_errors import UndeclaredField as UndeclaredField
from warploom.variant_errors import UnknownHook as UnknownHook
from warploom.variant_errors import UnscaledTransform as UnscaledTransform
from warploom.variant_errors import VariantError as VariantError
from warploom.variant_errors import WrongDeclaration as WrongDeclaration
from warploom.variant_errors import WrongResult as WrongResult
from warploom.variant_errors import WrongSignature as WrongSignature


class BadSetting(WarploomError):
    message = (
        "the environment variable {name} is {value!r}; expected {expected}. Correct it, or unset "
        "it for the default that `warploom env` shows."
    )


# --- what no kernel computes ----------------------------------------------------------------------


class UnsupportedSpec(WarploomError):
    message = "{what} is not supported: {reason}. {remedy}"


class BadHeadDim(UnsupportedSpec):
    message = (
        "{name}={value} is not supported: it must be a multiple of {multiple} up to 256. {remedy}"
    )

    def __init__(self, *, value: int, multiple: int, **facts: Any) -> None:
        remedy = "No kernel serves heads of more than 256."
        if value <= 256:
            remedy = (
                f"Pad with zeros: torch.nn.functional.pad(x, (0, {-value % multiple})). If q and k "
                f"are padded, the scale of q.k is still {value}**-0.5: give it; if v is, drop the "
                "output's lanes behind."
            )
        facts.setdefault("remedy", remedy)
        super().__init__(value=value, multiple=multiple, **facts)


# --- arguments of plan and run ------------------------------------------------------------------


class ArgumentError(WarploomError, ValueError):
    """Base of wrong arguments to `plan`, `run` and `attention`; a ValueError, too."""

    message = "{name}: {reason}."


class BadFormat(ArgumentError):
    message = "{what} describes no KV format; expected {expected}."


class WrongDType(ArgumentError):
    message = "{name} has dtype {got}; expected {expected}. {remedy}"

    def __init__(self, *, remedy: str = "Convert it.", **facts: Any) -> None:
        super().__init__(remedy=remedy, **facts)


class WrongDevice(ArgumentError):
    message = "{name} is on {got}; expected {expected}{whose}. {remedy}"

    def __init__(self, *, whose: str = "", remedy: str = "", **facts: Any) -> None:
        remedy = remedy or f"Move it with .to({str(facts['expected'])!r})."
        super().__init__(whose=whose, remedy=remedy, **facts)

    @classmethod
    def of_written(cls, **facts: Any) -> WrongDevice:
        """For what is written to: results in a copy would not reach the caller."""
        return cls(remedy="Allocate it there.", **facts)


class WrongShape(ArgumentError):
    message = "{name} has shape {got}; expected {expected}.{remedy}"

    def __init__(self, *, remedy: str = "", **facts: Any) -> None:
        super().__init__(remedy=remedy, **facts)

    @classmethod
    def of_scalar(cls, name: str, got: tuple[int, ...], dtype: str) -> WrongShape:
        """For several numbers where one is declared."""
        expected = f"one number, as a Scalar has; {for_several(name, dtype)}"
        return cls(name=name, got=got, expected=expected)


class WrongStride(ArgumentError):
    message = "{name} has strides {got}; {expected}. {remedy}"

    def __init__(self, *, remedy: str = "Call .contiguous() on it.", **facts: Any) -> None:
        super().__init__(remedy=remedy, **facts)


class BadIndptr(ArgumentError):
    message = (
        "{name} {reason}. It holds running totals of lengths: it must start at 0, never decrease, "
        "and have {expected}. np.cumsum([0, *lengths]) makes one."
    )


class UnequalRequests(BadIndptr):
    message = (
        "{name} has {entries} entries, of {requests} requests; {others}. All must be of the same "
        "number of requests: an index pointer has one entry more."
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
    message = "{variant} reads {name!r}, which was not given. Pass {way} ({expected})."

    def __init__(self, *, name: str, way: str | None = None, **facts: Any) -> None:
        super().__init__(name=name, way=way or f"{name}=...", **facts)

    @classmethod
    def among_inputs(cls, variant: str, name: str, expected: str) -> MissingInput:
        """For calls whose argument `inputs` has all values."""
        way = f"inputs={{{name!r}: ...}}"
        return cls(variant=variant, name=name, way=way, expected=expected)


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


class UnreadInput(UnknownInput):
    message = (
        "append does not read {name!r} of {variant}: only key_transform and value_transform are "
        "applied. Leave it out.{hint} It takes: {known}."
    )


class WrongCall(ArgumentError, TypeError):
    message = "{function}(): {reason}.{hint}"

    def __init__(self, *, hint: str = "", **facts: Any) -> None:
        super().__init__(hint=hint, **facts)


class NotPlanned(ArgumentError):
    message = "{what}. Call plan(...) with the lengths of this batch first."

    def __init__(self, *, what: str = "there is no plan yet", **facts: Any) -> None:
        super().__init__(what=what, **facts)


class NotReplayed(NotPlanned):
    message = (
        "memory holds no plan of the lengths that lie on the device now: plan() was captured by a "
        "CUDA graph, and each replay makes it anew. Replay the graph first."
    )


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
        "keep under cuda_graph=True. {remedy}, or make another wrapper."
    )


class BoundsExceeded(ArgumentError):
    message = (
        "{name} would be {got} with this batch, above the declared bound {bound}. Declare "
        "Bounds({name}={got}) or larger."
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


class NotTraced(ArgumentError):
    message = (
        "kernels of this wrapper tell no times: WARPLOOM_TRACE was not set when it was made. Set "
        "WARPLOOM_TRACE=1, make the wrapper anew, and plan and run it."
    )


class NotRun(ArgumentError):
    message = (
        "{missing} of {items} work items have not run since plan() was called. Call run(), or "
        "replay the CUDA graph that holds it, and ask again."
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
        "{what} was not found. Install the CUDA packages with: pip install '.[{extra}]' in a clone "
        "of warploom, pip install 'warploom[{extra}]' elsewhere."
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
