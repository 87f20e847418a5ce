"""`Variant`, the base class of users' variants, and conversions to a variant."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn
from weakref import WeakValueDictionary

import warploom.dsl.values.foreign  # noqa: F401  (torch and NumPy find functions by name)
from warploom.dsl.types import location
from warploom.dsl.types.spec import HOOKS
from warploom.dsl.values.position import Position
from warploom.dsl.values.stand_ins import uncompiled
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants import fields as fields_module
from warploom.dsl.variants.fields import READING, RESERVED, VALUES, Field, Reading, Scalar, Tensor
from warploom.errors import (
    ArgumentError,
    NoUnion,
    PositionOfSelf,
    UndeclaredField,
    UnknownInput,
    WrongCall,
)

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing since 3.11

    from warploom.dsl.variants.chain import ChainedVariant

# `id` -> variant or class of variants; torch.compile can pass an object only by its `id`.
ALIVE: WeakValueDictionary[int, Variant | type[Variant]] = WeakValueDictionary()


class Variant:
    """An attention variant: functors for the hooks of the kernel, and the extra inputs they read.

    Subclasses override the hooks they need; the others are the identity. A functor is a pure
    function of its arguments and of `self`'s fields. It runs on symbols to become a kernel, and on
    NumPy float64 arrays to be its own oracle. `a & b` chains two variants.

    Attributes:
        softmax: True normalises with softmax; False sums `logits * value` over the visible keys.
        scaled_behind: hooks that get vectors without this variant's scale, which it applies later.
            A chain is refused if such a hook's result is not proportional to its vector.
        scaled_first: hooks in which it applies that scale. It is refused behind links where such a
            hook's result is not proportional to its input.
        left_out: declared fields that this instance lacks, set in `__init__`: its functors do not
            read them, and giving values for them is an error.
    """

    softmax: bool = True
    scaled_behind: ClassVar[tuple[str, ...]] = ()
    scaled_first: ClassVar[tuple[str, ...]] = ()
    left_out: tuple[str, ...] = ()

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        made = super().__new__(cls)
        made.__dict__[VALUES] = {}
        _remember(made)
        if args and cls.__init__ is Variant.__init__:
            raise _by_name(cls.__name__, args, list(made.fields()))
        return made

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        _check_body(cls)
        ALIVE[id(cls)] = cls

    def __init__(self, **values: object) -> None:
        """Bind values to fields.

        Raises:
            UnknownInput: a name is no field.
            FieldMisuse: a value does not fit its field.
        """
        known = self.fields()
        for name, value in values.items():
            if name not in known:
                raise self._no_field(name, list(known))
            setattr(self, name, value)

    def _no_field(self, name: str, known: list[str]) -> UnknownInput:
        constant = getattr(type(self), name, None)
        if name in RESERVED or type(constant) not in (int, float):
            return UnknownInput.of(self.name, name, known)
        kind = "int32" if isinstance(constant, int) else "float32"
        declare = f"declare {name} = Scalar({kind!r}, default={constant})"
        hint = f" {name} is a constant of the class; to give it, {declare}."
        return UnknownInput(
            variant=self.name, name=name, hint=hint, known=", ".join(known) or "nothing"
        )

    if not TYPE_CHECKING:  # type checkers must still report unknown attributes

        def __getattr__(self, name: str) -> object:
            if READING in self.__dict__ and not name.startswith("_"):  # a functor runs
                place = location.here()
                error = PositionOfSelf if name in Position.__annotations__ else UndeclaredField
                raise error(
                    variant=type(self).__name__,
                    name=name,
                    is_asked_for=place is not None and location.reads_attribute(place),
                    source=location.source(place),
                )
            return self.__getattribute__(name)

    # --- hooks

    def query_transform(self, q: Value, at: Position) -> Value:
        """The query vector to multiply with keys."""
        return q

    def key_transform(self, k: Value, at: Position) -> Value:
        """The key vector to multiply with queries."""
        return k

    def value_transform(self, v: Value, at: Position) -> Value:
        """The value vector to sum."""
        return v

    def logits_transform(self, logits: Value, at: Position) -> Value:
        """The logit of a query and a key; `logits` is already scaled by sm_scale."""
        return logits

    def logits_mask(self, at: Position) -> Value:
        """True where the query sees the key."""
        return True

    def output_transform(self, o: Value, at: Position) -> Value:
        """The output vector, after normalisation and merging."""
        return o

    # --- called by the engine

    def check_lengths(self, known: Mapping[str, Any], q_lens: Any, kv_lens: Any) -> None:
        """Refuse tensors that do not fit a batch, if axes do not define the sizes they must have.

        `plan` and `attention` call it; on the CPU `run` calls it for tensors given to `run`. By
        default it accepts everything.

        Args:
            known: NumPy values of the mask's tensors that were given on the host.
            q_lens, kv_lens: int32 [requests].

        Raises:
            ArgumentError: a variant that overrides this refuses a tensor.
        """

    @property
    def checks_lengths(self) -> bool:
        """Whether the variant overrides `check_lengths`, so that lengths must be read for it."""
        return type(self).check_lengths is not Variant.check_lengths

    @property
    def name(self) -> str:
        """Name in messages and in rendered source."""
        return type(self).__name__

    def fields(self) -> dict[str, Field]:
        """Declared extra inputs by name, base classes first."""
        found: dict[str, Field] = {}
        for cls in reversed(type(self).__mro__):
            found.update(
                (name, value)
                for name, value in vars(cls).items()
                if isinstance(value, (Scalar, Tensor)) and name not in self.left_out
            )
        return found

    def inputs(self) -> dict[str, Any]:
        """Values bound at construction, by field name."""
        return dict(self.__dict__.get(VALUES, {}))

    def traceable_inputs(self) -> dict[str, Any]:
        """`inputs` without values that need a conversion, so that torch.compile can trace it."""
        return self.inputs()

    def shares(self, name: str, other: Variant) -> bool:
        """True if chained variants share the field of this name.

        False by default: equal names count as a mistake.
        """
        return False

    def functor(self, hook: str) -> Any:
        """The function that the user wrote for a hook."""
        return getattr(self, hook)

    def functors(self) -> list[tuple[str, Any]]:
        """(hook as users call it, function) of all functors that a trace runs."""
        return [(self.shown_hook(hook), self.functor(hook)) for hook in HOOKS]

    def shown_hook(self, hook: str) -> str:
        """What users call a hook."""
        return hook

    def decides_softmax(self) -> bool:
        """True if this variant sets `softmax` itself, so that a chain must respect it."""
        return "softmax" in vars(self) or any(
            "softmax" in vars(cls) for cls in type(self).__mro__ if cls not in (Variant, object)
        )

    @property
    def obstacle_to_appending(self) -> str | None:
        """Why an append cannot apply the key and value transforms, or None."""
        return None

    def under(self, reading: Reading) -> Self:
        """An immutable copy whose fields are read through `reading`."""
        made = copy.copy(self)
        made.__dict__[READING] = reading
        return made

    def __setattr__(self, name: str, value: object) -> None:
        if name == "left_out":
            fields_module.check_left_out(self, value)
        if name not in self.fields():  # a field does this check itself
            fields_module.refuse_under_reading(self, name)
        super().__setattr__(name, value)

    def __and__(self, other: Any) -> ChainedVariant:
        from warploom.dsl.variants.chain import chain  # here, since `chain` imports this module

        return chain(self, other)

    def __rand__(self, other: Any) -> ChainedVariant:
        from warploom.dsl.variants.chain import chain  # `other` is a class, or wrong

        return chain(other, self)

    def __bool__(self) -> NoReturn:
        reason = "a variant is neither true nor false; chain them: `a & b`, not `a and b`"
        raise ArgumentError(name=self.name, reason=f"{reason}, and ask for None with `is None`")

    def __add__(self, other: Any) -> NoReturn:
        reason = "variants are no numbers; chain them with &, as in `a & b`"
        raise ArgumentError(name=self.name, reason=reason)

    __radd__ = __add__

    def __or__(self, other: Any) -> NoReturn:
        right = other.name if isinstance(other, Variant) else getattr(other, "__name__", other)
        raise NoUnion(left=self.name, right=right)

    __ror__ = __or__

    def __invert__(self) -> NoReturn:
        reason = "a variant is no mask; write ~ in its logits_mask"
        raise ArgumentError(name=self.name, reason=reason)

    def __repr__(self) -> str:
        shown = (f"{name}={_short(value)}" for name, value in self.inputs().items())
        return f"{self.name}({', '.join(shown)})"


ALIVE[id(Variant)] = Variant


# A variant that a compiled graph makes would lack its values.
@uncompiled("a variant is made outside of the compiled function: make it before, once")
def _remember(made: Variant) -> None:
    ALIVE[id(made)] = made


def _check_body(cls: type[Variant]) -> None:
    """Check the declarations in a class body, before it is traced.

    Raises:
        NoFunctor: a hook is no method, or `softmax` is no bool.
        FieldMisuse: the name of a field is reserved.
    """
    for name, value in vars(cls).items():
        if isinstance(value, (Scalar, Tensor)):
            fields_module.check_name(cls.__name__, name)
        is_right = isinstance(value, bool) if name == "softmax" else callable(value)
        if name in (*HOOKS, "softmax") and not is_right and not hasattr(value, "__get__"):
            raise fields_module.no_functor(cls.__name__, name, value)


def _short(value: object) -> str:
    shape = getattr(value, "shape", None)
    return f"<{type(value).__name__} {tuple(shape)}>" if shape is not None else repr(value)


def _by_name(cls: str, given: tuple[object, ...], known: list[str]) -> WrongCall:
    shown = ", ".join(map(_short, given))
    if not known:
        return WrongCall(function=cls, reason=f"got {shown}; it has no fields and takes nothing")
    hint = f" Write {cls}({known[0]}=...)."
    return WrongCall(function=cls, reason=f"got {shown}; its fields are given by name", hint=hint)


def as_variant(variant: Any) -> Variant:
    """A variant from an argument of `as_link`, or from None for plain attention."""
    return Variant() if variant is None else as_link(variant)


def as_link(variant: Any) -> Variant:
    """A variant from an instance or its class, as operand of `&`.

    Raises:
        ArgumentError: the argument is something else, or a class whose constructor needs arguments;
            for callables the message recommends `warploom.flex`.
    """
    if isinstance(variant, Variant):
        return variant
    if isinstance(variant, type) and issubclass(variant, Variant):
        return _instance(variant)
    shown, hint = repr(variant), ""
    if callable(variant):
        hint = "; wrap FlexAttention's callables in warploom.flex(...)"
    elif isinstance(variant, (list, tuple)):
        hint = "; chain several with &, as in a & b"
    elif isinstance(variant, str):
        hint = "; give an instance, such as variant=warploom.Causal()"
    elif hasattr(variant, "mask_mod"):  # a BlockMask, whose repr is long
        shown, hint = f"a {type(variant).__name__}", "; wrap it: warploom.flex(mask_mod=...)"
    raise ArgumentError(name="variant", reason=f"{shown} is no Variant{hint}")


def _instance(cls: type[Variant]) -> Variant:
    try:
        signature(cls).bind()
    except TypeError as error:
        names = ", ".join(signature(cls).parameters)
        reason = f"is a class, and {error}; give an instance: {cls.__name__}({names})"
        raise ArgumentError(name="variant", reason=reason) from error
    return cls()
