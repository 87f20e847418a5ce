"""A case: a variant, a format, options and batches, all drawn from one seed."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from math import prod
from random import Random
from typing import Any

from fuzz.facts import draw_facts, later_format, later_tile
from fuzz.flex_forms import PLACES, in_flex
from fuzz.grammar import BOOL, FLOAT, INT, Field, Grammar, Node, at, number
from fuzz.recorders import Output, Recorders
from fuzz.shipped import KNOWN, SCALES, SHIPPED
from fuzz.source import reference_text, torch_text, warploom_text

_REQUEST = ("batch", "q_len", "kv_len", "kv_head", "num_q_heads", "num_kv_heads")
_QUERY = ("q_pos", "q_idx", "q_head", "q_row")
POSITIONS = {
    "query_transform": (*_REQUEST, *_QUERY, "lane", "head_dim"),
    "key_transform": (*_REQUEST, "kv_pos", "lane", "head_dim"),
    "value_transform": (*_REQUEST, "kv_pos", "lane", "head_dim"),
    "logits_transform": (*_REQUEST, *_QUERY, "kv_pos", "kv_pos", "q_pos", "kv_pos"),
    "logits_mask": (*_REQUEST, *_QUERY, "kv_pos", "kv_pos", "q_pos", "kv_pos"),
    "output_transform": (*_REQUEST, *_QUERY, "lane", "head_dim"),
}
VALUES = {"query_transform": "q", "key_transform": "k", "value_transform": "v",
          "logits_transform": "logits", "output_transform": "o", "logits_mask": None}  # fmt: skip
LEAST = -(2 - 2**-23) * 2.0**127  # float32
MOST_ELEMENTS = 1 << 24  # of an input or an output: one of three positions would have 10^10
BENT = """bent = wl.custom_function(
    "bent",
    cuda="WL_FN float bent(float x) { return x / (1.0f + fabsf(x)); }",
    cpp="WL_FN float bent(float x) { return x / (1.0f + abs(x)); }",
    python=lambda x: x / (1.0 + wl.abs(x)),
)
"""


@dataclass(frozen=True)
class Case:
    """One case in trees, so that parts of it can be taken away.

    Attributes:
        seed: what it was drawn from.
        hooks: the generated functors.
        fields: inputs that they read.
        shipped: texts of shipped variants joined with it, each with True if it comes first.
        facts: the rest of the spec: format, heads, dims, types, options, batches.
    """

    seed: int
    hooks: dict[str, Node]
    fields: tuple[Field, ...]
    shipped: tuple[tuple[str, bool], ...]
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        batches = sum(1 + q + k for batch in self.facts["batches"] for q, k in batch)
        nodes = sum(tree.size for tree in self.hooks.values())
        options = sum(bool(x) for x in self.facts.values()) + len(self.facts["options"])
        heads, dims = sum(self.facts["heads"]), sum(self.facts["dims"])
        return 50 * nodes + 20 * len(self.shipped) + batches + 5 * options + heads + dims

    @property
    def transforms_keys(self) -> bool:
        of_shipped = {hook for text, _ in self.shipped for hook, _ in KNOWN[text]}
        return "key_transform" in {*self.hooks, *of_shipped}

    def used(self) -> list[Field]:
        names = {node.data for tree in self.hooks.values() for node in walk(tree)
                 if node.op in ("look", "look_end", "scalar")}  # fmt: skip
        return [f for f in self.fields if f.name in names]

    def outputs(self) -> list[Output]:
        return [node.data for tree in self.hooks.values() for node in walk(tree)
                if isinstance(node.data, Output)]  # fmt: skip

    def spec(self) -> dict[str, Any]:
        """What `harness.check` runs: plain values and text."""
        fields = {f.name: {**asdict(f), "name": None} for f in self.used()}
        outputs = {x.name: {"dtype": x.dtype, "roles": list(x.roles)} for x in self.outputs()}
        spec = {"seed": self.seed, "fields": fields, "outputs": outputs, **self.facts}
        flex = self.facts["front"] == "flex"
        return {**spec, "variant": self._flex() if flex else self._class(),
                "reference": self._reference()}  # fmt: skip

    def _joined(self, own: str) -> str:
        first = [text for text, before in self.shipped if before]
        after = [text for text, before in self.shipped if not before]
        text = " & ".join([*first, own, *after])
        heads, key_heads = map(str, self.facts["heads"])
        return f"VARIANT = {text}\n".replace("KEY_HEADS", key_heads).replace("HEADS", heads)

    def _class(self) -> str:
        lines = ["class Drawn(wl.Variant):", '    """Drawn at random."""']
        if any(node.op == "bent" for tree in self.hooks.values() for node in walk(tree)):
            lines.insert(0, BENT)
        if not self.facts["softmax"]:
            lines.append("    softmax = False")
        for f in self.used():
            roles = "" if f.roles is None else f", {f.roles!r}"
            lines.append(
                f'    {f.name} = wl.{"Scalar" if f.roles is None else "Tensor"}("{f.dtype}"{roles})'
            )
        for x in self.outputs():
            lines.append(f'    {x.name} = wl.Output("{x.dtype}", {x.roles!r})')
        for hook, tree in self.hooks.items():
            given = "" if VALUES[hook] is None else f"{VALUES[hook]}, "
            lines += [f"    def {hook}(self, {given}at):", f"        return {warploom_text(tree)}"]
        return "\n".join(lines) + "\n" + self._joined("Drawn()")

    def _flex(self) -> str:
        lines, args = [], []
        for hook, name in (("logits_transform", "score_mod"), ("logits_mask", "mask_mod")):
            if hook in self.hooks:
                value = "logits, " if hook == "logits_transform" else ""
                lines += [f"def {name}({value}b, h, q_idx, kv_idx):",
                          f"    return {torch_text(in_flex(self.hooks[hook]))}"]  # fmt: skip
                args.append(f"{name}={name}")
        return "\n".join(lines) + "\n" + self._joined(f"wl.flex({', '.join(args)})")

    def _reference(self) -> str:
        lines: list[str] = []
        lists: dict[str, list[str]] = {hook: [] for hook in POSITIONS}
        flex = self.facts["front"] == "flex"  # whose functions torch itself evaluates
        own = [(hook, None if flex else reference_text(tree)) for hook, tree in self.hooks.items()]
        bodies: list[tuple[str, str | None]] = []
        for first in (True, False):
            bodies += [x for text, before in self.shipped if before == first for x in KNOWN[text]]
            bodies += own if first else []
        for n, (hook, text) in enumerate(bodies):
            if text is None:
                lists[hook].append(repr("score_mod" if VALUES[hook] else "mask_mod"))
                continue
            given = "" if VALUES[hook] is None else f"{VALUES[hook]}, "
            lines += [f"def part{n}({given}at, inputs):", f"    return {text}"]
            lists[hook].append(f"part{n}")
        inside = ", ".join(f"{s!r}: [{', '.join(names)}]" for s, names in lists.items())
        return "\n".join(lines) + f"\nFUNCTORS = {{{inside}}}\n"


def walk(tree: Node) -> list[Node]:
    return [tree, *(found for arg in tree.args for found in walk(arg))]


def draw(seed: int, device: str = "cpu") -> Case:
    """The case of a seed: the same on every machine."""
    random = Random(seed)
    flex = random.random() < 0.2
    fields: list[Field] = []
    hooks = _hooks(random, fields, flex)
    facts = draw_facts(random, device, flex)
    facts["format"] = later_format(seed, facts["format"])
    facts["tile"] = later_tile(seed, facts)
    hook = "logits_transform"
    if not flex and hook in hooks and random.random() < 0.3:
        dense = facts["format"][0] == "dense"
        hooks[hook] = Recorders(random, POSITIONS[hook], fields, dense).put(hooks[hook])
        if facts["bounds"] == "cuda_graph":  # which keeps the tensors of the first plan
            facts["record_at"] = "run"
    if any("lane" in (f.roles or ()) for f in fields):
        facts["dims"] = [facts["dims"][0]] * 2
    if any(f.roles and "batch" in f.roles for f in fields):
        facts["batches"] = [batch for batch in facts["batches"] if batch] or [[[1, 1]]]
    shipped: list[tuple[str, bool]] = []
    if facts["kv_dtype"] and not flex and random.random() < 0.7:
        scale = random.choice(list(SCALES))
        if not {"key_transform", "value_transform"} & hooks.keys():  # refused beside most
            shipped.append((scale, True))
    if random.random() < 0.35:
        shipped.append((random.choice(list(SHIPPED)), not flex and random.random() < 0.5))
    if hook in hooks and facts["softmax"]:
        is_scaled = bool(shipped) or facts["lse_base"] == "2"
        hooks[hook] = _later_fill(seed, hooks[hook], is_scaled)
    case = Case(seed, hooks, tuple(fields), tuple(shipped), facts)
    small = [batch for batch in facts["batches"] if _largest(case, [batch]) <= MOST_ELEMENTS]
    while small and facts["bounds"] and _largest(case, small) > MOST_ELEMENTS:
        small.pop()
    facts["batches"] = small or [[[1, 1]]]
    if device != "cpu" and case.transforms_keys and facts["format"][0] != "dense":
        ways = (
            ("before", "before", "auto", "fused") if _may_pretransform(case) else ("auto", "fused")
        )
        facts["options"]["key_transform"] = random.choice(ways)
    return case


def _largest(case: Case, batches: list[list[list[int]]]) -> int:
    """Elements of the largest input or output for a batch, or for any of several with bounds."""
    sizes: Counter[str] = Counter({"q_head": case.facts["heads"][0]})
    for lengths in batches:
        rows, keys = [q for q, _ in lengths] or [0], max([1, *(k for _, k in lengths)])
        q_idx = sum(rows) if case.facts["bounds"] else max(rows)
        sizes |= Counter(batch=len(lengths), q_row=sum(rows), q_idx=q_idx, q_pos=keys, kv_pos=keys)
    roles = [x.roles or () for x in (*case.used(), *case.outputs())]
    return max((prod(sizes.get(role or "", 64) for role in each) for each in roles), default=0)


def _may_pretransform(case: Case) -> bool:
    """Whether keys can be transformed before attention, in docs/options.md's words."""
    facts = case.facts
    bound = facts["bounds"] == "cuda_graph" or "batch_invariant" in facts["options"]
    plain = facts["format"][0] == "ragged" and facts["kv_dtype"] is None
    return case.transforms_keys and plain and not bound


def _hooks(random: Random, fields: list[Field], flex: bool) -> dict[str, Node]:
    names = ["logits_transform", "logits_mask"]
    chosen = [name for name in names if random.random() < 0.75] or names[:1]
    if not flex:
        chosen += [name for name in POSITIONS if name not in names and random.random() < 0.22]
    hooks = {}
    for name in chosen:
        places = tuple(PLACES) if flex else POSITIONS[name]
        grammar = Grammar(random, places, fields, VALUES[name], flex)
        depth = random.choice((1, 2, 3, 4, 4))
        if name == "logits_mask":
            hooks[name] = grammar.fluent(BOOL, depth)
        elif name == "logits_transform":
            hooks[name] = _logits(random, grammar, depth)
        else:
            hooks[name] = _vector(random, grammar, VALUES[name] or "", depth)
    return hooks


def _bounded(random: Random, grammar: Grammar, depth: int) -> Node:
    """A float of ordinary size, so that a softmax over it still sees many keys."""
    if random.random() < 0.5:
        small = Node("%", INT, (grammar.fluent(INT, depth), number(random.choice((2, 5, 13)))))
        return Node("*", FLOAT, (small, number(0.25)))
    low = Node("maximum", FLOAT, (grammar.fluent(FLOAT, depth), number(-4.0)))
    return Node("minimum", FLOAT, (low, number(4.0)))


def _logits(random: Random, grammar: Grammar, depth: int) -> Node:
    roll, logits = random.random(), Node("value", FLOAT, (), "logits")
    if grammar.flex and random.random() < 0.2:
        logits = Node(random.choice("+-*"), FLOAT, (logits, grammar.double()))
    if roll < 0.2:
        return grammar.fluent(FLOAT, depth)
    if roll < 0.85:
        return Node(random.choice("+-*"), FLOAT, (logits, _bounded(random, grammar, depth)))
    pair = (grammar.fluent(BOOL, depth), logits, _bounded(random, grammar, depth))
    return Node("where", FLOAT, pair)


def _later_fill(seed: int, logits: Node, is_scaled: bool) -> Node:
    """Logits of which whole rows may be filled with a large number, as for padding.

    By numbers of its own, so that seeds stay what they were otherwise. What is scaled afterwards,
    by another variant or for logarithms to base 2, must stay finite.
    """
    random = Random(f"fill of {seed}")
    if random.random() >= 0.06:
        return logits
    fill = random.choice((-1e30, -3e37) if is_scaled else (-1e30, -3e37, LEAST))
    row, keys = at("q_idx"), at("kv_pos")
    kept = random.choice(
        (
            Node("<", BOOL, (keys, Node("-", INT, (row, number(random.choice((1, 5, 40))))))),
            Node("!=", BOOL, (Node("%", INT, (row, number(3))), number(1))),
        )
    )
    return Node("where", FLOAT, (kept, logits, number(fill)))


def _vector(random: Random, grammar: Grammar, value: str, depth: int) -> Node:
    x = Node("value", FLOAT, (), value)
    if random.random() < 0.4:
        reduced = random.choice((x, Node("*", FLOAT, (x, x)), Node("abs", FLOAT, (x,))))
        total = Node(random.choice(("sum", "mean", "max")), FLOAT, (reduced,))
        scale = Node("tanh", FLOAT, (Node("*", FLOAT, (total, number(0.1))),))
        x = Node("*", FLOAT, (x, Node("+", FLOAT, (scale, number(1.5)))))
    if random.random() < 0.3:
        part = (number(random.choice((4, 8))),) if random.random() < 0.3 else ()
        turned = Node(random.choice(("rotate_half", "rotate_pairs")), FLOAT, (x, *part))
        x = Node(random.choice("+-"), FLOAT, (x, turned))
    return Node(random.choice("+-*"), FLOAT, (x, _bounded(random, grammar, depth - 1)))
