"""What a case has that others may lack, and a choice of seeds that together have everything.

`PYTHONPATH=tests python -m fuzz.coverage` chooses anew, after the generator has changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

from fuzz.cases import POSITIONS, Case, draw, walk
from fuzz.facts import NARROW
from fuzz.grammar import UNARY_FLOAT
from fuzz.shipped import KNOWN
from fuzz.source import NAMES

FORMATS = ("dense", "ragged", "paged", "composed", "block_sparse", "selection", "rolling")
INTS = ("uint8", "int8", "int16", "int32", "int64")
FLOATS = ("float16", "bfloat16", "float32")
OPERATIONS = (*(op for op in NAMES if op not in ("+", "-", "*")), *UNARY_FLOAT)
OPERATIONS += ("abs", "bent", "ceil", "clamp", "floor", "fmod", "invert", "isinf", "isnan", "max",
               "maximum", "mean", "minimum", "neg", "rotate_half", "rotate_pairs", "rpow", "sum",
               "to_bool", "to_float", "to_int", "where", "form", "+", "-", "*", "record",
               "then")  # fmt: skip


def required() -> set[str]:
    """What recorded seeds must have."""
    found = {f"hook {name}" for name in POSITIONS}
    found |= {f"format {name}" for name in FORMATS} | {"front flex", "front variant"}
    found |= {f"dtype {name}" for name in FLOATS} | {f"stored {name}" for name in NARROW}
    found |= {f"variant reads {name}" for name in (*FLOATS, *INTS, "bool")}
    found |= {f"flex reads {name}" for name in (*FLOATS, *INTS, "bool", "float64")}
    found |= {f"scalar {name}" for name in (*FLOATS, *INTS, "bool")}
    found |= {f"operation {name}" for name in OPERATIONS} | {f"shipped {name}" for name in KNOWN}
    found |= {f"lanes {n}" for n in (8, 72, 80, 256)} | {"lanes of values", "threads", "out"}
    found |= {f"role {name}" for name in ("batch", "q_head", "kv_head", "lane", "q_row", "q_pos",
                                          "kv_pos", "None")}  # fmt: skip
    found |= {"one head", "heads in groups", "one key head", "layout HND", "gaps", "joined"}
    found |= {"option sm_limit", "option batch_invariant", "option backend", "bounds bounds",
              "bounds cuda_graph", "no softmax", "base 2", "scale", "indices torch", "wide ints",
              "levels", "page of 1", "odd page", "no rows", "no keys", "depth 4",
              "whole ring", "positions in the cache", "two roles"}  # fmt: skip
    for name in (*FORMATS, "flex", "NumPy", "given tensors", "rows without keys"):
        found.add(f"largest scores, {name}")
    for name in (*FORMATS, "NumPy", "rows without keys", "no softmax", "a shipped mask"):
        found.add(f"records, {name}")
    found |= {f"records {name}" for name in FLOATS} | {"records two", "records at run"}
    found |= {f"records by {role}" for role in ("q_idx", "q_pos", "q_row")}
    return found | {f"aux {name}" for name in ("lse", "max_scores", "both")} | {"aux, no softmax"}


def features(case: Case) -> set[str]:
    """What a case has, in the words of `required`."""
    facts = case.facts
    nodes = [node for tree in case.hooks.values() for node in walk(tree)]
    found = {f"hook {name}" for name in case.hooks} | {f"front {facts['front']}"}
    found |= {f"operation {node.op}" for node in nodes}
    found |= {f"shipped {text}" for text, _ in case.shipped}
    found |= {f"lanes {n}" for n in facts["dims"]} | {f"option {name}" for name in facts["options"]}
    for name in ("dtype", "layout", "bounds", "indices"):
        found.add(f"{name} {facts[name]}")
    for field in case.used():
        front = "scalar" if field.roles is None else f"{facts['front']} reads"
        found.add(f"{front} {field.dtype}")
        found |= {f"role {role}" for role in field.roles or ()}
        found |= {"wide ints"} if field.wide else set()
    found |= {f"stored {facts['kv_dtype']}", f"format {facts['format'][0]}"}
    (hq, hk), (d, dv) = facts["heads"], facts["dims"]
    lengths = [pair for batch in facts["batches"] for pair in batch]
    named = {
        "lanes of values": d != dv, "threads": facts["threads"] > 1, "out": facts["out"],
        "one head": hq == hk == 1, "heads in groups": hq > hk > 1, "one key head": hq > hk == 1,
        "gaps": facts["strided"], "joined": facts["joined"] and facts["format"][0] == "paged",
        "no softmax": not facts["softmax"], "base 2": facts["lse_base"] == "2",
        "scale": facts["sm_scale"] is not None, "page of 1": facts["format"] == ["paged", 1],
        "odd page": facts["format"] in (["paged", 3], ["paged", 5], ["paged", 7]),
        "levels": facts["format"][0] == "composed" and facts["format"][3] > 0,
        "whole ring": facts["format"][0] == "rolling"
        and any(k > sum(facts["format"][1:3]) for _, k in lengths),
        "positions in the cache": facts["format"][-1] == "cache",
        "two roles": facts["tile"] is not None and facts["tile"][0] == "roles",
        "no rows": any(q == 0 for q, _ in lengths), "no keys": any(k == 0 for _, k in lengths),
        "depth 4": any(_depth(tree) > 4 for tree in case.hooks.values()),
    }  # fmt: skip
    found |= {name for name, holds in named.items() if holds}
    return found | _looked_at(case, found)


def _looked_at(case: Case, others: set[str]) -> set[str]:
    """What is asked for besides the output, and in which surroundings."""
    facts, outputs = case.facts, case.outputs()
    found = {f"aux {facts['aux']}"} | ({"aux, no softmax"} if not facts["softmax"] else set())
    found = found if facts["aux"] else set()
    around = {facts["format"][0], facts["front"]}
    named = {
        "NumPy": facts["options"].get("backend") == "reference", "given tensors": facts["out"],
        "rows without keys": "no keys" in others, "no softmax": not facts["softmax"],
        "a shipped mask": any("logits_mask" in dict(KNOWN[text]) for text, _ in case.shipped),
    }  # fmt: skip
    around |= {name for name, holds in named.items() if holds}
    if facts["aux"] in ("max_scores", "both"):
        found |= {f"largest scores, {name}" for name in around}
    if outputs:
        found |= {f"records, {name}" for name in around}
        found |= {f"records at {facts['record_at']}", "records two" if outputs[1:] else ""}
    for output in outputs:
        found |= {f"records {output.dtype}", *(f"records by {role}" for role in output.roles)}
    return found


def pairs(case: Case) -> set[tuple[str, str]]:
    """Which format, types, options and requests meet in a case."""
    facts = case.facts
    around = {facts["front"], facts["dtype"], facts["layout"], f"format {facts['format'][0]}"}
    around |= {f"option {name}" for name in facts["options"]}
    around |= {f"{name} {facts[name]}" for name in ("bounds", "indices", "aux", "kv_dtype")}
    return set(combinations(sorted(around), 2))


def _depth(tree: object) -> int:
    return 1 + max((_depth(arg) for arg in tree.args), default=0)  # type: ignore[attr-defined]


def choose(seeds: Iterable[int]) -> list[int]:
    """Few of the seeds that together have all that is required, by what each adds."""
    missing, known = required(), {seed: features(draw(seed)) for seed in seeds}
    chosen = []
    while missing:
        best = max(known, key=lambda seed: len(known[seed] & missing))  # the first of equals
        if not known[best] & missing:
            raise LookupError(f"no seed has {sorted(missing)}")
        chosen.append(best)
        missing -= known.pop(best)
    return sorted(chosen)


if __name__ == "__main__":
    print(choose(range(4000)))
