"""The wheel holds what the tree holds, the face is light, and folders import downwards only."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings tomli
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

import warploom
from warploom import hints
from warploom.engines import flashinfer

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
FOLDERS: dict[str, str] = SETUPTOOLS["package-dir"]


def test_every_package_is_listed() -> None:
    found = {
        ".".join((name, *init.parent.relative_to(ROOT / folder).parts))
        for name, folder in FOLDERS.items()
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert found == set(SETUPTOOLS["packages"])


def test_no_folder_of_modules_is_left_out_for_want_of_an_init() -> None:
    """Such a folder imports in a checkout, as a namespace, and the wheel silently lacks it."""
    for name, folder in FOLDERS.items():
        holders = {path.parent for path in (ROOT / folder).rglob("*.py")}
        assert [path for path in holders if not (path / "__init__.py").exists()] == [], name


@pytest.mark.parametrize("name", SETUPTOOLS["packages"])
def test_every_package_imports(name: str) -> None:
    """Of the checkout, or where `make wheel-check` runs this, of the wheel."""
    assert import_module(name).__doc__


def test_the_readme_names_the_versions_that_the_package_asks_for() -> None:
    readme = (ROOT / "README.md").read_text()
    (torch,) = (x for x in PROJECT["project"]["dependencies"] if x.startswith("torch"))
    assert f"`{torch}`" in readme
    python = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert f"Python {python} or later" in readme


@pytest.mark.parametrize("package", ["warploom", "warploom.templates"])
def test_every_data_file_is_listed(package: str) -> None:
    folder = ROOT / FOLDERS[package]
    patterns = [p.replace("**/", "*") for p in SETUPTOOLS["package-data"][package]]
    data = [
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    ]
    assert data, f"{folder} holds no data: the patterns are not tested"
    assert [name for name in data if not any(fnmatch(name, p) for p in patterns)] == []


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("warploom", {"torch", "numpy", "jinja2", "cuda"}),
        ("warploom.dsl", {"torch", "jinja2", "cuda"}),
        ("warploom.codegen", {"torch", "cuda"}),
        ("warploom.scheduler", {"torch", "jinja2", "cuda"}),
    ],
)
def test_importing_stays_light(module: str, heavy: set[str]) -> None:
    loaded = run_python(f"import sys, {module}; print(*sys.modules)").split()
    assert heavy.isdisjoint(loaded)


def test_every_public_name_resolves() -> None:
    for name in warploom._HOME:
        assert getattr(warploom, name) is not None
        assert name in dir(warploom)


def test_a_star_imports_every_name_that_python_has_not() -> None:
    found = set(run_python("from warploom import *; print(*dir())").split())
    assert found >= set(warploom._HOME) - {"abs", "max", "sum"}
    assert found.isdisjoint({"abs", "max", "sum", "import_module", "TYPE_CHECKING"})


def test_dir_lists_names_for_users_only() -> None:
    used = "warploom.Causal, warploom.stats(), warploom.errors"  # which imports others
    names = run_python(f"import warploom; {used}; print(*dir(warploom))").split()
    shown = {name for name in names if not name.startswith("_")}
    assert shown == {*warploom._HOME, *warploom._MODULES}
    assert "__version__" in names
    assert len(names) == len(set(names))


def test_modules_for_users_are_found_without_an_import_of_their_own() -> None:
    assert run_python("import warploom as wl; print(wl.testing.check.__name__)").strip() == "check"
    assert run_python("import warploom as wl; print(wl.errors.InUse.__name__)").strip() == "InUse"
    script = "import sys, warploom as wl; print(*[getattr(wl, x).__name__ for x in wl._MODULES])"
    script += "; print(*sys.modules)"
    found, loaded = run_python(script).splitlines()
    assert found.split() == [f"warploom.{name}" for name in warploom._MODULES]
    assert not [name for name in loaded.split() if name.startswith("warploom.serving")]


def test_type_checkers_see_every_public_name() -> None:
    text = (ROOT / FOLDERS["warploom"] / "__init__.py").read_text()
    declared = {
        alias.asname: node.module
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    modules = {name for name, home in declared.items() if home == "warploom"}
    assert modules == set(warploom._MODULES)
    assert {name: home for name, home in declared.items() if home != "warploom"} == warploom._HOME


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'attend'"):
        _ = warploom.attend  # type: ignore[attr-defined]


def test_version_is_the_installed_one() -> None:
    assert PROJECT["project"]["version"] == warploom.__version__


def test_every_tool_has_a_tried_version() -> None:
    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[\[<>=!;~ ]", text, maxsplit=1)[0].lower() for text in requirements}

    extras = PROJECT["project"]["optional-dependencies"]
    wanted = names(PROJECT["project"]["dependencies"])
    wanted |= names([text for extra in ("cu13", "demo", "dev") for text in extras[extra]])
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = names([line for line in lines if line and not line.startswith("#")])
    assert wanted - pinned == set()


@pytest.mark.parametrize("extra", ["cu13", "cu12"])
def test_compiler_and_headers_come_from_one_cuda_release(extra: str) -> None:
    """A compiler with the headers of another release fails in ways that no message explains."""
    wanted = PROJECT["project"]["optional-dependencies"][extra]
    assert not [text for text in wanted if text.startswith("nvidia-cuda-")]
    (toolkit,) = (text for text in wanted if text.startswith("cuda-toolkit["))
    assert {"nvrtc", "cudart", "cccl"} <= set(re.split(r"[\[\],]", toolkit))


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_fast_tests_are_files_that_exist() -> None:
    command = ["make", "-s", "-n", "test-fast", "RUN=python3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    files = re.findall(r"tests/\S+\.py", done.stdout)
    assert {"dsl", "codegen", "scheduler", "runtime"} <= {Path(name).parent.name for name in files}
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_folders_import_downwards_only(tmp_path: Path) -> None:
    """import-linter reads one tree, so the root folders are linked together as they install."""
    tree = tmp_path / "warploom"
    tree.mkdir()
    for name, folder in FOLDERS.items():
        if name != "warploom":
            (tree / name.rpartition(".")[2]).symlink_to(ROOT / folder)
    for path in (ROOT / FOLDERS["warploom"]).glob("*.py"):
        (tree / path.name).symlink_to(path)
    config = str(ROOT / "pyproject.toml")
    code = "from importlinter.cli import lint_imports_command as main; main()"
    command = [sys.executable, "-c", code, "--config", config, "--no-cache"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("BatchPrefillWithPagedKVCacheWrapper", r"warploom.AttentionWrapper\(.*Paged"),
        ("BatchDecodeWithPagedKVCacheWrapper", r"warploom.AttentionWrapper\(.*Paged"),
        ("append_paged_kv_cache", "warploom.append"),
        ("get_seq_lens", "as there, it is in warploom.engines.flashinfer"),
        ("single_prefill_with_kv_cache", "warploom.attention"),
        ("create_block_mask", "warploom.flex"),
        ("Casual", "Did you mean 'Causal'"),
    ],
)
def test_names_of_other_libraries_are_answered(name: str, told: str) -> None:
    with pytest.raises(AttributeError, match=rf"no attribute {name!r}\. ?.*{told}"):
        getattr(warploom, name)


def test_what_stands_for_other_names_is_there() -> None:
    for text in hints._FOREIGN.values():
        for name in re.findall(r"warploom\.(\w+)", text):
            assert name in warploom._HOME
    assert all(hasattr(flashinfer, name) for name in hints._CALLED_AS_THERE)


def test_a_checkout_that_is_not_installed_says_what_to_do(tmp_path: Path) -> None:
    """Python finds the face alone there, and none of the folders that belong to it."""
    shutil.copytree(ROOT / "warploom", tmp_path / "warploom")
    (tmp_path / "dsl").mkdir()
    code = "import warploom as wl; wl.Causal()"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith(
        f"ModuleNotFoundError: warploom was imported from its sources in {tmp_path}"
    )
    assert "pip install -e ." in last
    assert len(done.stderr.splitlines()) < 9


@pytest.mark.parametrize(
    ("options", "told"),
    [([], "source .venv/bin/activate"), (["RUN=python"], "export PYTHONPATH=.*/build/links")],
)
def test_the_demo_ends_with_a_next_step(options: list[str], told: str) -> None:
    of_outer = {"MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "RUN", "VENV"}
    env = {name: value for name, value in os.environ.items() if name not in of_outer}
    command = ["make", "-n", "demo", *options]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert re.search(rf"{told}.*docs/quickstart\.md", done.stdout)
