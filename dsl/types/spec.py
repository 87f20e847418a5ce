"""The frozen result of declaring attention: a traced variant, types, sizes and the KV format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from warploom.dsl.types.dtypes import NARROW_DTYPES, DType
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.ir import Node, Source
from warploom.errors import ArgumentError

VECTOR_HOOKS = ("query_transform", "key_transform", "value_transform", "output_transform")
SCALAR_HOOKS = ("logits_transform", "logits_mask")
HOOKS = (*VECTOR_HOOKS, *SCALAR_HOOKS)
# The hook that may record values in outputs: it alone runs once for each row and key.
RECORDING_HOOK = "logits_transform"


# Of a number: None, or why it is refused.
Check: TypeAlias = Callable[[Any], str | None]


@dataclass(frozen=True)
class ScalarField:
    """A number given at run time.

    Attributes:
        name: of the field.
        dtype: of the number.
        default: None if it must be given.
        captured: a plain function captured it.
        check: what refuses numbers of the type; None is nothing.
    """

    name: str
    dtype: DType
    default: bool | int | float | None
    captured: bool = False
    check: Check | None = field(default=None, repr=False, hash=False)

    def refuse(self, number: float) -> None:
        """Raise ArgumentError for a number that the check has a reason against."""
        reason = None if self.check is None else self.check(number)
        if reason is None:
            return
        if not isinstance(reason, str):
            returned = f"for {number} its check returned {reason!r}"
            reason = f"{returned}; expected None, or a text that says why the number is refused"
        raise ArgumentError(name=self.name, reason=reason)


@dataclass(frozen=True)
class TensorField:
    """A tensor given at run time.

    Attributes:
        name: of the field.
        dtype: of its elements.
        axes: what indexes each dimension (None: anything).
        captured: a plain function captured it, so that its sizes follow from how it is indexed.
    """

    name: str
    dtype: DType
    axes: tuple[str | None, ...]
    captured: bool = False


@dataclass(frozen=True)
class OutputField(TensorField):
    """A tensor given at run time that the kernel writes; each dimension has an axis."""


@dataclass(frozen=True)
class Record:
    """A value of each visible element that is stored beside what the hooks compute.

    Attributes:
        output: the tensor that it is stored in.
        place: INT graph of the index into each dimension.
        value: FLOAT graph.
        source: where the user records it.
    """

    output: OutputField
    place: tuple[Node, ...]
    value: Node
    source: Source | None = field(default=None, compare=False)


@dataclass(frozen=True)
class CustomFunction:
    """A function whose CUDA text the user gives, with its Python twin for the oracle.

    Attributes:
        name: C identifier; the text must define `WL_FN float name(float, ...)`.
        cuda: CUDA C++ text of the definition; inline PTX is allowed.
        cpp: host C++ text of the same function, or None if the CPU back end must refuse it.
        arity: number of float arguments.
    """

    name: str
    cuda: str
    cpp: str | None
    arity: int


@dataclass(frozen=True)
class TracedVariant:
    """A variant as graphs.

    Attributes:
        name: class name, for messages and rendered comments.
        softmax: normalise with softmax, or sum `logits * value` as they are.
        hooks: graph of each hook that is not the identity (`logits_mask`: not always true).
        scalars: run-time scalars that the graphs read.
        tensors: run-time tensors that the graphs read, and those that values are recorded in.
        functions: custom functions that the graphs call.
        rotated: (hook, lanes) of the widest rotation of a hook, where it was given a width.
        records: what `logits_transform` records, in order of the outputs' declaration.
        unread: names of declared fields that no graph reads, as of what folds away; values given
            for them are taken and not used.
    """

    name: str
    softmax: bool
    hooks: Mapping[str, Node]
    scalars: tuple[ScalarField, ...] = ()
    tensors: tuple[TensorField, ...] = ()
    functions: tuple[CustomFunction, ...] = ()
    rotated: tuple[tuple[str, int], ...] = ()
    records: tuple[Record, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def roots(self) -> tuple[Node, ...]:
        """Graphs of all hooks, and of all recorded values."""
        return (*self.hooks.values(), *(record.value for record in self.records))

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the tensors that the kernel writes."""
        return tuple(record.output.name for record in self.records)

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of all run-time inputs, scalars first."""
        scalars = tuple(scalar.name for scalar in self.scalars)
        return (*scalars, *(tensor.name for tensor in self.tensors))

    def __hash__(self) -> int:  # nodes are interned, so equal variants have the same nodes
        hooks = frozenset(self.hooks.items())
        return hash((self.name, self.softmax, hooks, self.scalars, self.tensors, self.functions))


@dataclass(frozen=True)
class AttentionSpec:
    """Everything a kernel is compiled for; run-time values and lengths are not part of it.

    Attributes:
        variant: the traced functors.
        head_dim_qk: length of query and key vectors, a multiple of 8 up to 256.
        head_dim_v: length of value and output vectors, likewise.
        dtype: storage type of query and output, and of key and value unless `kv_dtype` is given.
        kv_format: how keys and values are stored.
        kv_dtype: storage type of key and value, if it is another one.
        max_scores: whether the kernel can tell each row's largest score.
        stamps: whether it tells when each work item began and ended.
    """

    variant: TracedVariant
    head_dim_qk: int
    head_dim_v: int
    dtype: DType
    kv_format: KVFormat
    kv_dtype: DType | None = None
    max_scores: bool = False
    stamps: bool = False

    @property
    def stored_dtype(self) -> DType:
        """Storage type of key and value."""
        return self.kv_dtype or self.dtype

    @property
    def is_narrow(self) -> bool:
        """True if keys and values have 8 bits, and kernels widen them."""
        return self.stored_dtype in NARROW_DTYPES
