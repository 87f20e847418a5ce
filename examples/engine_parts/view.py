"""What an engine is doing: a live table in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:  # the engine imports this module
    from engine import Engine

EVERY = {True: 0.1, False: 2.0}  # seconds between two looks, in a terminal and elsewhere
BAR = 48  # characters


class View:
    """Shows an engine for as long as the `with` block lasts; call `update` after each step."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._console = engine, Console()
        self._every = EVERY[self._console.is_terminal]
        self._live = Live(console=self._console) if self._console.is_terminal else None
        self._began = self._looked = time.perf_counter()
        self._generated = 0

    def __enter__(self) -> View:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self._looked, self._generated = self._began, 0  # the last look is at all of it
        if kind is None:
            self._show(time.perf_counter())
        if self._live:
            self._live.stop()

    def update(self) -> None:
        now = time.perf_counter()
        if now - self._looked >= self._every:
            self._show(now)

    def _show(self, now: float) -> None:
        generated = self._engine.counts["generated"]
        speed = (generated - self._generated) / max(now - self._looked, 1e-9)
        self._looked, self._generated = now, generated
        facts = self._facts(speed)
        if self._live:
            table = Table.grid(padding=(0, 2))
            for name, value in facts.items():
                table.add_row(name, value)
            table.add_row("", self._bar())
            self._live.update(table)
        else:
            self._console.print(", ".join(f"{k} {v}" for k, v in facts.items()), soft_wrap=True)

    def _facts(self, speed: float) -> dict[str, str]:
        engine, tree, counts = self._engine, self._engine.tree, self._engine.counts
        return {
            "requests": f"{len(engine.running)} running + {len(engine.waiting)} waiting",
            "pass": f"{counts['passes']} of {counts['rows'] / max(1, counts['passes']):.0f} rows",
            "tokens": f"{counts['generated']} at {speed:.0f}/s",
            "pages": f"{tree.used} used + {tree.cached} cached + {tree.free} free",
            "prompts reused": share(counts["reused"], counts["prompts"]),
            "guesses accepted": share(counts["accepted"], counts["drafted"]),
            "preempted": str(counts["preempted"]),
        }

    def _bar(self) -> Text:
        tree = self._engine.tree
        used = round(BAR * tree.used / tree.num_pages)
        held = round(BAR * (tree.used + tree.cached) / tree.num_pages)
        return Text.assemble(
            ("█" * used, "green"), ("█" * (held - used), "yellow"), ("░" * (BAR - held), "dim")
        )


def share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"
