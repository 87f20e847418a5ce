"""Random expressions as trees: what a functor may say, in no language yet."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

INT, BOOL, FLOAT = "int", "bool", "float"
EXTREMES = (0, 1, -1, 2**31 - 1, -(2**31), 2**16, -(2**16))


@dataclass(frozen=True)
class Node:
    """One operation: `op` names it, `kind` is what it gives, `data` is a literal or a name."""

    op: str
    kind: str
    args: tuple[Node, ...] = ()
    data: object = None

    @property
    def size(self) -> int:
        return 1 + sum(arg.size for arg in self.args)

    @property
    def is_number(self) -> bool:
        return self.op == "number"


@dataclass(frozen=True)
class Field:
    """A declared or captured input: a tensor with a role for each dimension, or a number."""

    name: str
    dtype: str
    roles: tuple[str | None, ...] | None = None  # None: a scalar
    sizes: tuple[int, ...] = ()  # of the dimensions, where the role is None
    value: float | int | bool = 0  # of a scalar
    wide: bool = False  # ints from the whole of their type

    @property
    def kind(self) -> str:
        return BOOL if self.dtype == "bool" else FLOAT if "float" in self.dtype else INT


def number(value: int | float | bool) -> Node:
    kind = BOOL if isinstance(value, bool) else INT if isinstance(value, int) else FLOAT
    return Node("number", kind, (), value)


def at(name: str) -> Node:
    return Node("at", FLOAT if name == "lse" else INT, (), name)


ARITHMETIC = ("+", "-", "*")
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
UNARY_FLOAT = ("exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "tanh", "sigmoid",
               "sin", "cos", "tan", "atan", "sinh", "cosh", "erf")  # fmt: skip
POSITIVE = ("log", "log2", "sqrt", "rsqrt")
INT_DTYPES = ("uint8", "int8", "int16", "int32", "int64")
FLOAT_DTYPES = ("float32", "float32", "float16", "bfloat16")


class Grammar:
    """Draws expressions for one hook.

    Args:
        random: source of all decisions.
        positions: names of `at` that the hook may read.
        fields: inputs that were declared so far; the grammar adds to them.
        value: the hook's argument ("logits", "q", ...), None for masks.
        flex: keep to what torch, run eagerly, defines on int32 and float tensors.
    """

    def __init__(
        self,
        random: Random,
        positions: tuple[str, ...],
        fields: list[Field],
        value: str | None,
        flex: bool = False,
    ) -> None:
        self.random, self.positions, self.fields = random, positions, fields
        self.value, self.flex = value, flex

    def draw(self, kind: str, depth: int) -> Node:
        if depth <= 0 or self.random.random() < 0.08:
            return self._leaf(kind)
        if self.flex and self.random.random() < 0.3:
            return self._form(kind, depth - 1)
        return {INT: self._int, BOOL: self._bool, FLOAT: self._float}[kind](depth - 1)

    def fluent(self, kind: str, depth: int) -> Node:
        """An expression that is no literal, so that an operator has something of ours."""
        found = self.draw(kind, depth)
        while found.is_number:
            found = self.draw(kind, depth)
        return found

    def _form(self, kind: str, depth: int) -> Node:
        from fuzz.flex_forms import draw_form

        text, kinds = draw_form(self.random, kind)
        return Node("form", kind, tuple(self.fluent(k, depth) for k in kinds), text)

    # --- leaves

    def _leaf(self, kind: str) -> Node:
        roll = self.random.random()
        if kind == BOOL:
            if roll < 0.35:
                return self._field(BOOL)
            op = self.random.choice(COMPARISONS)
            return Node(op, BOOL, (at(self.random.choice(self.positions)), self._leaf(INT)))
        if kind == INT:
            if roll < 0.65:
                return at(self.random.choice(self.positions))
            return self._field(INT) if roll < 0.82 else self._literal()
        if self.value == "o" and roll < 0.1:
            return Node("maximum", FLOAT, (at("lse"), number(-50.0)))
        if self.value is not None and roll < 0.45:
            return Node("value", FLOAT, (), self.value)
        if roll < 0.7:
            return self._field(FLOAT)
        if roll < 0.85:
            return Node("to_float", FLOAT, (at(self.random.choice(self.positions)),))
        return number(self.random.choice((0.5, 2.0, -1.5, 0.1, 1.0, -0.25, 3.0, 0.0)))

    def _literal(self) -> Node:
        if not self.flex and self.random.random() < 0.06:
            return number(self.random.choice(EXTREMES))
        return number(self.random.choice((-7, -3, -2, -1, 0, 1, 2, 3, 5, 8, 17, 31)))

    def _field(self, kind: str) -> Node:
        same = [x for x in self.fields if x.kind == kind and x.dtype != "float64"]
        if same and self.random.random() < 0.6:
            return self._read(self.random.choice(same))
        if len(self.fields) >= 5:
            return at(self.random.choice(self.positions)) if kind == INT else self._fallback(kind)
        field = self._new_field(kind)
        self.fields.append(field)
        return self._read(field)

    def _fallback(self, kind: str) -> Node:
        place = at(self.random.choice(self.positions))
        return Node("to_float" if kind == FLOAT else "to_bool", kind, (place,))

    def _new_field(self, kind: str) -> Field:
        random = self.random
        dtype = {
            INT: random.choice(("int32", "int32", *INT_DTYPES)),
            FLOAT: random.choice(FLOAT_DTYPES),
            BOOL: "bool",
        }[kind]
        # "l": FlexAttention's int64 would spread to what follows, and is made an int32 at once
        name = f"{'l' if dtype == 'int64' else kind[0]}{len(self.fields)}"
        if not self.flex and random.random() < 0.3:
            value = {
                INT: random.choice((-5, -1, 0, 1, 3, 7, 40)),
                FLOAT: random.choice((0.5, -1.25, 2.0, 0.0)),
                BOOL: random.random() < 0.5,
            }[kind]
            if dtype == "uint8":
                value = abs(value)
            return Field(name, dtype, None, (), value)
        possible: list[str | None] = [None, None]
        if not self.flex:
            possible += [
                r for r in ("batch", "q_head", "kv_head", "lane", "q_row") if r in self.positions
            ]
            possible += [r for r in ("q_pos", "kv_pos") if r in self.positions] * 2
        roles = tuple(random.choice(possible) for _ in range(random.choice((1, 1, 2, 2, 3))))
        sizes = tuple(random.choice((1, 2, 5, 16, 33)) for _ in roles)
        return Field(name, dtype, roles, sizes, 0, kind == INT and random.random() < 0.15)

    def double(self) -> Node:
        """Of a captured float64 tensor: a bias or a factor of the score, and refused elsewhere."""
        field = Field(f"d{len(self.fields)}", "float64", (None,), (self.random.choice((1, 5, 33)),))
        self.fields.append(field)
        return self._read(field)

    def _read(self, field: Field) -> Node:
        if field.roles is None:
            return Node("scalar", field.kind, (), field.name)
        if any(role is not None and role not in self.positions for role in field.roles):
            return self._fallback(field.kind) if field.kind != INT else at(self.positions[0])
        if self.flex:  # torch, run eagerly, takes no index beyond the end
            inside = tuple(self._from_end(size) for size in field.sizes)
            return Node("look_end", field.kind, inside, field.name)
        indices = tuple(self._index(role) for role in field.roles)
        return Node("look", field.kind, indices, field.name)

    def _from_end(self, size: int) -> Node:
        index = Node("%", INT, (at(self.random.choice(self.positions)), number(size)))
        return Node("-", INT, (index, number(size))) if self.random.random() < 0.4 else index

    def _index(self, role: str | None) -> Node:
        if role in ("batch", "q_head", "kv_head", "lane"):
            return at(role)
        if role is not None and self.random.random() < 0.7:
            return at(role)
        place = at(self.random.choice(self.positions))
        roll = self.random.random()
        if roll < 0.35:
            return Node("+", INT, (place, number(self.random.choice((-40, -3, -1, 0, 1, 4)))))
        if roll < 0.7:
            other = at(self.random.choice(self.positions))
            return Node(self.random.choice("-*+"), INT, (place, other))
        return Node("%", INT, (place, number(self.random.choice((2, 5, 16)))))

    # --- operations

    def _pair(self, kind: str, depth: int, other: str | None = None) -> tuple[Node, Node]:
        """Two operands, of which at most one is a literal."""
        first = self.fluent(kind, depth)
        second = self.draw(other or kind, depth)
        return (first, second) if self.random.random() < 0.5 else (second, first)

    def _int(self, depth: int) -> Node:
        random = self.random
        roll = random.random()
        if roll < 0.35:
            other = BOOL if not self.flex and random.random() < 0.1 else INT
            operation = _without_difference(random.choice(ARITHMETIC), other)
            return Node(operation, INT, self._pair(INT, depth, other))
        if roll < 0.5:
            return self._division(depth)
        if roll < 0.6:
            return Node(random.choice("&|^"), INT, self._pair(INT, depth))
        if roll < 0.67:
            return self._shift(depth)
        if roll < 0.75:
            if random.random() < 0.3:
                return Node("clamp", INT, (self.fluent(INT, depth), number(-3), number(9)))
            return Node(random.choice(("minimum", "maximum")), INT, self._pair(INT, depth))
        if roll < 0.85:
            return Node(random.choice(("neg", "invert", "abs")), INT, (self.fluent(INT, depth),))
        if roll < 0.87:
            return Node("**", INT, (self.fluent(INT, depth), number(self.random.choice((2, 3)))))
        if roll < 0.92:
            return self._where(INT, depth)
        if roll < 0.96:
            return Node("to_int", INT, (self.fluent(BOOL, depth),))
        x = self.fluent(FLOAT, depth)
        if self.flex:  # beyond an int torch defines nothing
            x = Node("clamp", FLOAT, (x, number(-1e6), number(1e6)))
        return Node("to_int", INT, (x,))

    def _division(self, depth: int) -> Node:
        op, top = self.random.choice(("//", "%")), self.fluent(INT, depth)
        roll = self.random.random()
        if roll < 0.6 or (self.flex and roll < 0.8):
            divisor = self.random.choice((-7, -2, -1, 1, 2, 3, 5, 16))
            if self.flex and divisor == -1:  # the least int by it ends a process of torch's
                divisor = 1
            if roll < 0.08 and not self.flex:
                op = "fmod"
            return Node(op, INT, (top, number(divisor)))
        if self.flex or roll < 0.75:
            small = Node("&", INT, (self.fluent(INT, depth), number(7)))
            return Node(op, INT, (top, Node("+", INT, (small, number(1)))))
        return Node(op, INT, (top, self.fluent(INT, depth)))

    def _shift(self, depth: int) -> Node:
        op, value = self.random.choice(("<<", ">>")), self.fluent(INT, depth)
        if self.flex:  # further than small types are wide, torch's shifts have no meaning
            return Node(op, INT, (value, number(self.random.choice((0, 1, 3)))))
        if self.random.random() < 0.6:
            return Node(op, INT, (value, number(self.random.choice((0, 1, 3, 8, 31)))))
        return Node(op, INT, (value, self.fluent(INT, depth)))

    def _bool(self, depth: int) -> Node:
        random = self.random
        roll = random.random()
        if roll < 0.35:
            return Node(random.choice(COMPARISONS), BOOL, self._pair(INT, depth))
        if roll < 0.45:
            mixed = INT if random.random() < 0.3 else FLOAT
            return Node(random.choice(COMPARISONS[:4]), BOOL, self._pair(FLOAT, depth, mixed))
        if roll < 0.7:
            return Node(random.choice("&|^"), BOOL, self._pair(BOOL, depth))
        if roll < 0.8:
            return Node("invert", BOOL, (self.fluent(BOOL, depth),))
        if roll < 0.93:
            return self._where(BOOL, depth)
        if roll < 0.96:
            return Node(random.choice(("==", "!=")), BOOL, self._pair(BOOL, depth))
        if roll < 0.98 and not self.flex:
            return self._float_test(depth)
        return Node("to_bool", BOOL, (self.fluent(INT, depth),))

    def _float_test(self, depth: int) -> Node:
        x = self.fluent(FLOAT, depth)
        if self.random.random() < 0.5:
            return Node("isnan", BOOL, (Node("log", FLOAT, (x,)),))
        return Node("isinf", BOOL, (Node("where", FLOAT, (self.fluent(BOOL, depth),
                                                         number(float("inf")), x)),))  # fmt: skip

    def _float(self, depth: int) -> Node:
        random = self.random
        roll = random.random()
        if roll < 0.4:
            other = random.choice((FLOAT, FLOAT, FLOAT, INT, INT if self.flex else BOOL))
            operation = _without_difference(random.choice(ARITHMETIC), other)
            return Node(operation, FLOAT, self._pair(FLOAT, depth, other))
        if roll < 0.48:
            return self._quotient(depth)
        if roll < 0.66:
            return self._function(depth)
        if roll < 0.74:
            return Node(random.choice(("minimum", "maximum")), FLOAT, self._pair(FLOAT, depth))
        if roll < 0.8:
            return self._one_float(depth)
        if roll < 0.93:
            return self._where(FLOAT, depth)
        if roll < 0.96:
            return Node("to_float", FLOAT, (self.fluent(random.choice((INT, BOOL)), depth),))
        return Node(random.choice(("floor", "ceil")), FLOAT, (self.fluent(FLOAT, depth),))

    def _one_float(self, depth: int) -> Node:
        roll, x = self.random.random(), self.fluent(FLOAT, depth)
        if roll < 0.4:
            return Node(self.random.choice(("neg", "abs")), FLOAT, (x,))
        if roll < 0.6:
            return Node("clamp", FLOAT, (x, number(-1.5), number(2.0)))
        if roll < 0.8:
            return Node("**", FLOAT, (x, number(self.random.choice((2, 3)))))
        divisor = number(self.random.choice((0.5, 2.0, -1.5, 3.0)))
        ops = ("//", "%") if self.flex else ("//", "%", "fmod")
        return Node(self.random.choice(ops), FLOAT, (x, divisor))

    def _quotient(self, depth: int) -> Node:
        top = self.fluent(self.random.choice((INT, FLOAT)), depth)
        if self.random.random() < 0.6:
            return Node("/", FLOAT, (top, number(self.random.choice((3.0, -0.5, 7.0, 16.0)))))
        size = Node("abs", FLOAT, (self.fluent(FLOAT, depth),))
        return Node("/", FLOAT, (top, Node("+", FLOAT, (size, number(0.5)))))

    def _function(self, depth: int) -> Node:
        name, x = self.random.choice(UNARY_FLOAT), self.fluent(FLOAT, depth)
        if not self.flex and self.random.random() < 0.12:
            if self.random.random() < 0.5:
                return Node("bent", FLOAT, (x,))
            held = Node("clamp", FLOAT, (x, number(-6.0), number(6.0)))
            return Node("rpow", FLOAT, (held,), self.random.choice((2.0, 1.5, 10.0)))
        if name in ("exp", "exp2", "expm1"):
            x = Node("minimum", FLOAT, (x, number(3.0)))
        if name in ("sinh", "cosh"):
            x = Node("clamp", FLOAT, (x, number(-6.0), number(6.0)))
        if name == "tan":  # where its poles are far apart beside a last place of x
            x = Node("clamp", FLOAT, (x, number(-40.0), number(40.0)))
        if name in POSITIVE:
            x = Node("+", FLOAT, (Node("abs", FLOAT, (x,)), number(0.25)))
        if name == "log1p":
            x = Node("abs", FLOAT, (x,))
        precise = not self.flex and self.random.random() < 0.15
        return Node(name, FLOAT, (x,), "precise" if precise else None)

    def _where(self, kind: str, depth: int) -> Node:
        condition = self.fluent(BOOL, depth)
        if self.random.random() < 0.25:
            condition = self._where(BOOL, depth - 1) if depth > 0 else condition
        return Node("where", kind, (condition, *self._pair(kind, depth)))


def _without_difference(operation: str, other: str) -> str:
    """Bools are not subtracted, as in torch."""
    return "+" if operation == "-" and other == BOOL else operation
