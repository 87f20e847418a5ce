"""A model of how long two roles take, with rates that depend on both halves; needs no GPU.

    python benchmarks/role_times.py [FILE]

FILE is what `role_splits.py` wrote. While d of the CTAs decode they read d times what one reads,
until memory gives no more; the more is read, the longer a key tile of prefills takes. CTAs that are
done with decodes prefill. Prints the numbers that fit one half of the batches best, how far they
are off in the other, beside the prices that ship, and how good a split is that the model would
choose.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fit_roles import CTAS
from harness import RESULTS
from mixed_goals import geometric_mean
from rich.console import Console
from rich.table import Table
from role_splits import NAME, Timed, halves_of, load

STEPS = 8  # over all numbers, each time the best of one while the others stay
_US = 1e-6  # of a picosecond


class Model(NamedTuple):
    """Numbers of an H200, in parts of the prices that ship (`role_cost.py`).

    Attributes:
        prefill: time of a key tile on one CTA while nobody decodes.
        decode: the same of decodes, while memory gives what they ask for.
        memory: what all decodes may read in a time.
        beside: part by which a tile of prefills takes longer while decodes read so much.
        opening: microseconds of a launch in which next to nothing is done.
    """

    prefill: float = 1.0
    decode: float = 1.0
    memory: float = 1.0
    beside: float = 0.0
    opening: float = 0.0

    def us(self, batch: Timed, prefill_ctas: int) -> float:
        """Time of a batch if so many CTAs prefill and the others decode at first."""
        cost, (prefills, decodes) = batch.cost, batch.tiles
        decoding = CTAS - prefill_ctas
        one_read, all_read = 1 / (cost.decode * self.decode), self.memory * cost.saturating
        read = min(decoding * one_read, all_read / cost.decode)  # tiles in a picosecond
        until = decodes / read
        alone = cost.prefill * self.prefill
        beside = alone * (1 + self.beside * read * cost.decode / all_read)
        left = prefills - prefill_ctas * until / beside
        return self.opening + _US * (until + max(0.0, left) * alone / CTAS)


NUMBERS = {
    "prefill": [0.8 + 0.025 * n for n in range(17)],
    "decode": [0.8 + 0.025 * n for n in range(17)],
    "memory": [0.8 + 0.025 * n for n in range(17)],
    "beside": [0.05 * n for n in range(11)],
    "opening": [2.0 * n for n in range(16)],
}


def off(batches: Sequence[Timed], model: Model) -> float:
    """By which part a time is off, on geometric average of all splits."""
    logs = [
        abs(math.log(1e3 * ms / model.us(batch, ctas)))
        for batch in batches
        for ctas, ms in zip(batch.ctas, batch.ms, strict=True)
    ]
    return math.exp(sum(logs) / len(logs)) - 1


def fitted(batches: Sequence[Timed]) -> Model:
    """The numbers that are off least, found one by one."""
    model = Model()
    for _ in range(STEPS):
        for name, values in NUMBERS.items():
            candidates = [model._replace(**{name: value}) for value in values]
            model = min(candidates, key=partial(off, batches))
    return model


def chosen(batch: Timed, model: Model) -> int:
    """CTAs that prefill where the model expects the least time, of those that were run."""
    return min(range(batch.ctas[0], batch.ctas[-1] + 1), key=partial(model.us, batch))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, default=RESULTS / f"{NAME}.jsonl")
    batches = load(parser.parse_args(argv).file)
    first, other = halves_of(batches)
    table = Table("", *Model._fields, "off, fitted to", "off, others", "its split")
    for name, model in (("prices", Model()), ("fitted", fitted(first))):
        split = geometric_mean([one.loss(chosen(one, model)) for one in other])
        table.add_row(name, *(f"{number:g}" for number in model), f"{off(first, model):.1%}",
                      f"{off(other, model):.1%}", f"{split:.3f}")  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
