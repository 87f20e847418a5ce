"""Random operations on the ledger of pages beside its twin, and on a mapper that is refused things.

    python tests/pages [--operations 1000000] [--mapper-operations 50000] [--seed 0]

Prints how often each operation was done, and how often it ended with which error. It takes some
minutes, and ends with an AssertionError where two that should agree do not.
"""

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pages import mapper, twin


def told(what: str, fuzz: Callable[[int, int], Counter[str]], operations: int, seed: int) -> None:
    """Run one of the two, and print what it did."""
    print(f"{what}: {operations:,d} operations, seed {seed}", flush=True)
    begin = time.perf_counter()
    for done, times in sorted(fuzz(operations, seed).items()):
        print(f"{times:11,d}  {done}")
    print(f"all agreed; {time.perf_counter() - begin:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--mapper-operations", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args()
    told("the ledger and its twin", twin.run, options.operations, options.seed)
    told("a mapper whose driver refuses", mapper.run, options.mapper_operations, options.seed)


main()
