"""What all tests share: golden files, and a host compiler for pieces of rendered C++."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support.gpu_record import Recorder
from support.sampling import Sampling
from support.std_headers import compiler_with_headers

import warploom.templates

try:
    from hypothesis import Phase, settings
except ModuleNotFoundError:  # the GPU tests need none, and run on machines that have little else
    settings = Phase = None
from warploom.dsl.values.position import Position
from warploom.dsl.variants.readings import NumpyReading
from warploom.dsl.variants.variant import Variant

GOLDEN = Path(__file__).parent / "golden"
BUILT = Path(__file__).parents[1] / "build" / "std"
SHIPPED = pytest.StashKey[str | None]()  # the compiler with the flags of users' kernels
TEMPLATES = Path(warploom.templates.__file__).parent

# Every plan that any test makes is checked, if nobody says otherwise.
os.environ.setdefault("WARPLOOM_VERIFY_PLANS", "1")

# Where CI is set, properties are tried on the same examples each time, so that a change is judged
# by what it changes; elsewhere every run draws new ones. Nothing explains which parts of a failing
# example do not matter: that takes twice as long as making it small, in tests that wait for a
# failure, too.
if settings is not None and Phase is not None:
    phases = [phase for phase in Phase if phase is not Phase.explain]
    settings.register_profile("random", deadline=None, phases=phases)
    settings.register_profile("same", deadline=None, phases=phases, derandomize=True)
    settings.load_profile("same" if os.environ.get("CI") else "random")


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """That of benchmarks/, whose other modules can be imported beside it."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    return import_module("harness")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden")
    parser.addoption("--all-cases", action="store_true", help="no matrix is cut short")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder(), "warploom-gpu-recorder")
    config.pluginmanager.register(Sampling(), "warploom-sampling")
    shipped, quick = (compiler_with_headers(BUILT, quick=x) for x in (False, True))
    config.stash[SHIPPED] = shipped
    if quick is not None:
        os.environ["CXX"] = quick  # of test processes, too


@pytest.fixture(scope="module", autouse=True)
def host_compiler(request: pytest.FixtureRequest) -> Iterator[None]:
    """Optimises as for users in modules marked `optimised`, and not at all in the others."""
    shipped = request.config.stash[SHIPPED]
    with pytest.MonkeyPatch.context() as patch:
        if shipped is not None and request.node.get_closest_marker("optimised"):
            patch.setenv("CXX", shipped)
        yield


@pytest.fixture(scope="session")
def all_cases(request: pytest.FixtureRequest) -> bool:
    """Whether tests that go through many cases themselves take all of them."""
    return bool(request.config.getoption("--all-cases"))


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


@pytest.fixture(scope="session")
def mask_elements() -> Callable[..., Any]:
    """The oracle of tile analysis: a mask's functor, called for every element of a tile."""

    def elements(
        variant: Variant, inputs: dict[str, Any], tiles: dict[str, Any], i: int
    ) -> np.ndarray[Any, Any]:
        """Visible elements [q_pos, q_head, all keys of the sequence] of tile i."""
        reading = NumpyReading(variant.name, {**variant.inputs(), **inputs})
        fixed = {name: v[i] for name, v in tiles.items() if not isinstance(v, tuple)}
        rows, heads = (
            np.arange(tiles[name][0][i], tiles[name][1][i]) for name in ("q_pos", "q_head")
        )
        keys = np.arange(fixed["kv_len"])
        values = {
            **{name: np.full((1, 1, 1), value) for name, value in fixed.items()},
            "q_pos": rows[:, None, None],
            "q_head": heads[None, :, None],
            "kv_pos": keys[None, None],
            "q_row": np.zeros((1, 1, 1), int),
        }
        at = Position("logits_mask", {name: reading.array(x) for name, x in values.items()})
        with np.errstate(all="ignore"):  # both sides of a where are computed
            seen = np.asarray(variant.under(reading).logits_mask(at))
        return np.broadcast_to(seen, (len(rows), len(heads), len(keys)))

    return elements
