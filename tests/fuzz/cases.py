"""A case: a variant, a format, options and batches, all drawn from one seed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from random import Random
from typing import Any

from fuzz.grammar import BOOL, FLOAT, INT, Field, Grammar, Node, number
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
BORDERS = (0, 1, 2, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
FAR = (255, 256, 257, 383, 384, 385, 500)
FLEX_PLACES = {"batch": "b", "q_head": "h", "q_idx": "q_idx", "kv_pos": "kv_idx"}
# Shipped variants that generated ones are joined with: their text, and what they do
SHIPPED = {
    "wl.Causal()": ("logits_mask", "le(at['kv_pos'], at['q_pos'])"),
    "wl.SlidingWindow(9)": (
        "logits_mask", "ge(at['kv_pos'], sub(maximum(at['q_pos'], num(0)), num(9)))"),
    "wl.SlidingWindow(70, 0)": (
        "logits_mask",
        "le(at['kv_pos'], at['q_pos']) & ge(at['kv_pos'], sub(at['q_pos'], num(70)))"),
    "wl.SoftCap(5.0)": ("logits_transform", "fmul(num(5.0), tanh(fdiv(logits, num(5.0))))"),
    "wl.Alibi(torch.arange(1, 257)[:HEADS] / 64)": (
        "logits_transform",
        "fadd(logits, fmul(fdiv(to_float(add(at['q_head'], num(1))), num(64.0)), "
        "to_float(sub(at['kv_pos'], at['q_pos']))))"),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One case in trees, so that parts of it can be taken away.

    Attributes:
        seed: what it was drawn from.
        seats: the generated functors.
        fields: inputs that they read.
        shipped: texts of shipped variants joined with it, each with True if it comes first.
        facts: the rest of the spec: format, heads, dims, types, options, batches.
    """

    seed: int
    seats: dict[str, Node]
    fields: tuple[Field, ...]
    shipped: tuple[tuple[str, bool], ...]
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        batches = sum(1 + q + k for batch in self.facts["batches"] for q, k in batch)
        nodes = sum(tree.size for tree in self.seats.values())
        options = sum(bool(x) for x in self.facts.values()) + len(self.facts["options"])
        heads, dims = sum(self.facts["heads"]), sum(self.facts["dims"])
        return 50 * nodes + 20 * len(self.shipped) + batches + 5 * options + heads + dims

    def used(self) -> list[Field]:
        names = {node.data for tree in self.seats.values() for node in walk(tree)
                 if node.op in ("look", "look_end", "scalar")}  # fmt: skip
        return [f for f in self.fields if f.name in names]

    def spec(self) -> dict[str, Any]:
        """What `harness.check` runs: plain values and text."""
        fields = {f.name: {**asdict(f), "name": None} for f in self.used()}
        spec = {"seed": self.seed, "fields": fields, **self.facts}
        flex = self.facts["front"] == "flex"
        return {**spec, "variant": self._flex() if flex else self._class(),
                "reference": self._reference()}  # fmt: skip

    def _joined(self, own: str) -> str:
        first = [text for text, before in self.shipped if before]
        after = [text for text, before in self.shipped if not before]
        text = " & ".join([*first, own, *after])
        return f"VARIANT = {text}\n".replace("HEADS", str(self.facts["heads"][0]))

    def _class(self) -> str:
        lines = ["class Drawn(wl.Variant):", '    """Drawn at random."""']
        if not self.facts["softmax"]:
            lines.append("    softmax = False")
        for f in self.used():
            roles = "" if f.roles is None else f", {f.roles!r}"
            lines.append(
                f'    {f.name} = wl.{"Scalar" if f.roles is None else "Tensor"}("{f.dtype}"{roles})'
            )
        for seat, tree in self.seats.items():
            given = "" if VALUES[seat] is None else f"{VALUES[seat]}, "
            lines += [f"    def {seat}(self, {given}at):", f"        return {warploom_text(tree)}"]
        return "\n".join(lines) + "\n" + self._joined("Drawn()")

    def _flex(self) -> str:
        lines, args = [], []
        for seat, name in (("logits_transform", "score_mod"), ("logits_mask", "mask_mod")):
            if seat in self.seats:
                value = "logits, " if seat == "logits_transform" else ""
                lines += [f"def {name}({value}b, h, q_idx, kv_idx):",
                          f"    return {torch_text(in_flex(self.seats[seat]))}"]  # fmt: skip
                args.append(f"{name}={name}")
        return "\n".join(lines) + "\n" + self._joined(f"wl.flex({', '.join(args)})")

    def _reference(self) -> str:
        lines, lists = [], {seat: [] for seat in POSITIONS}
        parts = [(text, before) for text, before in self.shipped if before]
        own = [(seat, reference_text(tree)) for seat, tree in self.seats.items()]
        bodies = [SHIPPED[text] for text, _ in parts] + own
        bodies += [SHIPPED[text] for text, before in self.shipped if not before]
        for n, (seat, text) in enumerate(bodies):
            given = "" if VALUES[seat] is None else f"{VALUES[seat]}, "
            lines += [f"def part{n}({given}at, inputs):", f"    return {text}"]
            lists[seat].append(f"part{n}")
        own_first = any(seat == "logits_transform" for seat, _ in own)
        if self.facts["front"] == "flex" and own_first:  # the mod stands first, to be found there
            assert not parts
        inside = ", ".join(f"{s!r}: [{', '.join(names)}]" for s, names in lists.items())
        return "\n".join(lines) + f"\nFUNCTORS = {{{inside}}}\n"


def walk(tree: Node) -> list[Node]:
    return [tree, *(found for arg in tree.args for found in walk(arg))]


def in_flex(tree: Node) -> Node:
    """The tree with positions under FlexAttention's names."""
    args = tuple(in_flex(arg) for arg in tree.args)
    data = FLEX_PLACES[str(tree.data)] if tree.op == "at" else tree.data
    return replace(tree, args=args, data=data)


def draw(seed: int, device: str = "cpu") -> Case:
    """The case of a seed: the same on every machine."""
    random = Random(seed)
    flex = random.random() < 0.2
    fields: list[Field] = []
    seats = _seats(random, fields, flex)
    facts = _facts(random, device, flex)
    if any("lane" in (f.roles or ()) for f in fields):
        facts["dims"] = [facts["dims"][0]] * 2
    if any(f.roles and "batch" in f.roles for f in fields):
        facts["batches"] = [batch for batch in facts["batches"] if batch] or [[[1, 1]]]
    shipped: list[tuple[str, bool]] = []
    if random.random() < 0.35:
        shipped.append((random.choice(list(SHIPPED)), not flex and random.random() < 0.5))
    return Case(seed, seats, tuple(fields), tuple(shipped), facts)


def _seats(random: Random, fields: list[Field], flex: bool) -> dict[str, Node]:
    names = ["logits_transform", "logits_mask"]
    chosen = [name for name in names if random.random() < 0.75] or names[:1]
    if not flex:
        chosen += [name for name in POSITIONS if name not in names and random.random() < 0.22]
    seats = {}
    for name in chosen:
        places = tuple(FLEX_PLACES) if flex else POSITIONS[name]
        grammar = Grammar(random, places, fields, VALUES[name], flex)
        depth = random.choice((1, 2, 3, 4, 4))
        if name == "logits_mask":
            seats[name] = grammar.fluent(BOOL, depth)
        elif name == "logits_transform":
            seats[name] = _logits(random, grammar, depth)
        else:
            seats[name] = _vector(random, grammar, VALUES[name] or "", depth)
    return seats


def _bounded(random: Random, grammar: Grammar, depth: int) -> Node:
    """A float of ordinary size, so that a softmax over it still sees many keys."""
    if random.random() < 0.5:
        small = Node("%", INT, (grammar.fluent(INT, depth), number(random.choice((2, 5, 13)))))
        return Node("*", FLOAT, (small, number(0.25)))
    low = Node("maximum", FLOAT, (grammar.fluent(FLOAT, depth), number(-4.0)))
    return Node("minimum", FLOAT, (low, number(4.0)))


def _logits(random: Random, grammar: Grammar, depth: int) -> Node:
    roll, logits = random.random(), Node("value", FLOAT, (), "logits")
    if roll < 0.2:
        return grammar.fluent(FLOAT, depth)
    if roll < 0.85:
        return Node(random.choice("+-*"), FLOAT, (logits, _bounded(random, grammar, depth)))
    pair = (grammar.fluent(BOOL, depth), logits, _bounded(random, grammar, depth))
    return Node("where", FLOAT, pair)


def _vector(random: Random, grammar: Grammar, value: str, depth: int) -> Node:
    x = Node("value", FLOAT, (), value)
    if random.random() < 0.4:
        reduced = random.choice((x, Node("*", FLOAT, (x, x)), Node("abs", FLOAT, (x,))))
        total = Node(random.choice(("sum", "mean", "max")), FLOAT, (reduced,))
        scale = Node("tanh", FLOAT, (Node("*", FLOAT, (total, number(0.1))),))
        x = Node("*", FLOAT, (x, Node("+", FLOAT, (scale, number(1.5)))))
    if random.random() < 0.3:
        turned = Node(random.choice(("rotate_half", "rotate_pairs")), FLOAT, (x,))
        x = Node(random.choice("+-"), FLOAT, (x, turned))
    return Node(random.choice("+-*"), FLOAT, (x, _bounded(random, grammar, depth - 1)))


def _lengths(random: Random, most: int, dense: bool) -> list[list[int]]:
    far = random.random() < 0.2
    pool = (*BORDERS, *FAR) if far else BORDERS
    count = random.choice((1, 1, 2, 3)) if far else random.choice((1, 2, 3, 5))
    found = []
    for _ in range(count):
        keys = random.choice(pool) if random.random() < 0.8 else random.randint(0, most)
        roll = random.random()
        rows = 1 if roll < 0.25 else keys if roll < 0.4 else random.choice(pool)
        found.append([rows, keys])
    if dense:
        found = [[max(1, found[0][0]), max(1, keys)] for _, keys in found]
    return found


def _facts(random: Random, device: str, flex: bool) -> dict[str, Any]:
    page = random.choice((1, 1, 2, 3, 5, 16, 16, 32, 64))
    block = [random.choice((1, 2, 3, 16, 64, 70)), random.choice((1, 2, 8, 16, 33, 64))]
    share = random.choice((1, 2, 4, 20))
    formats = [["dense"], ["ragged"], ["ragged"], ["paged", page], ["paged", page],
               ["composed", page, share], ["block_sparse", *block], ["selection", page]]  # fmt: skip
    kind = random.choice(formats)
    hk, group = random.choice((1, 1, 2, 3, 4)), random.choice((1, 1, 2, 3, 4, 7, 8))
    d = random.choice((8, 16, 24, 32, 40, 64, 64, 64, 72, 80, 96, 128, 128, 192, 256))
    dv = d if random.random() < 0.8 else random.choice((8, 16, 48, 64, 128))
    dtype = random.choice(("float32", "float32", "float32", "bfloat16", "float16"))
    if device != "cpu":
        dtype = random.choice(("bfloat16", "float16"))
    narrow = random.random() < 0.1 and (device == "cpu" or (d % 16 == 0 and dv % 16 == 0))
    options: dict[str, Any] = {}
    if kind[0] != "dense" and random.random() < 0.2:
        options["sm_limit"] = random.choice((1, 2, 3))
    if kind[0] not in ("dense", "composed") and random.random() < 0.15:
        options["batch_invariant"] = True
    bounded = kind[0] in ("ragged", "paged", "block_sparse") and random.random() < 0.3
    batches = [_lengths(random, 200, kind[0] == "dense") for _ in range(random.choice((2, 3, 4)))]
    return {
        "device": device,
        "front": "flex" if flex else "variant",
        "format": kind,
        "layout": random.choice(("NHD", "HND")),
        "heads": [hk * group, hk],
        "dims": [d, dv],
        "dtype": dtype,
        "kv_dtype": random.choice(("float8_e4m3fn", "float8_e5m2", "int8")) if narrow else None,
        "sm_scale": random.choice((None, None, None, 0.5, 0.01, 30.0)),
        "q_size": random.choice((1.0, 1.0, 1.0, 20.0)),
        "softmax": flex or random.random() < 0.85,
        "strided": random.random() < 0.25,
        "joined": random.random() < 0.5,
        "out": random.random() < 0.3,
        "lse_base": "2" if random.random() < 0.15 else "e",
        "options": options,
        "bounds": random.choice(("bounds", "cuda_graph")) if bounded else None,
        "batches": batches,
        "threads": random.choice((1, 1, 2, 3)),
    }
