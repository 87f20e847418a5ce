"""What all tests share: golden files, and a host compiler for pieces of rendered C++."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import warploom.templates

GOLDEN = Path(__file__).parent / "golden"
TEMPLATES = Path(warploom.templates.__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with a file of tests/golden, or rewrites the file with --update-golden."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        assert path.exists(), f"no {path}; make it with: make golden"
        assert path.read_text() == text, f"{path} differs; if that is meant, run: make golden"

    return check


@pytest.fixture
def compile_cpp(tmp_path: Path) -> Callable[..., ctypes.CDLL]:
    """Compiles C++ text that includes our host headers, and loads it; skips without a compiler."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")

    def build(text: str, *flags: str) -> ctypes.CDLL:
        source = tmp_path / f"piece{len(list(tmp_path.iterdir()))}.cpp"
        source.write_text(text)
        library = source.with_suffix(".so")
        includes = [f"-I{TEMPLATES / folder}" for folder in ("cpu", "common")]
        command = [compiler, "-std=c++17", "-shared", "-fPIC", "-Wall", *includes, *flags]
        done = subprocess.run(
            [*command, str(source), "-o", str(library)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return ctypes.CDLL(str(library))

    return build
