"""Each declared KV format has one object at run time, which owns all that tells it from others."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import warploom as wl
import warploom.runtime.formats as room_of_formats
from warploom.dsl.types import formats
from warploom.runtime.formats import format_of

ROOT = Path(__file__).resolve().parents[2]
ROOM = ROOT / "runtime" / "formats"
DECLARED = {
    name: found
    for name, found in inspect.getmembers(formats, inspect.isclass)
    if issubclass(found, formats.KVFormat) and found is not formats.KVFormat
}


def asked_for(path: Path) -> set[str]:
    """Names of formats that a file tests objects for."""
    found = set[str]()
    tree = ast.parse(path.read_text())
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "warploom.dsl.types.formats"
        for alias in node.names
    }
    for node in ast.walk(tree):
        is_test = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance"
        if is_test or isinstance(node, ast.Compare):
            found |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    return found & imported & DECLARED.keys()


@pytest.mark.parametrize("declared", DECLARED.values(), ids=DECLARED)
def test_every_format_has_an_object(declared: type[formats.KVFormat]) -> None:
    example = declared(64) if declared is formats.Rolling else declared()
    assert format_of(example).declared == example
    assert format_of(example).name == declared.__name__
    room = Path(inspect.getfile(room_of_formats)).resolve().parent  # the checkout's, or a wheel's
    assert Path(inspect.getfile(type(format_of(example)))).resolve().parent == room


def test_plans_of_selections_are_another_object_of_a_declared_format() -> None:
    """Kernels are those of `wl.Paged`; only where the list lies is another place."""
    found = wl.PageSelectionWrapper.planned_format(wl.Paged(4, layout="HND"))
    assert found.kv_axes == format_of(wl.Paged(4, layout="HND")).kv_axes
    assert found.takes == format_of(wl.Paged(4)).takes
    assert found.most_blocks(wl.Bounds(2, 2, 8)) is None


def test_nobody_else_asks_which_format_it_is() -> None:
    folders = ("dsl", "codegen", "runtime", "scheduler", "warploom")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    found = {str(path): asked_for(path) for path in files if ROOM not in path.parents}
    assert {path: names for path, names in found.items() if names} == {}
