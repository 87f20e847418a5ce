"""What functions for FlexAttention say beside operators: torch's functions and methods."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from fuzz.grammar import BOOL, FLOAT, INT, Node

PLACES = {"batch": "b", "q_head": "h", "q_idx": "q_idx", "kv_pos": "kv_idx"}
_F = "torch.nn.functional"
_X, _XX, _I, _II, _B, _BB = (FLOAT,), (FLOAT,) * 2, (INT,), (INT,) * 2, (BOOL,), (BOOL,) * 2

# Texts, and the kinds of what stands in their braces. Arguments stay where torch defines results.
FORMS: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    FLOAT: (
        *((f"{_F}.{name}({{0}})", _X) for name in ("relu", "silu", "gelu", "softplus", "elu")),
        (f"{_F}.gelu({{0}}, approximate='tanh')", _X),
        (f"{_F}.softplus({{0}}, beta=3.0, threshold=2.0)", _X),
        (f"{_F}.elu({{0}}, alpha=0.3)", _X),
        (f"{_F}.leaky_relu({{0}}, 0.2)", _X),
        ("torch.lerp({0}, {1}, 0.25)", _XX),
        ("torch.lerp({0}, {1}, {2})", (FLOAT,) * 3),
        ("torch.max({0}, {1})", _XX),
        ("{0}.min({1})", _XX),
        ("{0}.masked_fill({1}, -1.5)", (FLOAT, BOOL)),
        ("torch.sign({0})", _X),
        ("torch.round({0})", _X),
        ("{0}.trunc()", _X),
        ("torch.square({0})", _X),
        ("torch.reciprocal(torch.abs({0}) + 0.5)", _X),
        ("torch.remainder({0}, 3.0)", _X),
        ("torch.fmod({0}, -1.5)", _X),
        ("torch.div({0}, 3.0, rounding_mode='trunc')", _X),
        ("torch.div({0}, -0.5, rounding_mode='floor')", _X),
        ("torch.pow({0}, 2)", _X),
        ("2.0 ** torch.clamp({0}, -6.0, 6.0)", _X),
        ("torch.clamp({0}, 0.5, 4.0) ** 1.5", _X),
        ("torch.clamp({0}, min=-2.0)", _X),
        ("torch.add({0}, {1}, alpha=2)", _XX),
        ("torch.rsub({0}, {1})", _XX),
        ("{0} + {1}", (FLOAT, BOOL)),
        ("{0} * {1}", (BOOL, FLOAT)),
        ("torch.zeros_like({0}) - {1}", _XX),
        ("torch.full_like({0}, 0.75) * {1}", _XX),
        ("{0}.to(torch.float32)", _X),
        ("{0}.float() * 0.125", _I),
    ),
    INT: (
        *((f"{{0}}.to(torch.{name})", _I) for name in ("int8", "uint8", "int16", "int32")),
        *((f"{{0}}.to(torch.{name})", _B) for name in ("int8", "uint8", "int16", "int32")),
        ("{0}.long().int()", _I),
        ("({0} + 1).int()", _B),
        ("{0} * {1}", (BOOL, INT)),
        ("{0} + {1}", (INT, BOOL)),
        ("torch.max({0}, {1})", _II),
        ("{0}.min({1})", _II),
        ("torch.sign({0})", _I),
        ("torch.square({0})", _I),
        ("torch.fmod({0}, 3)", _I),
        ("torch.remainder({0}, 5)", _I),
        ("torch.div({0}, 3, rounding_mode='trunc')", _I),
        ("torch.div({0}, 7, rounding_mode='floor')", _I),
        ("torch.bitwise_and({0}, {1})", _II),
        ("torch.bitwise_xor({0}, {1})", _II),
        ("torch.bitwise_not({0})", _I),
        ("{0}.masked_fill({1}, 3)", (INT, BOOL)),
        ("{0}.int() << 8", _I),
        ("{0}.int() >> 31", _I),
    ),
    BOOL: (
        ("torch.isnan({0})", _X),
        ("torch.isnan(torch.log({0}))", _X),
        ("torch.isinf(torch.where({0}, float('inf'), {1}))", (BOOL, FLOAT)),
        ("torch.isfinite({0})", _X),
        ("torch.logical_and({0}, {1})", (BOOL, INT)),
        ("torch.logical_or({0}, {1})", _BB),
        ("torch.logical_xor({0}, {1})", _BB),
        ("torch.logical_not({0})", _I),
        ("torch.bitwise_or({0}, {1})", _BB),
        ("{0} + {1}", _BB),
        ("{0} * {1}", _BB),
        ("torch.less_equal({0}, {1})", _II),
        ("torch.ne({0}, {1})", _XX),
        ("{0}.masked_fill({1}, True)", _BB),
    ),
}


def draw_form(random: Random, kind: str) -> tuple[str, tuple[str, ...]]:
    return random.choice(FORMS[kind])


def in_flex(tree: Node) -> Node:
    """The tree with positions under FlexAttention's names."""
    args = tuple(in_flex(arg) for arg in tree.args)
    data = PLACES[str(tree.data)] if tree.op == "at" else tree.data
    return replace(tree, args=args, data=data)
