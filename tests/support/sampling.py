"""Long matrices of cases: each run of the suite takes some of them, a release all.

`@pytest.mark.some(n)` says how many of a test's cases `make test` takes. It is a draw by the test's
name, the same each time, that goes on until each value of each parameter has had its turn or there
are n. With --all-cases, which `make release-check` gives, all are taken, as they are when fewer
than n are asked for by name. `few(n, of=m)` says the same of a property's examples.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest


def taken(name: str, cases: Sequence[dict[str, int]], count: int) -> list[int]:
    """Which `count` of the cases, in order.

    Args:
        name: seeds the draw.
        cases: of each, the number of the value that each parameter has.
    """
    left = list(range(len(cases)))
    random.Random(name).shuffle(left)
    found: list[int] = []
    seen: set[tuple[str, int]] = set()
    while left and len(found) < count:
        best = max(left, key=lambda i: len(cases[i].items() - seen))  # of equals, the first drawn
        left.remove(best)
        found.append(best)
        seen |= cases[best].items()
    return sorted(found)


def _values(item: Any) -> dict[str, int]:
    """The value of each parameter, as a number: pytest's own `indices` number cases instead."""
    return {name: id(value) for name, value in item.callspec.params.items()}


def few(count: int, of: int) -> int:
    """How many examples of a property a run draws that does not take all cases, or which does."""
    return of if Sampling.takes_all else count


class Sampling:
    """The plugin."""

    takes_all = False

    def pytest_configure(self, config: pytest.Config) -> None:
        Sampling.takes_all = bool(config.getoption("--all-cases"))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        if config.getoption("--all-cases"):
            return
        groups: dict[str, list[Any]] = defaultdict(list)
        for item in items:
            if item.get_closest_marker("some"):
                groups[item.nodeid.split("[")[0]].append(item)
        dropped = set()
        for name, group in groups.items():
            (count,) = group[0].get_closest_marker("some").args
            kept = taken(name, [_values(item) for item in group], count)
            dropped |= {item.nodeid for i, item in enumerate(group) if i not in kept}
        config.hook.pytest_deselected(items=[x for x in items if x.nodeid in dropped])
        items[:] = [item for item in items if item.nodeid not in dropped]
