"""Recorded seeds of the fuzzer agree with its reference, and have everything that it can draw."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from fuzz.cases import draw
from fuzz.coverage import features, pairs, required
from fuzz.recorded import RECORDED
from fuzz.runner import Settings, Worker

pytestmark = pytest.mark.optimised

CHUNK = 3  # seeds of one test, so that test processes share them evenly


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("needs a C++ compiler")
    worker = Worker(Settings(jobs=2))
    yield worker
    worker.close()


def test_recorded_seeds_have_everything() -> None:
    had = set().union(*(features(draw(seed)) for seed in RECORDED))
    assert required() - had == set(), "choose anew: PYTHONPATH=tests python -m fuzz.coverage"


def test_surroundings_meet_in_recorded_seeds() -> None:
    """As many pairs as in 38 more seeds than `choose` takes."""
    assert len(set().union(*(pairs(draw(seed)) for seed in RECORDED))) >= 316


@pytest.mark.some(6)
@pytest.mark.parametrize(
    "seeds", [RECORDED[i : i + CHUNK] for i in range(0, len(RECORDED), CHUNK)], ids=str
)
def test_recorded_seeds_agree(worker: Worker, seeds: tuple[int, ...]) -> None:
    compared = 0
    for seed in seeds:
        found = worker.run(draw(seed).spec())
        assert found["ok"], f"seed {seed}: make fuzz SEED={seed} ARGS='--cases 1'\n{found['text']}"
        compared += found.get("rows", 0) - found.get("ill", 0)
    assert compared > 100, "what is refused or ill-conditioned says nothing"
