"""Sources of the CPU include what they need, though tests compile them behind all of it at once."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.std_headers import TEMPLATES, std_headers

from warploom.codegen.append import AppendSpec, key_value_hooks
from warploom.codegen.compilers.hostcc import HostTarget, host_target
from warploom.codegen.planner_source import PlannerSpec
from warploom.codegen.prefetch import PrefetchSpec
from warploom.dsl.types.dtypes import dtype
from warploom.dsl.variants.trace import trace
from warploom.dsl.variants.variant import Variant
from warploom.errors import NoHostCompiler
from warploom.scheduler.model.layout import c_planning

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> HostTarget:
    monkeypatch.delenv("CXX", raising=False)
    try:
        return host_target()
    except NoHostCompiler as error:
        pytest.skip(str(error))


def texts() -> dict[str, str]:
    traced = trace(Variant())
    kind = dtype("float32")
    append = AppendSpec(key_value_hooks(traced), 64, 64, kind, kind, 16)
    found = {path.stem: path.read_text() for path in GOLDEN.glob("*_cpu.cpp")}
    return found | {
        "planner": PlannerSpec(traced).render("cpp", c_planning()).text,
        "append": append.render("cpp").text,
        "prefetch": PrefetchSpec().render("cpp").text,
    }


@pytest.mark.parametrize("name", sorted(texts()))
@pytest.mark.parametrize("machine", ["this one", "any"])
def test_sources_include_what_they_need(host: HostTarget, name: str, machine: str) -> None:
    flags = host.flags if machine == "this one" else ("-std=c++17",)
    folders = [f"-I{TEMPLATES / folder}" for folder in ("cpu", "common")]
    command = [*host.command, *flags, *folders, "-fsyntax-only", "-x", "c++", "-"]
    done = subprocess.run(command, input=texts()[name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_headers_of_others_are_found() -> None:
    found = std_headers()
    assert {"immintrin.h", "cstring", "thread"} <= set(found)
    assert not [name for name in found if name.startswith("warploom")]
