"""Extra inputs of a variant, declared as class attributes: `Scalar` and `Tensor`.

`dsl/variants/outputs.py` has `Output`, a tensor that is written.

The value of a field depends on the variant's current reading: a symbol while it is traced, NumPy
values for the oracle, and the bound value without a reading.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeAlias

from warploom.calls import answered
from warploom.dsl.types import location
from warploom.dsl.types.dtypes import BY_NAME, DType, dtype, meant
from warploom.dsl.types.ir import Kind
from warploom.dsl.types.spec import HOOKS, Check, OutputField, ScalarField, TensorField
from warploom.dsl.values.symbols import Value
from warploom.errors import FieldMisuse, GlobalMutated, NoFunctor, WrongCall, WrongDeclaration
from warploom.hints import for_several

AXES = ("batch", "q_head", "kv_head", "q_pos", "kv_pos", "q_row", "q_idx", "lane")
# Axes whose dimension is exactly as long as a position's range. Only that position may index them,
# so that loads need no clamp.
EXACT_AXES = ("batch", "q_head", "kv_head", "lane")
# Attributes of an instance: the values bound to its fields, and its current reading.
VALUES = "_field_values"
READING = "_field_reading"
# Keywords of attention(), append(), plan() and run(), which also take fields as keywords.
_KEYWORDS = ("q", "k", "v", "kv", "variant", "sm_scale", "return_lse", "layout", "kv_lens",
             "lse_base", "backend", "out", "lse", "qo_indptr", "kv_indptr", "kv_indices",
             "last_page_len", "q_rows", "indptr", "workspace")  # fmt: skip
RESERVED = (*HOOKS, "softmax", "name", "fields", "inputs", "left_out", *_KEYWORDS)


class Reading(Protocol):
    """Determines the values that fields have while functors run."""

    hook: str

    def scalar(self, field: ScalarField) -> Value: ...

    def tensor(self, field: TensorField) -> Value: ...

    def output(self, field: OutputField) -> Value: ...


_P = ParamSpec("_P")


def explained(example: str) -> Callable[[Callable[_P, None]], Callable[_P, None]]:
    """A decorator of constructors: a call with wrong arguments raises WrongCall with `example`."""

    def answer(error: TypeError, *call: object) -> WrongCall:
        name, place = f"wl.{example.partition('(')[0]}", location.source(location.caller())
        hint = f" Write wl.{example}."
        return WrongCall(function=name, reason=str(error), hint=hint, source=place)

    return answered(answer)


class Scalar:
    """A number given at run time; a new value never recompiles.

    Args:
        dtype: "float32", "int32", ... or a torch or NumPy dtype. Kernels compute with 32-bit
            integers, whatever integer type is declared.
        default: value if none is given; without a default, `run` requires a value.
        check: called with each number that is set on the variant or given to `plan`, `run` or
            `attention`. It returns None, or a string with the reason to refuse the number, which
            becomes an ArgumentError. It may depend on the number only.

    Raises:
        FieldMisuse: unknown dtype, or a default of another kind.
        ArgumentError: the check refuses the default.
        WrongCall: missing or unknown arguments.
    """

    @explained("Scalar('float32')")
    def __init__(
        self,
        dtype: str | DType | Any,
        default: float | None = None,
        *,
        check: Check | None = None,
    ) -> None:
        self.dtype = _dtype("Scalar", dtype)
        if check is not None and not callable(check):
            reason = f"{check!r} is no function; give one that takes a number"
            raise wrong_declaration("Scalar", "check", reason)
        self.check = check
        self.name = "default"  # for messages, until __set_name__ is called
        self.default = None if default is None else self._accept(default, "Scalar")
        self.name = ""
        self.owner = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.owner = name, owner.__name__

    def spec(self) -> ScalarField:
        return ScalarField(self.name, self.dtype, self.default, check=self.check)

    def accept(self, value: object, owner: str = "") -> object:
        """The value in the form that is bound.

        Raises:
            FieldMisuse: the value does not fit; the error names the owner.
            ArgumentError: the check refuses it.
        """
        return self._accept(value, owner or self.owner)

    def _accept(self, value: object, owner: str) -> bool | int | float:
        number = as_scalar(self.dtype, value, self.name, owner)
        if self.check is not None:
            ScalarField(self.name, self.dtype, None, check=self.check).refuse(number)
        return number

    def read(self, reading: Reading) -> Value:
        return reading.scalar(self.spec())

    def __get__(self, instance: Any, owner: type | None = None) -> Value:
        return self if instance is None else _get(self, instance, self.default)

    def __set__(self, instance: Any, value: object) -> None:
        _set(self, instance, value)


class Tensor:
    """A tensor given at run time, read as `self.name[index, ...]` with one index per dimension.

    Indices outside a dimension are clamped into it, so that no functor reads out of bounds.

    Args:
        dtype: "float32", "int32", ... or a torch or NumPy dtype.
        axes: the axis of each dimension. "batch", "q_head", "kv_head" and "lane" are indexed by
            that position only. "q_pos" and "kv_pos" (positions in the key sequence), "q_row" (rows
            of all requests) and "q_idx" (rows of the longest request) are indexed by any int. None
            is a dimension of any size, indexed by any int.

    Raises:
        FieldMisuse: unknown dtype or axis.
        WrongCall: missing or unknown arguments.
    """

    _known_axes: tuple[str | None, ...] = (*AXES, None)

    if not TYPE_CHECKING:  # the arguments are those of __init__

        def __new__(cls, *args: object, **named: object) -> Tensor:
            if "default" in named:
                remedy = "Bind one in the variant's __init__, or give it to the call."
                reason = "a tensor has no default value"
                raise wrong_declaration(cls.__name__, "default", reason, remedy)
            return super().__new__(cls)

    @explained("Tensor('float32', ('q_head', 'kv_pos'))")
    def __init__(self, dtype: str | DType | Any, axes: tuple[str | None, ...]) -> None:
        self.dtype = _dtype(type(self).__name__, dtype)
        self.axes = _axes(type(self).__name__, axes, self._known_axes)
        self.name = ""
        self.owner = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.owner = name, owner.__name__

    def spec(self) -> TensorField:
        return TensorField(self.name, self.dtype, self.axes)

    def accept(self, value: object, owner: str = "") -> object:
        """The value to bind; raises FieldMisuse, which names the owner, if its rank is wrong."""
        shape = getattr(value, "shape", None)
        axes = ", ".join(str(axis or "any") for axis in self.axes)
        if shape is None:
            reason = f"got {type(value).__name__}; expected an array [{axes}]"
            remedy = f"Give a tensor, such as torch.tensor(..., dtype=torch.{self.dtype.name})."
            raise misuse(owner or self.owner, self.name, reason, remedy)
        if len(shape) != len(self.axes):
            reason = f"got shape {tuple(shape)}; expected {len(self.axes)} dimensions [{axes}]"
            remedy = "Add the missing ones with .unsqueeze() or .expand()."
            if len(shape) > len(self.axes):
                remedy = "Take one of it, or reshape it."
            raise misuse(owner or self.owner, self.name, reason, remedy)
        return value

    def read(self, reading: Reading) -> Value:
        return reading.tensor(self.spec())

    def __get__(self, instance: Any, owner: type | None = None) -> Value:
        return self if instance is None else _get(self, instance, None)

    def __set__(self, instance: Any, value: object) -> None:
        _set(self, instance, value)


Field: TypeAlias = Scalar | Tensor


def misuse(variant: str, name: str, reason: str, remedy: str = "") -> FieldMisuse:
    """The error for a wrong declaration or use of a field, placed at the user's line."""
    place = location.source(location.caller())
    return FieldMisuse(variant=variant, name=name, reason=reason, remedy=remedy, source=place)


def no_functor(variant: str, hook: str, value: object) -> NoFunctor:
    """The error for a hook that is no method, or a `softmax` that is no bool."""
    expected = f"a method, or no {hook} at all for the identity"
    if hook == "softmax":
        expected = "True or False"
    elif hook == "logits_mask":
        expected = "a method, or no logits_mask at all where all keys are visible"
    place = location.source(location.caller())
    return NoFunctor(hook=hook, variant=variant, got=repr(value), expected=expected, source=place)


def wrong_declaration(owner: str, name: str, reason: str, remedy: str = "") -> WrongDeclaration:
    """The error for an argument of a field's constructor, placed at the user's line."""
    place = location.source(location.caller())
    return WrongDeclaration(
        variant=f"wl.{owner}", name=name, reason=reason, remedy=remedy, source=place
    )


def as_scalar(
    kind: DType, value: object, name: str = "default", owner: str = "Scalar"
) -> bool | int | float:
    """The value as a Python number of the field's kind.

    Raises:
        FieldMisuse: not a number, a float for an int field, or an int that does not fit the type.
    """
    item, shape = getattr(value, "item", None), tuple(getattr(value, "shape", ()))
    if math.prod(shape) != 1:
        reason = f"got {type(value).__name__} of shape {shape}; expected a number"
        several = for_several(name, kind.name)
        raise misuse(owner, name, reason, f"{several[0].upper()}{several[1:]}.")
    number = value if item is None else item()
    if not isinstance(number, (bool, int, float)):
        reason = f"got {type(value).__name__}; expected a number"
        raise misuse(owner, name, reason, f"Give a Python number that fits {kind.name}.")
    if kind.kind is Kind.FLOAT:
        try:
            return float(number)
        except OverflowError:
            reason = f"got an int of {int(number).bit_length()} bits; expected {kind.name}"
            raise misuse(owner, name, reason, "Give a number that it holds.") from None
    if not math.isfinite(number) or number != int(number):
        raise misuse(owner, name, f"got {number}; expected {kind.name}", "Give a whole number.")
    least, greatest = (0, 1) if kind.kind is Kind.BOOL else kind.limits
    if not least <= number <= greatest:
        raise misuse(owner, name, f"got {number}; expected {least} to {greatest}, as {kind.name}")
    return bool(number) if kind.kind is Kind.BOOL else int(number)


def check_name(owner: str, name: str) -> None:
    """Refuse names that variants, or calls that take fields as keywords, use themselves."""
    if name in RESERVED or name.startswith("_"):
        raise misuse(owner, name, "the name is reserved; choose another")


def _dtype(owner: str, given: Any) -> DType:
    try:
        return dtype(given)
    except KeyError:
        reason = f"{given!r} is none of {', '.join(BY_NAME)}"
        near = meant(given, BY_NAME.values())
        remedy = f"Did you mean {near!r}?" if near else ""
        raise wrong_declaration(owner, "dtype", reason, remedy) from None


def _axes(
    owner: str, axes: tuple[str | None, ...], known: tuple[str | None, ...]
) -> tuple[str | None, ...]:
    if axes is None or isinstance(axes, str):
        raise wrong_declaration(owner, "axes", f"{axes!r} is no tuple; write ({axes!r},)")
    if not isinstance(axes, (tuple, list)):
        reason = f"{axes!r} is no tuple; give one axis for each dimension, such as ('q_head',)"
        raise wrong_declaration(owner, "axes", reason)
    for axis in axes:
        if axis not in known:
            expected = ", ".join(str(one) for one in known)
            raise wrong_declaration(owner, "axes", f"{axis!r} is none of {expected}")
    return tuple(axes)


def _get(field: Field, instance: Any, default: object) -> Value:
    _refuse_left_out(field, instance)
    reading: Reading | None = instance.__dict__.get(READING)
    if reading is not None:
        return field.read(reading)
    value = instance.__dict__.get(VALUES, {}).get(field.name, default)
    if value is None:
        raise misuse(type(instance).__name__, field.name, "it has no value outside a kernel yet")
    return value


def _set(field: Field, instance: Any, value: object) -> None:
    refuse_under_reading(instance, field.name)
    _refuse_left_out(field, instance)
    instance.__dict__.setdefault(VALUES, {})[field.name] = field.accept(
        value, type(instance).__name__
    )


def check_left_out(instance: Any, names: object) -> None:
    """Check that `left_out` is a tuple of names of fields that have no values.

    Raises:
        FieldMisuse: it is not.
    """
    cls = type(instance)
    if not isinstance(names, tuple):
        reason = f"is {names!r}; expected a tuple of names"
        raise misuse(cls.__name__, "left_out", reason, 'Write self.left_out = ("name",).')
    for name in names:
        field = getattr(cls, name, None) if isinstance(name, str) else None
        if not isinstance(field, (Scalar, Tensor)):
            raise misuse(cls.__name__, "left_out", f"names {name!r}, which is no Scalar or Tensor")
        if name in instance.__dict__.get(VALUES, {}):
            raise misuse(cls.__name__, "left_out", f"names {name!r}, which has a value already")


def _refuse_left_out(field: Field, instance: Any) -> None:
    if field.name in instance.left_out:
        remedy = "Make one with a value for it; its functors must not read it where it is left out."
        reason = "this instance was made without it"
        raise misuse(type(instance).__name__, field.name, reason, remedy)


def refuse_under_reading(instance: Any, name: str) -> None:
    """Raise GlobalMutated if a functor of the instance is running."""
    reading: Reading | None = instance.__dict__.get(READING)
    if reading is not None:
        raise GlobalMutated(
            hook=reading.hook,
            variant=type(instance).__name__,
            name=f"self.{name}",
            source=location.source(location.here()),
        )
