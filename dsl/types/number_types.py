"""Types of numbers inside functors, and what an operation of several types gives.

The rules are torch's for tensors of no dimensions, which is what FlexAttention's functions compute
with: two types give the least that holds both, and a Python number takes the type of what it
meets, low bits first. Graphs (`build`) and the NumPy reading (`arrays`) both ask here.

A Python int that meets no integer is an int32 like the positions, where torch has int64.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any

from warploom.dsl.types.ir import Kind

LIMITS: Mapping[str, tuple[int, int]] = {
    "uint8": (0, 2**8 - 1),
    "int8": (-(2**7), 2**7 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "int32": (-(2**31), 2**31 - 1),
}
SMALL = frozenset({"uint8", "int8", "int16"})  # kept in an int, and wrapped after each operation
_RANK = {name: i for i, name in enumerate(("bool", "uint8", "int8", "int16", "int32", "float32"))}


def kind_of(name: str) -> Kind:
    """The kind of a type."""
    return Kind.BOOL if name == "bool" else Kind.INT if name in LIMITS else Kind.FLOAT


def type_of_tensor(tensor: Any) -> str:
    """The type of the number that a torch tensor of ints without dimensions stands for."""
    name = str(tensor.dtype).rpartition(".")[2]
    return name if name in LIMITS else "int32"


def result_type(types: Iterable[str], weak: Iterable[Kind] = ()) -> str:
    """The type that an operation computes in.

    Args:
        types: of its operands.
        weak: kinds of operands that are Python numbers.
    """
    found = reduce(_promoted, types, "bool")
    for kind in weak:
        if kind is Kind.INT and found == "bool":
            found = "int32"
        elif kind is Kind.FLOAT and kind_of(found) is not Kind.FLOAT:
            found = "float32"
    return found


def _promoted(a: str, b: str) -> str:
    if {a, b} == {"uint8", "int8"}:
        return "int16"  # the least that holds both
    return max(a, b, key=_RANK.__getitem__)


def wrapped(value: int, name: str) -> int:
    """The number that a type makes of an int: its low bits."""
    least, greatest = LIMITS[name]
    return (value - least) % (greatest - least + 1) + least


def fits_scalar(value: int, name: str) -> bool:
    """Whether torch takes a Python int for a value of a type where it does not just wrap it.

    Negative numbers stand for unsigned ones, as far as their size fits.
    """
    least, greatest = LIMITS[name]
    return (-greatest if least == 0 else least) <= value <= greatest
