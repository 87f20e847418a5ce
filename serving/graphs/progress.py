"""A progress bar over buckets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from warploom import env


@contextmanager
def shown(buckets: Sequence[int], wanted: bool | None) -> Iterator[Iterator[int]]:
    """The buckets, with a bar on stderr that moves from one to the next; gone at the end."""
    wanted = env.show_progress() if wanted is None else wanted
    if wanted is False:
        yield iter(buckets)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if wanted is None and not console.is_terminal:
        yield iter(buckets)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=console.is_terminal
    ) as bar:
        task = bar.add_task("graphs", total=len(buckets))

        def moving() -> Iterator[int]:
            for rows in buckets:
                bar.update(task, description=f"graphs of {rows} rows")
                yield rows
                bar.advance(task)

        yield moving()
