"""The host compiler is found and described exactly; a failure shows where to look."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from warploom.codegen.attention.templates import CPU
from warploom.codegen.compilers.hostcc import HostTarget, compile_cpp, host_target, probe
from warploom.codegen.source import KernelSource
from warploom.dsl.types.dtypes import BY_NAME
from warploom.dsl.types.formats import Ragged
from warploom.dsl.types.spec import AttentionSpec, TracedVariant
from warploom.errors import CompileError, NoHostCompiler

ANSWER = 'extern "C" __attribute__((visibility("default"))) int warploom_kernel() { return 42; }'


@pytest.fixture
def host() -> HostTarget:
    try:
        return host_target()
    except NoHostCompiler as error:
        pytest.skip(str(error))


def test_a_compiled_library_runs(host: HostTarget, tmp_path: Path) -> None:
    library = tmp_path / "kernel.so"
    library.write_bytes(compile_cpp(KernelSource("answer", ANSWER, "cpp"), host))
    assert ctypes.CDLL(str(library)).warploom_kernel() == 42


def test_an_error_names_compiler_kernel_and_place(host: HostTarget, tmp_path: Path) -> None:
    source = KernelSource("broken", "int f() {\n  return nonsense;\n}\n", "cpp")
    kept = tmp_path / "kept.cpp"
    with pytest.raises(CompileError) as caught:
        compile_cpp(source, host, kept=kept)
    text = str(caught.value)
    assert host.version in text and "broken" in text
    assert f"{kept}:2:" in text and "nonsense" in text


def test_the_target_says_what_the_binary_depends_on(host: HostTarget) -> None:
    parts = host.key_parts()
    assert set(parts) == {"compiler", "flags", "headers", "macros"} and all(parts.values())
    other = probe(host.command, "-DWARPLOOM_TEST")  # any macro may select other instructions
    assert other is not None
    assert other.key_parts()["macros"] != parts["macros"]
    assert other.key_parts()["headers"] == parts["headers"]


def test_vector_width_follows_the_features(host: HostTarget) -> None:
    wide = "__AVX512F__" in host.features
    assert (host.vector_bytes == 64) == wide
    assert ("-mprefer-vector-width=512" in host.flags) == wide


def test_a_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler --flag")
    with pytest.raises(NoHostCompiler, match="no-such-compiler --flag"):
        host_target()


def test_cxx_may_carry_arguments(host: HostTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{host.command[0]} -DWARPLOOM_TEST")
    chosen = host_target()
    assert chosen.command == (host.command[0], "-DWARPLOOM_TEST")
    assert chosen.macros != host.macros


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dim", [8, 64, 128, 256])
def test_tiles_hold_a_request_and_fit_the_cache(dtype: str, dim: int) -> None:
    spec = AttentionSpec(TracedVariant("Any", True, {}), dim, dim, BY_NAME[dtype], Ragged())
    choices = [CPU.choose(spec, rows) for rows in (1, 12, 13, 48, 100, 1535, 1536)]
    assert [choice.tile.rows for choice in choices] == [12, 12, 48, 48, 192, 192, 384]
    for choice in choices:
        tile = choice.tile
        word = 2 if dtype == "bfloat16" else 4
        assert tile.keys in (64, 128, 256, 512) and tile.keys * 2 * dim * word <= 256 * 1024
        assert f"{tile.rows}" in choice.reason
