"""A failing case made smaller, as long as it fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from fuzz.cases import Case
from fuzz.grammar import Node

PLAIN = {"layout": "NHD", "kv_dtype": None, "sm_scale": None, "q_size": 1.0, "strided": False,
         "joined": False, "out": False, "lse_base": "e", "options": {}, "bounds": None,
         "threads": 1, "softmax": True, "dtype": "float32", "heads": [1, 1], "tile": None,
         "indices": "numpy", "aux": None, "record_at": "plan", "format": ["ragged"]}  # fmt: skip


def subtrees(tree: Node, kind: str) -> Iterator[Node]:
    """What of the same kind lies below a node."""
    for arg in tree.args:
        if arg.kind == kind and not arg.is_number:
            yield arg
        yield from subtrees(arg, kind)


def smaller_trees(tree: Node) -> Iterator[Node]:
    yield from subtrees(tree, tree.kind)
    for n, arg in enumerate(tree.args):
        for smaller in smaller_trees(arg):
            yield replace(tree, args=(*tree.args[:n], smaller, *tree.args[n + 1 :]))


def smaller_batches(batches: list[list[list[int]]]) -> Iterator[list[list[list[int]]]]:
    if len(batches) > 1:
        yield from ([batch] for batch in batches)
        return
    for b, batch in enumerate(batches):
        if len(batch) > 1:
            for n in range(len(batch)):
                yield [*batches[:b], batch[:n] + batch[n + 1 :], *batches[b + 1 :]]
        for n, pair in enumerate(batch):
            for axis in (0, 1):
                for value in sorted({1, pair[axis] // 2, pair[axis] - 1}):
                    if 0 < value < pair[axis]:
                        new = [value if a == axis else x for a, x in enumerate(pair)]
                        yield [*batches[:b], [*batch[:n], new, *batch[n + 1 :]], *batches[b + 1 :]]


def smaller(case: Case) -> Iterator[Case]:
    """Cases with one thing less, the largest steps first."""
    facts = case.facts
    for batches in smaller_batches(facts["batches"]):
        yield replace(case, facts={**facts, "batches": batches})
    if case.shipped:
        yield replace(case, shipped=())
    for hook, tree in case.hooks.items():
        rest = {name: found for name, found in case.hooks.items() if name != hook}
        if rest or facts["front"] != "flex":
            yield replace(case, hooks=rest)
        for found in smaller_trees(tree):
            yield replace(case, hooks={**case.hooks, hook: found})
    for name, plain in PLAIN.items():
        if facts[name] != plain and not (name == "dtype" and facts["device"] != "cpu"):
            yield replace(case, facts={**facts, name: plain})
    if facts["dims"] != [8, 8]:
        yield replace(case, facts={**facts, "dims": [8, 8]})


def shrink(
    case: Case, kind: str, run: Callable[[dict[str, Any]], dict[str, Any]], seconds: float
) -> Case:
    """The smallest case found in some seconds that fails as `kind`."""
    end = time.monotonic() + seconds
    found = True
    while found:
        found = False
        for candidate in smaller(case):
            if time.monotonic() > end:
                return case
            if candidate.size < case.size and run(candidate.spec()).get("kind") == kind:
                case, found = candidate, True
                break
    return case
