"""`warploom build`, `export` and `import` as a person types them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import warploom as wl
from warploom import cli
from warploom.codegen.cache.store import Store
from warploom.codegen.cache.upkeep import kernels
from warploom.codegen.compilers.hostcc import host_target
from warploom.deployment_errors import BadBuildSpec
from warploom.errors import NoHostCompiler
from warploom.spec_objects import declared

KERNELS = """
import warploom as wl
from sizes import DIM

APPEND = wl.AppenderDeclaration(kv_format=wl.Paged(16), num_kv_heads=1, head_dim=DIM)

class Deployment:
    both = (APPEND, wl.AppenderDeclaration(kv_format=wl.Paged(8), num_kv_heads=1, head_dim=DIM))

    @staticmethod
    def one():
        return APPEND

def text(name):
    return f"WL_FN float {name}(float x) {{ return no_such_function(x); }}"

function = wl.custom_function("f", cuda=text("f"), cpp=text("f"), python=lambda x: x)

def broken():
    return [APPEND, wl.AttentionDeclaration(
        Bad(), num_q_heads=1, head_dim=8, tile=wl.TileConfig(16, 64, 2, 2))]

class Bad(wl.Variant):
    def logits_transform(self, logits, at):
        return function(logits)

nothing = []
number = 7
mixed = [APPEND, 7]

def raising():
    raise RuntimeError("of the user's")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two modules of a user's, in the current folder."""
    (tmp_path / "deployed.py").write_text(KERNELS)
    (tmp_path / "sizes.py").write_text("DIM = 8\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("WARPLOOM_FORBID_COMPILE", raising=False)
    yield tmp_path
    for name in ("deployed", "sizes"):
        sys.modules.pop(name, None)


@pytest.fixture
def compiler() -> None:
    try:
        host_target()
    except NoHostCompiler as error:
        pytest.skip(str(error))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, arguments, catch_exceptions=False)


@pytest.mark.parametrize("where", ["deployed", "deployed.py", "{folder}/deployed.py"])
def test_objects_of_modules_and_files_are_found(folder: Path, where: str) -> None:
    where = where.format(folder=folder)
    (found,) = declared(f"{where}:APPEND")
    assert isinstance(found, wl.AppenderDeclaration) and found.head_dim == 8
    assert len(declared(f"{where}:Deployment.both")) == 2
    assert len(declared(f"{where}:Deployment.one")) == 1


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("deployed", "no pair"), (":APPEND", "no pair"), ("deployed:", "no pair"),
        ("absent:APPEND", "no module absent"), ("deployed.absent:A", "no module deployed.absent"),
        ("absent.py:APPEND", r"no file .*absent\.py"), ("deployed:ABSENT", "has no 'ABSENT'"),
        ("deployed:Deployment.absent", "has no 'Deployment.absent'"),
        ("deployed:Deployment", "the class Deployment"), ("deployed:number", "it is 7"),
        ("deployed:nothing", "holds no declaration"), ("deployed:mixed", "it holds 7"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("folder")
def test_what_names_nothing_is_told(spec: str, reason: str) -> None:
    with pytest.raises(BadBuildSpec, match=rf"{reason}.* Expected module:object"):
        declared(spec)


def test_a_module_that_a_safe_path_hides_is_told(folder: Path) -> None:
    command = [sys.executable, "-P", "-m", "warploom", "build", "deployed:APPEND", "--arch", "cpu"]
    if sys.version_info < (3, 11):
        pytest.skip("-P is of Python 3.11")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 1
    assert "no module deployed (PYTHONSAFEPATH and -P keep the current" in done.stderr


@pytest.mark.usefixtures("folder")
def test_errors_of_the_users_own_code_pass() -> None:
    with pytest.raises(RuntimeError, match="of the user's"):
        declared("deployed:raising")
    Path("importing.py").write_text("import absent_of_theirs\n")
    with pytest.raises(ModuleNotFoundError, match="absent_of_theirs"):
        declared("importing:APPEND")


@pytest.mark.usefixtures("compiler")
def test_build_export_and_import(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("build", "deployed:Deployment.both", "deployed.py:APPEND", "--arch", "cpu")
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if " built " in line]
    assert [line.split()[1:4] for line in lines[:2]] == [["append", "f16", "8"]] * 2
    assert {line.split()[4] for line in lines[:2]} == {"paged16", "paged8"}
    assert "2 kernels built in" in result.output and "0 already there, 0 failed" in result.output
    again = run("build", "deployed:APPEND", "--arch", "cpu")
    assert "0 kernels built in 0.0 s of compiling, 1 already there" in again.output
    result = run("export", "kernels.zip", "--arch", "cpu")
    digest = result.output.splitlines()[-1].split()[1]
    assert result.output.startswith("2 kernels in kernels.zip, ") and len(digest) == 64
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(folder / "elsewhere"))
    refused = run("import", "kernels.zip", "--sha256", "0" * 64)
    assert refused.exit_code == 1 and f"has the SHA-256 {digest}" in refused.output
    result = run("import", "kernels.zip", "--sha256", digest)
    assert result.exit_code == 0
    assert "2 kernels imported into" in result.output and "; 0 were there" in result.output
    assert len(kernels(Store(folder / "elsewhere"))) == 2


@pytest.mark.usefixtures("folder", "compiler")
def test_a_kernel_that_fails_makes_the_command_fail() -> None:
    result = run("build", "deployed:broken", "--arch", "cpu")
    assert result.exit_code == 1
    assert "3 kernels built in" in result.output and "1 failed" in result.output
    assert "Error: c++" in result.output and "no_such_function" in result.output


@pytest.mark.usefixtures("folder")
def test_mistakes_are_answered_by_a_message() -> None:
    for arguments, text in (
        (("build", "deployed:APPEND"), "Missing option '--arch'"),
        (("build", "--arch", "cpu"), "Missing argument 'SPEC...'"),
        (("build", "deployed:APPEND", "--arch", "sm_1"), "no architecture 'sm_1'; known are"),
        (("build", "deployed:number", "--arch", "cpu"), "names nothing to build: it is 7"),
        (("export", "k.zip", "--arch", "foo"), "no architecture 'foo'; known are sm_80"),
        (("export", "k.zip"), "Fill it with warploom build"),
        (("import", "absent.zip"), "absent.zip does not exist. Give the path of a file that"),
        (("import", "deployed.py"), "deployed.py is no intact archive of kernels: "),
    ):
        result = run(*arguments)
        assert result.exit_code != 0 and text in result.output, result.output


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = 1\ndef (", "broken.py, line 2, raised SyntaxError: "),
        ("\nimport absent_of_theirs\n", "line 2, raised ModuleNotFoundError: No module named 'abs"),
        ("\n\nX = 1 / 0\n", "line 3, raised ZeroDivisionError: division by zero"),
    ],
)
def test_a_file_that_cannot_be_imported_is_told_by_its_line(text: str, told: str) -> None:
    Path("broken.py").write_text(text)
    result = run("build", "broken.py:X", "--arch", "cpu")
    (line,) = result.output.splitlines()
    assert result.exit_code == 1 and told in line and line.startswith("Error: broken.py:X names")


def test_commands_are_listed() -> None:
    result = run("--help")
    assert all(f"  {name} " in result.output for name in ("build", "export", "import", "cache"))
