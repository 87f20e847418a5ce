"""No file grows past 400 lines and no function past 60 without a reason written here."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("warploom", "dsl", "codegen", "scheduler", "runtime", "templates", "serving", "engines")
FOLDERS += ("examples", "benchmarks", "tests", "docs")
MAX_FILE, MAX_FUNCTION = 400, 60

# path (and ::function) -> why it may be longer
ALLOWED: dict[str, str] = {}


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".cuh", ".hpp", ".j2"):
                yield path


@cache
def long_files() -> dict[str, int]:
    sizes = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in sources()}
    return {name: size for name, size in sizes.items() if size > MAX_FILE}


def docstring_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """A long description makes no function harder to read."""
    return len((ast.get_docstring(function) or "").splitlines())


@cache
def long_functions() -> dict[str, int]:
    found = {}
    for path in sources():
        if path.suffix != ".py":
            continue
        for item in ast.walk(ast.parse(path.read_text())):
            if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
                size = (item.end_lineno or item.lineno) - item.lineno + 1 - docstring_lines(item)
                if size > MAX_FUNCTION:
                    found[f"{path.relative_to(ROOT)}::{item.name}"] = size
    return found


@pytest.mark.parametrize("measure", [long_files, long_functions])
def test_nothing_outgrows_its_idea(measure: Callable[[], dict[str, int]]) -> None:
    found = measure()
    assert {name: size for name, size in found.items() if name not in ALLOWED} == {}


def test_allowances_are_still_needed() -> None:
    assert set(ALLOWED) - set(long_files()) - set(long_functions()) == set()
