"""Turns expression graphs into straight-line C++ that CUDA and the host compiler both take.

Every value is typed, shared sub-expressions become named temporaries, and the rest stays one
expression, so that the compiler sees `a + b * c` and contracts it. Functions (`exp`, `floordiv`,
`load`, ...) are those of namespace warploom, which `variant.cuh` and `variant.hpp` define alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import PurePath

import numpy as np

from warploom.codegen.lowering.cpp_text import (
    Binding,
    Text,
    atom,
    call,
    choice,
    infix,
    number,
    prefix,
)
from warploom.codegen.source import PLACE
from warploom.dsl.graphs.extents import Extents, within
from warploom.dsl.types.ir import FLOAT_TESTS, LEAVES, Kind, Node, Source, node
from warploom.dsl.types.number_types import LIMITS
from warploom.dsl.types.spec import TensorField
from warploom.errors import CannotTrace

# C++ text of each position where Variant's functions are called.
POSITION_TEXT: Mapping[str, str] = {
    "batch": "tile.batch",
    "kv_head": "tile.kv_head",
    "q_len": "tile.q_len",
    "kv_len": "tile.kv_len",
    "num_q_heads": "tile.num_q_heads",
    "num_kv_heads": "tile.num_kv_heads",
    "q_pos": "row.q_pos",
    "q_head": "row.q_head",
    "q_row": "row.q_row",
    "kv_pos": "kv_pos",
    "lane": "lane",
    "head_dim": "head_dim",
    "lse": "lse",
    "sm_scale": "positive_scale(p)",
}
# The scale of q.k as kernels read it, which no functor does.
SM_SCALE = node("var", Kind.FLOAT, attr="sm_scale")

# A load indexed by one of these at a dimension of that axis is inside the tensor: run() checks it.
SAFE_AXES = frozenset({"batch", "q_head", "kv_head"})

_ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "xor": "!="}
_BITS = {
    "and": "&",  # not &&: branch-free code vectorises
    "or": "|",
    "bitand": "&",
    "bitor": "|",
    "bitxor": "^",
}
_SHIFTS = {"shl": "<<", "shr": ">>"}
# Integer operations whose result may need more than 32 bits, and functions that wrap it.
_WRAPPING = {
    "add": "wrapped_sum",
    "sub": "wrapped_difference",
    "mul": "wrapped_product",
    "neg": "negated",
}
_LONGEST = 80  # characters of an expression before an operand is given a name


class Block:
    """Statements of one C++ function body, and the names of what they compute.

    Args:
        tensors: declared tensor fields, by name.
        bound: nodes that are already computed, and the C++ text that reads them.
        positions: C++ text of each position variable.
        wide: compute integers in 64 bits (`wide`), for analysis that must not overflow.
        indent: spaces before each statement.
        calls: C++ text of calls of one argument that are not lowered as usual, with {} for it.
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorField],
        bound: Mapping[Node, str] | None = None,
        *,
        positions: Mapping[str, str] = POSITION_TEXT,
        wide: bool = False,
        indent: int = 4,
        calls: Mapping[Node, str] | None = None,
    ) -> None:
        self.statements: list[str] = []
        self._tensors = tensors
        self._positions = positions
        self._wide = wide
        self._indent = " " * indent
        self._calls = calls or {}
        self._extents = Extents(wide=wide)
        self._text = {node: atom(text) for node, text in (bound or {}).items()}
        self._last_place = ""
        self._names = 0

    def compute(self, roots: Sequence[Node]) -> list[str]:
        """Append the statements that the roots need; return one C++ expression per root."""
        order = list(reachable(roots, self._text))
        uses = Counter(arg for current in order for arg in current.args)
        uses.update(roots)
        for current in order:
            text = self._lower(current)
            if len(text.text) > _LONGEST and self._name_longest(current):
                text = self._lower(current)
            if current.op in LEAVES:
                if self._wide and current.op in ("var", "scalar") and current.kind is Kind.INT:
                    name = str(current.attr) if current.op == "var" else f"x_{current.attr}"
                    text = self._name(current, text, name)
            elif uses[current] > 1:
                text = self._temporary(current, text)
            self._text[current] = text
        return [self._text[root].text for root in roots]

    def finish(self, statement: str, source: Source | None = None) -> None:
        """Append a last statement, such as a return."""
        self.statements.append(self._indent + statement + self._place(source))

    def _name_longest(self, current: Node) -> bool:
        """Give the operand with the longest text a name, so that lines stay readable."""
        longest = max(current.args, key=lambda arg: len(self._text[arg].text), default=current)
        text = self._text.get(longest, atom(""))
        if text.binding is Binding.ATOM and "(" not in text.text:  # a name or a constant
            return False
        self._text[longest] = self._temporary(longest, text)
        return True

    def _temporary(self, current: Node, text: Text) -> Text:
        self._names += 1
        return self._name(current, text, f"v{self._names - 1}")

    def _name(self, current: Node, text: Text, name: str) -> Text:
        self.finish(f"const {self._c_type(current.kind)} {name} = {text.text};", current.source)
        return atom(name)

    def _place(self, source: Source | None) -> str:
        place = "" if self._wide else place_comment(source)  # analysis is not the user's code
        if not place or place == self._last_place:
            return ""
        self._last_place = place
        return "  " + place

    def _c_type(self, kind: Kind) -> str:
        return "wide" if self._wide and kind is Kind.INT else C_TYPES[kind]

    def _operand(self, arg: Node, kind: Kind) -> Text:
        """`arg` as a `kind`."""
        text = self._text[arg]
        return text if arg.kind is kind else call(self._c_type(kind), text)

    def _lower(self, current: Node) -> Text:
        op, kind, args = current.op, current.kind, current.args
        if op in LEAVES:
            return self._leaf(current)
        if self._wraps(current):
            return call(_WRAPPING[op], *self._arguments(current))
        if op in _ARITHMETIC:
            return self._infix(_ARITHMETIC[op], args, kind)
        if op in _COMPARE:
            return self._infix(_COMPARE[op], args, widest(args))
        if op in _BITS:
            return self._infix(_BITS[op], args, kind)
        if op in _SHIFTS and self._is_plain_shift(current):
            return infix(self._operand(args[0], kind), _SHIFTS[op], number(str(args[1].attr)))
        if op in ("neg", "not"):
            return prefix("-" if op == "neg" else "!", self._operand(args[0], kind))
        if op in ("floordiv", "mod") and _is_power_of_two(args[1]):
            return self._shift_or_mask(op, *args)
        if op == "select":
            sides = (self._operand(arg, kind) for arg in args[1:])
            return choice(self._operand(args[0], Kind.BOOL), *sides)
        return self._call(current)

    def _infix(self, sign: str, args: Sequence[Node], kind: Kind) -> Text:
        left, right = (self._operand(arg, kind) for arg in args)
        return infix(left, sign, right)

    def _wraps(self, current: Node) -> bool:
        """Analysis counts in 64 bits, and wraps where its graphs say so."""
        is_wide = self._wide or current.kind is not Kind.INT
        return not is_wide and current.op in _WRAPPING and self._extents.may_wrap(current)

    def _is_plain_shift(self, current: Node) -> bool:
        """A count of bits and, to the left, numbers and a result that C++17 defines it for."""
        value, bits = current.args
        count = bits.attr if bits.op == "const" else None
        if not isinstance(count, int) or not 0 <= count < 32:
            return False
        if current.op == "shr":
            return True
        return self._extents.of(value)[0] >= 0 and not self._extents.may_wrap(current)

    def _shift_or_mask(self, op: str, value: Node, divisor: Node) -> Text:
        """Division by 2^n that rounds down, as Python's does, is an arithmetic shift."""
        assert isinstance(divisor.attr, int)
        text = self._operand(value, Kind.INT)
        if op == "mod":
            return infix(text, "&", number(str(divisor.attr - 1)))
        return infix(text, ">>", number(str(divisor.attr.bit_length() - 1)))

    def _leaf(self, current: Node) -> Text:
        if current.op == "logits":
            return atom("logits")
        if current.op == "const":
            return self._const(current)
        if current.op == "scalar":
            text = atom(f"p.x_{current.attr}")
            return infix(text, "!=", number("0")) if current.kind is Kind.BOOL else text
        return atom(self._positions[str(current.attr)])

    def _const(self, current: Node) -> Text:
        if self._wide and current.kind is Kind.INT:
            return number(f"{current.attr}LL")  # of type `wide`
        return number(constant_text(current))

    def _call(self, current: Node) -> Text:
        op, args = current.op, current.args
        if op == "cast":
            return self._cast(current)
        if op == "to_float" or (op == "to_int" and (self._wide or args[0].kind is Kind.BOOL)):
            return call(self._c_type(current.kind), self._text[args[0]])
        if op == "element":
            return call("x", self._clamped(args[0], "head_dim", args[0].attr == "lane"))
        if op == "load":
            return self._load(current)
        if op == "call":  # a member may have the same name
            arguments = (self._operand(arg, Kind.FLOAT) for arg in args)
            return call(f"warploom::{current.attr}", *arguments)
        if op == "to_int" or op in FLOAT_TESTS:
            return call(op, self._text[args[0]])
        if current in self._calls:
            inner = ", ".join(argument.text for argument in self._arguments(current))
            return atom(self._calls[current].format(inner))
        space = "precise::" if current.attr == ("precise",) else ""
        return call(f"{space}{op}", *self._arguments(current))

    def _cast(self, current: Node) -> Text:
        """An integer of a smaller type, which stays in its register: nothing, or its low bits."""
        (arg,) = current.args
        limits = LIMITS[current.type]
        held = arg.op in ("load", "scalar") or within(self._extents.of(arg), limits)
        text = self._operand(arg, Kind.INT)
        return text if held else call(f"wrap_{current.type}", text)

    def _arguments(self, current: Node) -> list[Text]:
        return [self._operand(arg, current.kind) for arg in current.args]

    def _load(self, current: Node) -> Text:
        field = self._tensors[str(current.attr)]
        place = None
        for dim, (arg, axis) in enumerate(zip(current.args, field.axes, strict=True)):
            is_safe = arg.op == "var" and arg.attr == axis and axis in SAFE_AXES
            index = self._clamped(arg, f"p.x_{field.name}_n{dim}", is_safe)
            term = infix(index, "*", atom(f"p.x_{field.name}_s{dim}"))
            place = term if place is None else infix(place, "+", term)
        text = call("load", atom(f"p.x_{field.name}"), place or number("0"))
        return call("wide", text) if self._wide and current.kind is Kind.INT else text

    def _clamped(self, index: Node, size: str, is_safe: bool) -> Text:
        text = self._operand(index, Kind.INT)
        return text if is_safe else call("clamp_index", text, atom(size))


C_TYPES: Mapping[Kind, str] = {Kind.BOOL: "bool", Kind.INT: "int", Kind.FLOAT: "float"}


def reachable(roots: Sequence[Node], bound: Collection[Node] = ()) -> Iterator[Node]:
    """Nodes to compute for the roots, operands first; what is bound is not entered."""
    seen: set[Node] = set(bound)
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        current, expanded = stack.pop()
        if expanded:
            yield current
        elif current not in seen:
            seen.add(current)
            stack.append((current, True))
            stack.extend((arg, False) for arg in reversed(current.args))


def _is_power_of_two(value: Node) -> bool:
    number = value.attr
    if value.op != "const" or value.kind is not Kind.INT or not isinstance(number, int):
        return False
    return number > 0 and number & (number - 1) == 0


def widest(args: Sequence[Node]) -> Kind:
    """The kind two operands of a comparison are compared in."""
    kinds = {arg.kind for arg in args}
    for kind in (Kind.FLOAT, Kind.INT):
        if kind in kinds:
            return kind
    return Kind.BOOL


def constant_text(current: Node) -> str:
    """C++ literal with exactly this value (floats: of the nearest float32).

    Raises:
        CannotTrace: an integer that 32 bits do not hold.
    """
    value = current.attr
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        if not -(2**31) <= value < 2**31:
            raise CannotTrace(
                what=f"the integer {value}",
                remedy="Integers in a functor have 32 bits; use a float.",
                source=current.source,
            )
        return str(value) if value != -(2**31) else "(-2147483647 - 1)"
    with np.errstate(over="ignore"):  # beyond fp32 is infinity, as in any fp32 computation
        single = np.float32(value)  # type: ignore[arg-type]
    if np.isnan(single):
        return "kNaN"
    if np.isinf(single):
        return "kInfinity" if single > 0 else "-kInfinity"
    return f"{single!s}f"


def place_comment(source: Source | None) -> str:
    """Comment naming the user's line, or nothing."""
    if source is None:
        return ""
    text = source.text.strip().rstrip("\\ ")  # a backslash would continue the comment
    return f"{PLACE} {PurePath(source.file).name}:{source.line}: {text}"
