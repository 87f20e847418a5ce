"""The typed expression graph that a traced functor becomes.

Nodes are interned: two nodes with the same operation, arguments and attribute are the same object,
so `is` is structural equality, common sub-expressions are shared for free, and a node hashes by
identity.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from threading import RLock
from weakref import WeakValueDictionary

from warploom import forks


class Kind(Enum):
    """The type of a value inside a functor; storage types are in `warploom.dsl.types.dtypes`."""

    BOOL = "bool"
    INT = "int32"
    FLOAT = "float32"


@dataclass(frozen=True)
class Source:
    """Where in the user's file a node was made; `column` counts from 1, 0 if unknown."""

    file: str
    line: int
    column: int
    function: str
    text: str


# Positions a functor may read; `at.<name>` gives the variable. q_pos and kv_pos count from 0 in the
# key/value sequence (queries are aligned to its end), q_idx counts query rows of the request.
POSITIONS: Mapping[str, Kind] = {
    "batch": Kind.INT,
    "q_pos": Kind.INT,
    "kv_pos": Kind.INT,
    "q_len": Kind.INT,
    "kv_len": Kind.INT,
    "q_head": Kind.INT,
    "kv_head": Kind.INT,
    "q_row": Kind.INT,  # row of the ragged query tensor, over all requests
    "num_q_heads": Kind.INT,
    "num_kv_heads": Kind.INT,
    "lane": Kind.INT,  # index into the head dimension; vector hooks only
    "head_dim": Kind.INT,  # length of the vector of this hook; vector hooks only
    "lse": Kind.FLOAT,  # natural log-sum-exp of the row; output_transform only
}

UNARY_MATH = frozenset(
    {"exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sigmoid", "sin", "cos", "erf"}
    | {"log1p", "expm1", "tan", "atan", "sinh", "cosh"}
) | {"floor", "ceil", "abs", "neg"}
ARITHMETIC = frozenset({"add", "sub", "mul", "div", "floordiv", "mod", "min", "max", "pow"})
ARITHMETIC |= {"fmod"}  # of floats
FLOAT_TESTS = frozenset({"is_nan", "is_inf"})  # of a float, a bool
COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
LOGIC = frozenset({"and", "or", "xor", "not"})  # on bools
BITWISE = frozenset({"bitand", "bitor", "bitxor", "shl", "shr"})  # on ints
LEAVES = frozenset({"const", "var", "logits", "scalar"})
REDUCTIONS = frozenset({"sum_lanes", "max_lanes"})  # args: (body,), over lane = 0 .. head_dim - 1
OPERATIONS = (
    UNARY_MATH
    | ARITHMETIC
    | COMPARISONS
    | FLOAT_TESTS
    | LOGIC
    | BITWISE
    | LEAVES
    | REDUCTIONS
    | frozenset(
        {
            "select",  # (condition, if true, if false)
            "to_int",  # truncates toward zero, as astype does
            "to_float",
            "cast",  # attr: name of a type in `number_types`; integers keep their low bits
            "load",  # attr: tensor field's name; args: one INT index per dimension
            "element",  # args: (lane,); that lane of the hook's own vector
            "call",  # attr: name of a CustomFunction; args: its arguments
        }
    )
)


class Node:
    """One operation. Make nodes with `node`, never directly.

    Attributes:
        op: one of `OPERATIONS`.
        kind: type of the value.
        args: operand nodes.
        attr: constant value (`const`), position name (`var`), field name (`scalar`, `load`),
            function name (`call`), type (`cast`), or `("precise",)` on math operations that must
            not use fast intrinsics.
        type: what torch would call the type of the value. Types that torch has and `Kind` has not
            are those of casts; what is read from a tensor of such a type is a cast of the load.
        source: place of the first use, for error messages; not part of identity.
    """

    __slots__ = ("__weakref__", "args", "attr", "kind", "op", "source", "type")

    def __init__(
        self, op: str, kind: Kind, args: tuple[Node, ...], attr: Hashable, source: Source | None
    ) -> None:
        self.op = op
        self.kind = kind
        self.args = args
        self.attr = attr
        self.source = source
        self.type = str(attr) if op == "cast" else kind.value

    def __repr__(self) -> str:
        inner = ", ".join(
            [*([repr(self.attr)] if self.attr is not None else []), *map(repr, self.args)]
        )
        return f"{self.op}({inner})" if inner else self.op


_interned: WeakValueDictionary[tuple[object, ...], Node] = WeakValueDictionary()
_interning = RLock()  # two threads must not make two nodes with the same parts


def _renew_lock() -> None:
    global _interning
    _interning = RLock()


forks.after(_renew_lock)  # another thread may have held it


def node(
    op: str,
    kind: Kind,
    args: tuple[Node, ...] = (),
    attr: Hashable = None,
    source: Source | None = None,
) -> Node:
    """Return the one node with these parts."""
    if op not in OPERATIONS:
        raise ValueError(f"no operation {op!r}")
    # 1, 1.0 and True are equal keys in a dict, as are 0.0 and -0.0, but no equal constants
    key = (op, kind, type(attr), repr(attr), *map(id, args))
    with _interning:
        found = _interned.get(key)
        if found is None:
            found = Node(op, kind, args, attr, source)
            _interned[key] = found
    return found


def const(value: bool | int | float) -> Node:
    kind = (
        Kind.BOOL if isinstance(value, bool) else Kind.INT if isinstance(value, int) else Kind.FLOAT
    )
    return node("const", kind, attr=value)


def var(name: str) -> Node:
    return node("var", POSITIONS[name], attr=name)


def walk(*roots: Node) -> Iterator[Node]:
    """Every node reachable from the roots once, operands before users."""
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in reversed(roots)]
    while stack:
        current, expanded = stack.pop()
        if expanded:
            yield current
        elif current not in seen:
            seen.add(current)
            stack.append((current, True))
            stack.extend((arg, False) for arg in reversed(current.args))


def substitute(root: Node, replacements: Mapping[Node, Node]) -> Node:
    """Rebuild `root` with some nodes replaced."""
    made: dict[Node, Node] = dict(replacements)
    for current in walk(root):
        if current not in made:
            args = tuple(made[arg] for arg in current.args)
            same = all(new is old for new, old in zip(args, current.args, strict=True))
            made[current] = (
                current
                if same
                else node(current.op, current.kind, args, current.attr, current.source)
            )
    return made[root]
