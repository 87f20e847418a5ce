"""A traced variant as the C++ `struct Variant` that both back ends call.

Only what the user changed is written; the rest is inherited from `IdentityVariant` (see
`templates/common/warploom/variant_base.hpp`, which documents every member).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from warploom.codegen.lowering.interval_cpp import classes_read, decided_function, tile_functions
from warploom.codegen.lowering.key_bits import bits_text, shows_runs
from warploom.codegen.lowering.lane_reads import lane_reads
from warploom.codegen.lowering.linear_bias import LinearBias
from warploom.codegen.lowering.logits_hooks import Language, LogitsHooks, logits_hooks
from warploom.codegen.lowering.lower import C_TYPES, Block, reachable
from warploom.codegen.lowering.records import record_function
from warploom.codegen.lowering.sine_recurrence import SineRecurrence, find_recurrence
from warploom.codegen.lowering.split import Level, Split, lane_parts, tile_parts
from warploom.dsl.masks.open_part import mask_parts
from warploom.dsl.types.ir import REDUCTIONS, Kind, Node, Source
from warploom.dsl.types.spec import SCALAR_HOOKS, TensorField, TracedVariant
from warploom.errors import UnsupportedSpec

_ROW_PARAMETERS = (
    "const Params& p, const TileInfo& tile, const TileState& ts,\n"
    "      const RowInfo& row, const RowState& rs"
)
_ELEMENT_PARAMETERS = f"{_ROW_PARAMETERS}, int kv_pos, const ColState& cs"
# hook: short name in C++, flag, and the parameters that say where its vector is
_VECTOR_HOOKS = (
    ("query_transform", "query", "const RowInfo& row"),
    ("key_transform", "key", "int kv_pos"),
    ("value_transform", "value", "int kv_pos"),
    ("output_transform", "output", "const RowInfo& row, float lse"),
)
_STATES = (
    # level, struct, its function, prefix of members, parameters
    (Level.TILE, "TileState", "tile_state", "t", "const Params& p, const TileInfo& tile"),
    (
        Level.ROW,
        "RowState",
        "row_state",
        "r",
        "const Params& p, const TileInfo& tile, const TileState& ts,\n      const RowInfo& row",
    ),
    (
        Level.COLUMN,
        "ColState",
        "col_state",
        "c",
        "const Params& p, const TileInfo& tile, const TileState& ts, int kv_pos",
    ),
)


def variant_struct(
    variant: TracedVariant,
    language: Language,
    sine_recurrence: bool = False,
    bytes_of_columns: bool = False,
    shifts_rows: bool = False,
    joins_keys: bool = False,
) -> str:
    """C++ text of the variant's custom functions and of `struct Variant`.

    Args:
        variant: the variant.
        language: of the text.
        sine_recurrence: whether sines of angles that grow evenly from key to key may follow from
            one another.
        bytes_of_columns: whether the truths that are kept of a column take little room, though an
            element then tests them with more instructions.
        shifts_rows: whether the softmax adds a bias that grows evenly from key to key.
        joins_keys: whether masks of bounds are worked out for many keys at once.

    Raises:
        UnsupportedSpec: a custom function has no text in this language.
    """
    tensors = {field.name: field for field in variant.tensors}
    on_logits = logits_hooks(variant, language, shifts_rows, joins_keys)
    parts = [_flags(variant, on_logits)]
    parts += _element_hooks(variant, on_logits, tensors, bytes_of_columns)
    if variant.records:
        parts.append(record_function(variant, tensors))
    for hook, short, where in _VECTOR_HOOKS:
        if hook in variant.hooks:
            root, may_recur = variant.hooks[hook], sine_recurrence and "kv_pos" in where
            found = find_recurrence(root) if may_recur else None
            parts.append(_vector_hook(root, short, where, tensors, language, found))
    factors = scale_factors(variant.hooks.get("value_transform"))
    if factors:
        parts.append(_value_scale(factors, tensors))
    body = "\n".join(parts)
    return (
        _custom_functions(variant, language)
        + f"struct Variant : IdentityVariant<Params> {{\n{body}\n}};"
    )


def _custom_functions(variant: TracedVariant, language: Language) -> str:
    text = ""
    for function in variant.functions:
        definition = function.cuda if language == "cuda" else function.cpp
        if definition is None:
            raise UnsupportedSpec(
                what=f"the custom function {function.name!r} on the CPU",
                reason="it was given without C++ text",
                remedy="Give cpp=... beside cuda=..., or run on CUDA tensors.",
            )
        text += definition.rstrip() + "\n\n"
    return text


def _flags(variant: TracedVariant, on_logits: LogitsHooks) -> str:
    vectors = [hook for hook, *_ in _VECTOR_HOOKS if hook in variant.hooks]
    scalars = [hook for hook in SCALAR_HOOKS if hook in on_logits.roots]
    hooks = [*vectors, *scalars, *(["linear_bias"] if on_logits.bias is not None else [])]
    names = [f"kHas{''.join(map(str.capitalize, hook.split('_')))}" for hook in hooks]
    lines = [f"  static constexpr bool {name} = true;" for name in sorted(names)]
    if not variant.softmax:
        lines.append("  static constexpr bool kSoftmax = false;")
    return "\n".join(lines)


def _function(signature: str, block: Block) -> str:
    return "\n".join([f"  WL_FN static {signature} {{", *block.statements, "  }"])


def _element_hooks(
    variant: TracedVariant,
    on_logits: LogitsHooks,
    tensors: Mapping[str, TensorField],
    bytes_of_columns: bool,
) -> list[str]:
    hooks, parts = on_logits.roots, on_logits.states
    levels = [row for row in _STATES if parts.members(row[0])]
    text = [
        _state(row, parts, tensors, bytes_of_columns and row[0] is Level.COLUMN) for row in levels
    ]
    if parts.column:
        text.append("  static constexpr bool kHasColState = true;")
    bound = parts.bound(Level.ELEMENT)
    if any(found.op == "load" for found in reachable(list(hooks.values()), bound)):
        text.append("  static constexpr bool kLoadsElements = true;")
    if "logits_transform" in hooks:
        block = _returning(hooks["logits_transform"], Block(tensors, bound))
        text.append(_function(f"float logits({_ELEMENT_PARAMETERS}, float logits)", block))
    if on_logits.factor is not None:
        block = _returning(on_logits.factor, Block({}), variant.hooks["logits_transform"].source)
        text.append(_function("float logits_factor(const Params& p)", block))
    if on_logits.bias is not None:
        of_row = _without(bound, parts.column)
        source = variant.hooks["logits_transform"].source
        text += _linear_bias(on_logits.bias, source, of_row, tensors)
    if "logits_mask" in hooks:
        text += _mask_functions(variant.hooks["logits_mask"], hooks, bound, tensors)
    if on_logits.is_of_bounds:
        text += _key_bits(hooks["logits_mask"], Block(tensors, bound))
    return text


def _key_bits(mask: Node, block: Block) -> list[str]:
    block.finish(f"return {bits_text(mask, block)};", mask.source)
    text = ["  static constexpr bool kMaskIsOfBounds = true;"]
    if shows_runs(mask):
        text.append("  static constexpr bool kMaskShowsRuns = true;")
    signature = f"typename Keys::Bits key_bits({_ROW_PARAMETERS}, const Keys& keys)"
    return [*text, "  template <class Keys>", _function(signature, block)]


def _linear_bias(
    bias: LinearBias,
    source: Source | None,
    bound: Mapping[Node, str],
    tensors: Mapping[str, TensorField],
) -> list[str]:
    """The bias at a key, and how it grows from key to key."""
    slope = _returning(bias.slope, Block(tensors, bound), source)
    value = _returning(bias.node(), Block(tensors, bound), source)
    return [
        _function(f"float slope({_ROW_PARAMETERS})", slope),
        _function(f"float linear_bias({_ROW_PARAMETERS}, int kv_pos)", value),
    ]


def _mask_functions(
    of_variant: Node,
    hooks: Mapping[str, Node],
    bound: Mapping[Node, str],
    tensors: Mapping[str, TensorField],
) -> list[str]:
    block = _returning(hooks["logits_mask"], Block(tensors, bound), of_variant.source)
    text = [_function(f"bool mask({_ELEMENT_PARAMETERS})", block)]
    text.append(tile_functions(of_variant, tensors))
    if classes_read(of_variant, frozenset(tensors)):
        text.append("  static constexpr bool kClassesRead = true;")
    parts = mask_parts(of_variant, frozenset(tensors))
    if parts is not None and "open_part" in hooks:  # not a mask of bounds
        block = _returning(hooks["open_part"], Block(tensors, bound), of_variant.source)
        text.append("  static constexpr bool kMaskHasParts = true;")
        text.append(_function(f"bool open_part({_ELEMENT_PARAMETERS})", block))
        text.append(decided_function(parts.decided_may_hide, tensors))
    return text


def _returning(root: Node, block: Block, source: Source | None = None) -> Block:
    (result,) = block.compute([root])
    block.finish(f"return {result};", root.source or source)
    return block


def _kept_type(member: Node, as_bytes: bool) -> str:
    """Truths are kept as numbers: compilers test them as predicates, but join bools as bytes."""
    return C_TYPES[Kind.INT if member.kind is Kind.BOOL and not as_bytes else member.kind]


def _state(
    row: tuple[Level, str, str, str, str],
    parts: Split,
    tensors: Mapping[str, TensorField],
    as_bytes: bool,
) -> str:
    level, struct, name, prefix, parameters = row
    members = parts.members(level)
    fields = " ".join(
        f"{_kept_type(node, as_bytes)} {prefix}{i};" for i, node in enumerate(members)
    )
    block = Block(tensors, parts.bound(level))
    values = block.compute(members)
    for i, (node, value) in enumerate(zip(members, values, strict=True)):
        opening, closing = "return {" * (i == 0), "};" if node is members[-1] else ","
        block.finish(f"{opening or ' ' * 8}{value}{closing}", node.source)
    return f"  struct {struct} {{ {fields} }};\n" + _function(
        f"{struct} {name}({parameters})", block
    )


def _vector_hook(
    root: Node,
    short: str,
    where: str,
    tensors: Mapping[str, TensorField],
    language: Language,
    recurrence: SineRecurrence | None,
) -> str:
    reductions = [node for node in reachable([root]) if node.op in REDUCTIONS]
    bound = {
        node: f"r[{i}]" if node.kind is Kind.FLOAT else f"int(r[{i}])"
        for i, node in enumerate(reductions)
    }
    halves, reads = lane_reads(root)
    if language == "cuda":  # on a CPU, vector registers hold one lane of many vectors
        bound |= reads
    parameters = (
        "const Params& p, const TileInfo& tile, {}\n"
        "      int lane, int head_dim, const X& x, const float* r"
    )
    plain = parameters.format(f"{where},")
    text = _reductions(short, plain, reductions, bound, tensors) if reductions else []
    kept = lane_parts(root)
    text.append(_lane_state(short, kept, tensors))
    if language == "cuda" and halves:
        text.append(f"  static constexpr int k{short.capitalize()}Halves = {halves};")
    of_lane = {node: f"ls.l{i}" for i, node in enumerate(kept)}
    if recurrence is not None:
        text.append(_recurrence(short, recurrence, of_lane, tensors))
    calls = recurrence.calls if recurrence is not None else {}
    block = _returning(root, Block(tensors, bound | of_lane, calls=calls))
    with_state = parameters.format(f"{where}, const {short.capitalize()}Lane& ls,")
    text.append("  template <class X>\n" + _function(f"float {short}({with_state})", block))
    return "\n".join(text)


def _recurrence(
    short: str,
    recurrence: SineRecurrence,
    of_lane: Mapping[Node, str],
    tensors: Mapping[str, TensorField],
) -> str:
    """An angle that grows evenly from key to key, and its growth."""
    parameters = (
        "const Params& p, const TileInfo& tile, {}"
        f"const {short.capitalize()}Lane& ls,\n      int lane, int head_dim"
    )
    angle, rate = (
        _returning(root, Block(tensors, of_lane)) for root in (recurrence.angle, recurrence.rate)
    )
    return "\n".join(
        (
            f"  static constexpr bool k{short.capitalize()}SineRecurrence = true;",
            f"  WL_FN static constexpr int {short}_angle_lane(int lane, int head_dim) {{\n"
            f"    return {recurrence.owner};\n  }}",
            _function(f"float {short}_angle({parameters.format('int kv_pos, ')})", angle),
            _function(f"float {short}_rate({parameters.format('')})", rate),
        )
    )


def _lane_state(short: str, lanes: tuple[Node, ...], tensors: Mapping[str, TensorField]) -> str:
    """What depends on the lane alone, and of that what does not even depend on the lane."""
    name = short.capitalize()
    once = tile_parts(lanes)
    bound = {node: f"ts.t{i}" for i, node in enumerate(once)}
    common = "const Params& p, const TileInfo& tile"
    lane = f"{common}, const {name}Tile& ts, int lane, int head_dim"
    return "\n".join(
        (
            _float_struct(f"{name}Tile", "t", once, f"{short}_tile({common})", Block(tensors)),
            _float_struct(
                f"{name}Lane", "l", lanes, f"{short}_lane({lane})", Block(tensors, bound)
            ),
        )
    )


def _float_struct(
    struct: str, prefix: str, members: tuple[Node, ...], signature: str, block: Block
) -> str:
    fields = "".join(f" float {prefix}{i};" for i in range(len(members)))
    block.finish(f"return {{{', '.join(block.compute(members))}}};")
    return f"  struct {struct} {{{fields} }};\n" + _function(f"{struct} {signature}", block)


def scale_factors(root: Node | None) -> tuple[Node, ...]:
    """Factors of a vector hook that only multiplies its vector by one number; else empty.

    The portable CUDA kernel multiplies the weights of the softmax with those of values, which costs
    a product per key and row in place of a pass over the staged tile.
    """
    if root is None or root.op != "mul":
        return ()
    for vector, factor in (root.args, root.args[::-1]):
        inner = scale_factors(vector)
        is_vector = vector.op == "element" and vector.args[0].attr == "lane"
        if (is_vector or inner) and not _reads_vector(factor):
            return (*inner, factor)
    return ()


def _reads_vector(root: Node) -> bool:
    return any(
        found.op == "element" or found.op in REDUCTIONS or found.attr == "lane"
        for found in reachable([root])
    )


def _value_scale(factors: tuple[Node, ...], tensors: Mapping[str, TensorField]) -> str:
    block = Block(tensors)
    block.finish(f"return {' * '.join(f'({text})' for text in block.compute(factors))};")
    signature = "float value_scale(const Params& p, const TileInfo& tile, int kv_pos, int head_dim)"
    flag = "  static constexpr bool kScalesValues = true;\n"
    return flag + _function(signature, block)


def _without(bound: Mapping[Node, str], nodes: Sequence[Node]) -> dict[Node, str]:
    return {node: text for node, text in bound.items() if node not in nodes}


def _reductions(
    short: str,
    parameters: str,
    reductions: list[Node],
    bound: Mapping[Node, str],
    tensors: Mapping[str, TensorField],
) -> list[str]:
    """Reductions over lanes: the value at one lane, the neutral value, and the operator."""
    count = f"  static constexpr int k{short.capitalize()}Reductions = {len(reductions)};"
    lanes = Block(tensors)
    for i, node in enumerate(reductions):
        inner = Block(tensors, _without(bound, reductions[i:]), indent=6)
        lanes.finish(f"if constexpr (I == {i}) {{")
        lanes.statements += _returning(node.args[0], inner).statements
        lanes.finish("}")
    reduce = "  template <int I, class X>\n" + _function(
        f"float {short}_reduce({parameters})", lanes
    )
    is_max = " || ".join(f"I == {i}" for i, n in enumerate(reductions) if n.op == "max_lanes")
    if not is_max:
        return [count, reduce]  # the inherited operator is the sum
    identity, combine = Block({}), Block({})
    identity.finish(f"return {is_max} ? -kInfinity : 0.0f;")
    combine.finish(f"return {is_max} ? max(a, b) : a + b;")
    return [
        count,
        reduce,
        "  template <int I>\n" + _function(f"float {short}_identity()", identity),
        "  template <int I>\n" + _function(f"float {short}_combine(float a, float b)", combine),
    ]
