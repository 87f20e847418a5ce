"""One tree in three languages: a warploom functor, a FlexAttention mod, calls of the reference."""

from __future__ import annotations

from fuzz.grammar import FLOAT, Node

# Python's precedence, so that text has only the parentheses that it needs
LEVELS = {"|": 2, "^": 3, "&": 4, "<<": 5, ">>": 5, "+": 6, "-": 6, "*": 7, "/": 7, "//": 7, "%": 7}
COMPARED, UNARY, POWER, ATOM = 1, 8, 9, 10
NAMES = {
    "+": "add", "-": "sub", "*": "mul", "/": "div", "//": "floordiv", "%": "remainder",
    "**": "power", "&": "and_", "|": "or_", "^": "xor", "<<": "shl", ">>": "shr",
    "<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne",
}  # fmt: skip
IN_TORCH = {"to_int": "int()", "to_float": "float()", "to_bool": "bool()"}


def warploom_text(node: Node) -> str:
    """For a method of a `wl.Variant`."""
    return _Infix("wl", "at.", "self.").text(node)[0]


def torch_text(node: Node) -> str:
    """For a `score_mod` or `mask_mod`."""
    return _Infix("torch", "", "").text(node)[0]


class _Infix:
    def __init__(self, module: str, position: str, field: str) -> None:
        self.module, self.position, self.field = module, position, field

    def text(self, node: Node) -> tuple[str, int]:
        """The text, and how tightly it binds."""
        if node.op == "number":
            negative = not isinstance(node.data, bool) and node.data < 0  # type: ignore[operator]
            return literal(node.data), UNARY if negative else ATOM
        if node.op == "at":
            return self.position + str(node.data), ATOM
        if node.op == "value":
            return str(node.data), ATOM
        if node.op == "scalar":
            return self.field + str(node.data), ATOM
        if node.op in ("look", "look_end"):
            inside = ", ".join(self.text(arg)[0] for arg in node.args)
            is_long = self.module == "torch" and str(node.data).startswith("l")
            return f"{self.field}{node.data}[{inside}]" + ".int()" * is_long, ATOM
        if node.op == "form":
            return str(node.data).format(*(self._within(arg, ATOM) for arg in node.args)), 0
        if node.op == "**":
            base, exponent = node.args
            return f"{self._within(base, ATOM)} ** {exponent.data!r}", POWER
        if node.op == "record":
            return f"self.{node.data.name}.record({self.text(node.args[0])[0]}, at)", ATOM  # type: ignore[attr-defined]
        if node.op == "then":
            return f"({', '.join(self.text(arg)[0] for arg in node.args)})[1]", ATOM
        if node.op == "rpow":
            return f"{node.data!r} ** {self._within(node.args[0], ATOM)}", POWER
        if node.op in LEVELS:
            return self._infix(node, LEVELS[node.op])
        if node.op in NAMES:  # comparisons do not chain: an operand that is one takes parentheses
            left, right = (self._within(arg, COMPARED + 1) for arg in node.args)
            return f"{left} {node.op} {right}", COMPARED
        if node.op in ("neg", "invert"):
            sign = "-" if node.op == "neg" else "~"
            return sign + self._within(node.args[0], UNARY), UNARY
        return self._call(node), ATOM

    def _infix(self, node: Node, level: int) -> tuple[str, int]:
        left = self._within(node.args[0], level)
        right = self._within(node.args[1], level + 1)
        return f"{left} {node.op} {right}", level

    def _within(self, node: Node, least: int) -> str:
        text, level = self.text(node)
        return text if level >= least else f"({text})"

    def _call(self, node: Node) -> str:
        args = list(node.args)
        if self.module == "torch":
            if node.op in IN_TORCH:
                return f"{self._within(args[0], ATOM)}.{IN_TORCH[node.op]}"
            if node.op in (
                "minimum",
                "maximum",
            ):  # torch's take no numbers
                pair = sorted(args, key=lambda arg: arg.is_number)
                bound = "max" if node.op == "minimum" else "min"
                if pair[1].is_number:
                    return f"torch.clamp({self.text(pair[0])[0]}, {bound}={pair[1].data!r})"
        inside = ", ".join(self.text(arg)[0] for arg in args)
        if node.data == "precise":
            inside += ", precise=True"
        return f"bent({inside})" if node.op == "bent" else f"{self.module}.{node.op}({inside})"


def literal(value: object) -> str:
    """A number as Python reads it."""
    return "float('inf')" if value == float("inf") else repr(value)


def reference_text(node: Node) -> str:
    """Calls of the functions of `reference.py`, in which nothing depends on precedence."""
    if node.op == "number":
        return f"num({literal(node.data)})"
    if node.op == "at":
        return f"at[{node.data!r}]"
    if node.op == "value":
        return str(node.data)
    if node.op == "scalar":
        return f"inputs[{node.data!r}]"
    inside = ", ".join(reference_text(arg) for arg in node.args)
    if node.op == "look":
        return f"look(inputs[{node.data!r}], {inside})"
    if node.op == "record":
        return f"record({node.data.name!r}, {inside})"  # type: ignore[attr-defined]
    if node.op == "rpow":
        return f"rpow({node.data!r}, {inside})"
    name = NAMES.get(node.op, node.op)
    if node.op in ("sum", "mean", "max"):
        name = f"v{name}"
    if node.kind == FLOAT and node.op in ("+", "-", "*", "/", "//", "%", "**"):
        name = f"f{name}"
    return f"{name}({inside})"
