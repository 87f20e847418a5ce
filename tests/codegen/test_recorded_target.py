"""A filled cache serves where there is no compiler: by what it was filled with, or not at all."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from warploom import doctor
from warploom.codegen import build as build_module
from warploom.codegen.build import build, forbid_compilation
from warploom.codegen.cache.facts import sealed, unsealed
from warploom.codegen.compilers import cpu_features, hostcc, recorded_target
from warploom.codegen.compilers.arch import ARCHS
from warploom.codegen.compilers.hostcc import HostTarget, host_target
from warploom.codegen.source import KernelSource
from warploom.deployment_errors import NotInCache, WrongProcessor
from warploom.errors import CompileForbidden, NoHostCompiler

Make = Callable[..., KernelSource]


@pytest.fixture(autouse=True)
def fresh_process(cache: Path) -> Iterator[None]:
    build_module._artifacts.clear()
    yield
    build_module._artifacts.clear()
    hostcc._probe.cache_clear()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> HostTarget:
    monkeypatch.delenv("CXX", raising=False)  # its arguments are recorded as flags
    hostcc._probe.cache_clear()
    try:
        return host_target()
    except NoHostCompiler as error:
        pytest.skip(str(error))


def lose_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    hostcc._probe.cache_clear()
    build_module._artifacts.clear()


def rewrite(folder: Path, change: Callable[[dict], None]) -> None:
    path = folder / "key.json"
    facts = unsealed(path.read_bytes())
    change(facts)
    path.write_bytes(sealed(facts))


def test_a_host_kernel_is_found_without_a_compiler(
    cpp_source: Make, host: HostTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build(cpp_source("41 + 1"), host)
    lose_the_compiler(monkeypatch)
    recorded = host_target()
    assert replace(recorded, command=host.command) == host
    found = build(cpp_source("41 + 1"), recorded)
    assert not found.compiled and found.path == built.path
    assert ctypes.CDLL(str(found.path)).warploom_kernel() == 42
    with pytest.raises(NotInCache, match=r"answer is not among .*warploom build"):
        build(cpp_source("43"), recorded)


def test_doctor_tells_a_cache_that_serves_from_a_compiler(
    cpp_source: Make, host: HostTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor._host().state == "works"
    build(cpp_source("41 + 1"), host)
    lose_the_compiler(monkeypatch)
    found = doctor._host()
    assert found.works and found.state == "missing"  # the back end serves what there is
    assert found.detail.startswith("no C++ compiler was found. Kernels of " + host.version)


def test_an_empty_cache_asks_for_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    lose_the_compiler(monkeypatch)
    missing = doctor._host()
    assert not missing.works and "Install one" in missing.detail
    with pytest.raises(NoHostCompiler, match=r"tried c\+\+, g\+\+, clang\+\+"):
        host_target()


def test_a_compiler_that_was_named_and_is_not_there_is_a_mistake(
    cpp_source: Make, host: HostTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(cpp_source(), host)
    lose_the_compiler(monkeypatch)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NoHostCompiler, match="no-such-compiler"):
        host_target()


@pytest.mark.parametrize("named", ["no-such-compiler", "false", "env no-such-compiler -O1"])
def test_where_compiling_is_forbidden_the_compiler_that_was_named_is_not_missed(
    named: str, cpp_source: Make, host: HostTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build(cpp_source("41 + 1"), host)
    build_module._artifacts.clear()
    monkeypatch.setenv("CXX", named)
    monkeypatch.setenv("WARPLOOM_FORBID_COMPILE", "1")
    assert host_target().version == host.version
    assert build(cpp_source("41 + 1"), host_target()).path == built.path
    with pytest.raises(CompileForbidden):
        build(cpp_source("43"), host_target())
    monkeypatch.delenv("WARPLOOM_FORBID_COMPILE")
    with pytest.raises(NoHostCompiler, match=named):
        host_target()


def test_code_for_another_processor_is_never_chosen(
    cpp_source: Make, host: HostTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not host.needs:
        pytest.skip("nothing is known of this processor")
    build(cpp_source(), host)
    lose_the_compiler(monkeypatch)
    missing = host.needs[0]
    fewer = (cpu_features.available() or frozenset()) - {missing}
    monkeypatch.setattr(cpu_features, "available", lambda: fewer)
    with pytest.raises(WrongProcessor) as caught:
        host_target()
    text = str(caught.value)
    assert f"lacks: {missing}." in text
    assert f"need: {' '.join(host.needs)}." in text
    monkeypatch.setattr(cpu_features, "available", lambda: None)
    with pytest.raises(WrongProcessor, match="cpuinfo"):
        host_target()


def test_the_richest_target_that_fits_comes_first_and_others_fill_its_gaps(
    cpp_source: Make, host: HostTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = hostcc.probe(host.command, "")
    if plain is None or not set(plain.needs) < set(host.needs):
        pytest.skip("the compiler's default is this very machine")
    build(cpp_source("1"), host)
    build(cpp_source("2"), plain)
    lose_the_compiler(monkeypatch)
    assert host_target().needs == host.needs
    assert ctypes.CDLL(str(build(cpp_source("2"), host_target()).path)).warploom_kernel() == 2
    monkeypatch.setattr(cpu_features, "available", lambda: frozenset(plain.needs))
    assert host_target().needs == plain.needs
    build_module._artifacts.clear()
    with pytest.raises(NotInCache):  # the machine could not run the one that there is
        build(cpp_source("1"), host_target())


def test_kernels_of_other_headers_are_not_taken(
    cpp_source: Make, host: HostTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build(cpp_source(), host).path.parent
    lose_the_compiler(monkeypatch)
    rewrite(folder, lambda facts: facts["parts"].update(headers="others"))
    folder.parent.touch()
    os.utime(folder.parent, ns=(1, 1))  # as if entries had come and gone
    with pytest.raises(NoHostCompiler):
        host_target()


def test_who_may_not_compile_takes_kernels_of_another_compiler(
    cpp_source: Make, host: HostTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(host, version="another compiler")
    monkeypatch.setattr(hostcc, "host_target", lambda: other)
    built = build(cpp_source(), other)
    monkeypatch.setattr(hostcc, "host_target", lambda: host)
    build_module._artifacts.clear()
    with forbid_compilation():
        assert build(cpp_source(), host).path == built.path
        with pytest.raises(CompileForbidden):
            build(cpp_source("7"), host)
    build_module._artifacts.clear()
    assert build(cpp_source(), host).compiled  # who may compile has his own


def test_instruction_sets_are_those_that_linux_names() -> None:
    macros = ["__SSE2__", "__SSE3__", "__AVX512BF16__", "__AMX_BF16__", "__BMI__", "__GNUC__"]
    macros += ["__SSE2_MATH__", "__AVX512F__", "__LZCNT__"]
    needs = {"sse2", "pni", "avx512_bf16", "amx_bf16", "bmi1", "avx512f", "abm"}
    assert set(cpu_features.needed(macros, "x86_64")) == needs


def test_what_linux_does_not_tell_is_bound_to_the_model() -> None:
    here = cpu_features.available()
    if here is None:
        pytest.skip("no /proc/cpuinfo")
    (model,) = (name for name in here if name.startswith("model:"))
    assert set(cpu_features.needed(["__SSE2__", "__AVXOFTOMORROW__"], "x86_64")) == {"sse2", model}


def test_only_what_all_cores_have_counts() -> None:
    text = "model\t: 7\nflags\t\t: sse2 avx2\n\nmodel\t: 7\nflags\t\t: sse2\n"
    assert cpu_features.parse(text) == {"sse2", "model:7"}
    assert cpu_features.parse("processor: 0\n") is None


BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cuda", "nvidia", "cutlass_library"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
from importlib.util import find_spec
import warploom.codegen.compilers.headers as headers
headers.find_spec = lambda name: None
from warploom.codegen.compilers.arch import ARCHS
from warploom.codegen.build import build
from warploom.codegen.source import KernelSource
from warploom.errors import NoCudaCompiler
"""


@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
def test_a_cubin_is_found_without_cuda_packages(cuda_source: Make, tmp_path: Path) -> None:
    built = build(cuda_source(), ARCHS["sm_90a"])
    code = f"""{BLOCKED}
source = KernelSource("scale", {cuda_source().text!r}, "cuda")
found = build(source, ARCHS["sm_90a"])
assert not found.compiled and str(found.path) == {str(built.path)!r}
assert found.resources.registers > 0
for other, arch in ((source.text + "//", "sm_90a"), (source.text, "sm_80")):
    try:
        build(KernelSource("scale", other, "cuda"), ARCHS[arch])
    except NoCudaCompiler:
        pass
    else:
        raise AssertionError(arch)
"""
    environment = {name: x for name, x in os.environ.items() if not name.startswith(("CUDA", "CO"))}
    environment["PATH"] = str(tmp_path)
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=tmp_path)


def test_damaged_entries_name_no_compiler(cache: Path, host: HostTarget, cpp_source: Make) -> None:
    folder = build(cpp_source(), host).path.parent
    for name, text in (
        ("cut", "{"),
        ("list", "[]"),
        ("empty", "{}"),
        ("odd", '{"parts": {}, "host": 3}'),
    ):
        (folder.parent / name).mkdir()
        (folder.parent / name / "key.json").write_text(text)
    assert len(recorded_target.fitting_hosts()) == 1
