"""The command line, and that neither it nor the import touches what is heavy."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import warploom
from warploom import cli, doctor, env, tables
from warploom.codegen.cache.facts import sealed, unsealed
from warploom.codegen.cache.key import CacheKey
from warploom.codegen.cache.store import Draft, Store
from warploom.doctor import Finding, examine, working_back_ends
from warploom.errors import NoCudaCompiler

HEAVY = {"torch", "jinja2", "cuda", "cutlass_library", "rich"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    return Store(tmp_path / "cache")


def run(*arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(cli.main, arguments, input=answer, catch_exceptions=False)


LABELS = {"kind": "portable", "dtype": "bf16/e4m3", "head_dim": "128/64", "format": "paged16"}


def add(store: Store, name: str) -> Path:
    facts = {
        "labels": LABELS | {"variant": name, "tile": "r16k64"},
        "compile_seconds": 3.25,
        "resources": {"registers": 168, "local_bytes": 0, "shared_bytes": 1024},
    }
    key = CacheKey(name, (("source", name), ("target", "sm_90a")))
    return store.save(key, Draft(("kernel.cu", b"x"), ("kernel.cubin", bytes(5000)), facts)).folder


def test_path(cache: Store) -> None:
    assert run("cache", "path").output.strip() == str(cache.root)


def test_list(cache: Store) -> None:
    assert "0 kernels" in run("cache", "list").output
    folder = add(cache, "Causal & SoftCap")
    (add(cache, "Broken") / "key.json").unlink()
    result = run("cache", "list")
    assert result.exit_code == 0
    (line,) = (line for line in result.output.splitlines() if "SoftCap" in line)
    what = ["portable", "Causal", "&", "SoftCap", "bf16/e4m3", "128/64", "paged16", "r16k64"]
    key = folder.name.rpartition("-")[2]
    assert line.split() == [*what, "sm_90a", "6", "KiB", "just", "now", key[:8]]
    (line,) = (line for line in result.output.splitlines() if "Broken" in line)
    assert "damaged" in line
    assert "2 kernels and 0 precompiled headers" in result.output and "of 4.0 GiB" in result.output
    (line,) = (
        line for line in run("cache", "list", "--full").output.splitlines() if "Soft" in line
    )
    assert all(fact in line for fact in ("168", "1 KiB", "3.2 s", key))


def test_kernels_without_labels_are_listed_by_name(cache: Store) -> None:
    folder = add(cache, "Causal")
    facts = unsealed((folder / "key.json").read_bytes())
    del facts["labels"]
    (folder / "key.json").write_bytes(sealed(facts | {"name": "portable_Causal_f16"}))
    assert "portable_Causal_f16" in run("cache", "list").output


def test_a_list_that_no_terminal_shows_has_one_line_for_each_kernel(
    cache: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    names = [f"{'Long' * 12}_{i}" for i in range(3)]
    for name in names:
        add(cache, name)
    lines = run("cache", "list", "--full").output.splitlines()
    for name in names:
        (line,) = (line for line in lines if name in line)
        assert "just now" in line and line.split()[:2] == ["portable", name]


def test_verify(cache: Store) -> None:
    folder = add(cache, "good")
    assert run("cache", "verify").output == "1 of 1 kernels are intact\n"
    (folder / "kernel.cubin").write_bytes(b"changed")
    result = run("cache", "verify")
    assert result.exit_code == 1
    assert str(folder / "kernel.cubin") in result.output and "0 of 1" in result.output


def test_a_cache_that_others_may_write_is_left_alone(cache: Store) -> None:
    folder = add(cache, "k")
    cache.root.chmod(0o777)
    for command in (["list"], ["verify"], ["clear", "--yes"]):
        result = run("cache", *command)
        assert result.exit_code == 1
        (line,) = result.stderr.splitlines()
        assert line.startswith(f"Error: others may write to {cache.root}") and "chmod" in line
    assert folder.exists()
    cache.root.chmod(0o755)
    assert run("cache", "verify").exit_code == 0


def test_odd_facts_are_listed_as_damage(cache: Store) -> None:
    path = add(cache, "Causal") / "key.json"
    for text in ("[]", "3", '{"parts": 3}', path.read_text().replace('"name"', '"nom"')):
        path.write_text(text)
        assert "damaged" in run("cache", "list", "--full").output
        assert run("cache", "verify").exit_code == 1


def test_clear_asks_first(cache: Store) -> None:
    folder = add(cache, "k")
    assert run("cache", "clear", answer="n\n").exit_code == 1 and folder.exists()
    result = run("cache", "clear", answer="y\n")
    assert "removed 1 items" in result.output and not folder.exists()
    assert "removed 0 items, 0 B" in run("cache", "clear", "--yes").output


def test_env_shows_every_setting_and_its_value(
    cache: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARPLOOM_PCH", "0")
    monkeypatch.delenv("WARPLOOM_THREADS", raising=False)
    output = run("env").output
    lines = {line.split()[0]: line for line in output.splitlines() if line.split()}
    assert {setting.name for setting in env.SETTINGS} <= set(lines)
    assert lines["WARPLOOM_PCH"].split()[1] == "0"
    assert "not set" in lines["WARPLOOM_THREADS"]


def test_settings_that_will_be_refused_are_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("THREADS", "0"), ("CACHE_SIZE", "lots"), ("BUILD_JOBS", "2")):
        monkeypatch.setenv(f"WARPLOOM_{name}", value)
    lines = {line.split()[0]: line for line in run("env").output.splitlines() if line.split()}
    assert "0 (refused: expected a whole number, 1 or more)" in lines["WARPLOOM_THREADS"]
    assert "lots (refused: expected a whole number, 0 or more)" in lines["WARPLOOM_CACHE_SIZE"]
    assert "refused" not in lines["WARPLOOM_BUILD_JOBS"]
    monkeypatch.setattr(doctor, "examine", lambda: [doctor._settings()])
    told = run("doctor").output
    assert "WARPLOOM_THREADS is refused" in told and "WARPLOOM_CACHE_SIZE is refused" in told
    assert re.search("settings +wrong", told) and "BUILD_JOBS" not in told


def test_variables_that_nothing_reads_are_listed_with_the_nearest_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("CHACHE_DIR", "THREAD", "ZZZ"):
        monkeypatch.setenv(f"WARPLOOM_{name}", "[1]")
    lines = {line.split()[0]: line for line in run("env").output.splitlines() if line.split()}
    meant = {"CHACHE_DIR": "CACHE_DIR", "THREAD": "THREADS"}
    for name, near in meant.items():
        line = lines[f"WARPLOOM_{name}"]
        assert "[1]" in line and f"nothing reads it; did you mean WARPLOOM_{near}?" in line
    assert lines["WARPLOOM_ZZZ"].endswith("nothing reads it")
    monkeypatch.setattr(doctor, "examine", lambda: [doctor._settings()])
    told = run("doctor").output
    for name, near in meant.items():
        assert f"WARPLOOM_{name}: nothing reads it; did you mean WARPLOOM_{near}?" in told


def test_every_variable_that_is_read_is_a_setting() -> None:
    named = re.findall(r"\"([A-Z]+_[A-Z_]+|CXX)\"", Path(env.__file__).read_text())
    assert set(named) - set(env.HIDDEN) == {setting.name for setting in env.SETTINGS}


def test_the_package_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "warploom", "--version"], capture_output=True)
    assert done.stdout.decode().strip() == f"warploom, version {warploom.__version__}"


def test_a_refused_setting_is_one_line(cache: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPLOOM_CACHE_SIZE", "lots")
    result = run("cache", "list")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: the environment variable WARPLOOM_CACHE_SIZE is 'lots'")


def test_every_setting_that_is_a_number_is_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in env.SETTINGS:
        monkeypatch.setenv(setting.name, "nonsense")
    readers = re.findall(r'_int\("(\w+)"', Path(env.__file__).read_text())
    assert readers and all(map(env.problem, readers))


def test_version() -> None:
    assert warploom.__version__ in run("--version").output


def test_doctor_tries_everything(cache: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = {finding.part: finding for finding in examine()}
    assert set(findings) == {
        "warploom", "settings", "cache folder", "host compiler", "CUDA headers", "NVRTC", "GPU"
    }  # fmt: skip
    assert findings["cache folder"].works and str(cache.root) in findings["cache folder"].detail
    assert all(finding.detail for finding in findings.values())
    monkeypatch.setattr(doctor, "examine", lambda: list(findings.values()))  # slow: once is enough
    result = run("doctor")
    working = working_back_ends(list(findings.values()))
    assert result.exit_code == (0 if working else 1)
    assert "reference (NumPy, slow)" in result.output


def test_a_cache_that_is_a_file_is_told_with_a_remedy(
    cache: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.root.write_text("")
    finding = doctor._try("cache folder", doctor._cache)
    assert finding.state == "missing"
    assert re.search(r"cannot be written \(Not a dir.*Set WARPLOOM_CACHE_DIR to", finding.detail)


def test_rows_of_doctor_end_where_their_text_does(
    cache: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = [Finding("short", True, "a"), Finding("long", True, "b" * 300)]
    monkeypatch.setattr(doctor, "examine", lambda: findings)
    lines = run("doctor").output.splitlines()
    (short,) = (line for line in lines if "short" in line)
    assert short.endswith(" a") and len(short) < 80
    assert all(line == line.rstrip() for line in lines)


def test_the_host_compilers_line_holds_no_digest() -> None:
    (found,) = (finding for finding in examine() if finding.part == "host compiler")
    assert re.search(r"[0-9a-f]{32}", found.detail) is None
    assert max(map(len, found.detail.splitlines())) <= 120


def test_a_back_end_works_only_with_all_its_parts() -> None:
    def finding(part: str, works: bool, needed_by: str) -> Finding:
        return Finding(part, works, "", needed_by)

    compiler, gpu = finding("c++", True, "cpu"), finding("GPU", True, "cuda")
    assert working_back_ends([compiler, gpu, finding("NVRTC", False, "cuda")]) == ["cpu"]
    assert working_back_ends([compiler, gpu]) == ["cpu", "cuda"]
    assert working_back_ends([finding("cache", False, ""), gpu]) == ["cuda"]


@pytest.mark.parametrize(
    "statement",
    ["import warploom", "from warploom import Causal", "import warploom.cli"],
)
def test_importing_loads_nothing_heavy(statement: str) -> None:
    code = f"{statement}\nimport sys\nprint(*sorted({HEAVY!r} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == ""


@pytest.mark.parametrize("query", [["cache", "list"], ["cache", "verify"], ["env"], ["--help"]])
def test_queries_touch_no_compiler_and_no_driver(cache: Store, query: list[str]) -> None:
    code = f"""
import sys
from warploom.cli import main
main({query!r}, standalone_mode=False)
assert not {{"torch", "cuda", "jinja2", "warploom.codegen.compilers.nvrtc"}} & set(sys.modules)
assert not any("libcuda" in line or "libnvrtc" in line for line in open("/proc/self/maps"))
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd="/")


def test_doctor_shows_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    advice = "pip install 'warploom[cu13]'"
    monkeypatch.setattr(doctor, "examine", lambda: [Finding("NVRTC", False, advice, "cuda")])
    assert advice in run("doctor").output


def test_summaries_of_commands_are_whole() -> None:
    told = run("--help").output
    assert "..." not in told.partition("Commands:")[2]
    assert all(f"  {name} " in told for name in cli.main.commands)


@pytest.mark.parametrize("query", ["env", "doctor"])
def test_names_are_whole_in_a_narrow_terminal(
    query: str, cache: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_PIPED_WIDTH", 80)
    found = [Finding("host compiler", False, "a long text " * 20, "cpu")]
    monkeypatch.setattr(doctor, "examine", lambda: found)
    lines = run(query).output.splitlines()
    names = [setting.name for setting in env.SETTINGS] if query == "env" else ["host compiler"]
    assert max(map(len, lines)) <= 80
    assert all(any(line.startswith(f" {name} ") for line in lines) for name in names)


def test_doctor_gives_advice_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise NoCudaCompiler(what="CUTLASS", extra="cu13")

    for part in ("_headers", "_nvrtc"):
        monkeypatch.setattr(doctor, part, missing)
    found = {finding.part: finding for finding in examine()}
    assert "pip install '.[cu13]' in a clone" in found["CUDA headers"].detail
    assert found["NVRTC"].detail == "not tried: it needs the CUDA headers, see there"
    assert not found["NVRTC"].works
