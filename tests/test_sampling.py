"""Which cases of a long matrix a run takes."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

from support.sampling import taken

CASES = [dict(zip("abc", x, strict=True)) for x in product(range(5), range(3), range(2))]


def test_each_value_of_each_parameter_is_taken_if_there_is_room() -> None:
    found = taken("any", CASES, 5)
    assert found == sorted(set(found)) and len(found) == 5
    for name in "abc":
        assert {CASES[i][name] for i in found} == {case[name] for case in CASES}


def test_a_draw_is_the_same_each_time_and_another_for_another_test() -> None:
    assert taken("one", CASES, 6) == taken("one", CASES, 6)
    assert taken("one", CASES, 6) != taken("two", CASES, 6)
    assert taken("one", CASES, 99) == list(range(len(CASES)))


SUITE = """
import pytest
from support.sampling import few

@pytest.mark.some(2)
@pytest.mark.parametrize("x", range(6))
def test_many(x):
    pass

@pytest.mark.parametrize("x", range(few(2, of=5)))
def test_few(x):
    pass

@pytest.mark.some(4)
@pytest.mark.parametrize("x", range(4))
@pytest.mark.parametrize("y", range(3))
def test_matrix(x, y):
    pass
"""
CONFTEST = """
import sys
sys.path.insert(0, {tests!r})
from support.sampling import Sampling

def pytest_addoption(parser):
    parser.addoption("--all-cases", action="store_true")

def pytest_configure(config):
    config.addinivalue_line("markers", "some(n): of a matrix")
    config.pluginmanager.register(Sampling())
"""


def run(folder: Path, *options: str) -> list[str]:
    """Lines of pytest's output."""
    (folder / "test_suite.py").write_text(SUITE)
    (folder / "conftest.py").write_text(CONFTEST.format(tests=str(Path(__file__).parent)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    variables = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take seconds to import
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    return done.stdout.splitlines()


def test_a_run_says_how_many_it_left_out_and_takes_all_when_it_is_asked(tmp_path: Path) -> None:
    def last_line(*options: str) -> str:
        return run(tmp_path, *options)[-1]

    assert last_line().startswith("8 passed, 12 deselected")
    assert last_line("--all-cases").startswith("23 passed")
    assert last_line("test_suite.py::test_many[0]").startswith("1 passed")


def test_parameters_that_stand_one_above_another_have_all_their_values(tmp_path: Path) -> None:
    lines = run(tmp_path, "--collect-only", "-k", "matrix")
    names = [line.split("[")[1].rstrip("]") for line in lines if "test_matrix[" in line]
    found = [name.split("-") for name in names]
    assert len(found) == 4
    assert {y for y, _ in found} == set("012") and {x for _, x in found} == set("0123")
