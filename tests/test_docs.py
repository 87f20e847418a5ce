"""What the documents say is so: code runs, names exist, links lead somewhere, tables are full."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings tomli
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

import warploom
from warploom.env import HIDDEN, HIDDEN_PREFIXES, SETTINGS

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
PAGES += [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]

# A block is run unless the line above is an HTML comment that begins with "not run" and says why.
BLOCK = re.compile(
    r"(?:^<!-- (?P<skip>not run[^>]*)-->\n)?^```python\n(?P<code>.*?)^```$", re.M | re.S
)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)|!\[[^\]]*\]\((?P<image>[^)\s]+)\)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> Iterator[tuple[int, str]]:
    text = page.read_text()
    for match in BLOCK.finditer(text):
        if not match["skip"]:
            yield text.count("\n", 0, match.start("code")), match["code"]


@pytest.mark.parametrize("page", [p for p in PAGES if any(blocks(p))], ids=name_of)
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run in order, as one reader would type them."""
    monkeypatch.chdir(tmp_path)
    # a functor's errors name file and line, so the code is compiled from a file that has them
    lines: list[str] = []
    for start, code in blocks(page):
        lines += [""] * (start - len(lines)) + code.splitlines()
    script = tmp_path / (page.stem + ".py")
    script.write_text("\n".join(lines) + "\n")
    exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__doc__"})


def test_files_that_contributing_names_are_there() -> None:
    named = re.findall(r"`([\w/]+\.(?:py|hpp|cuh))`", (ROOT / "CONTRIBUTING.md").read_text())
    tops = ["warploom", "dsl", "codegen", "scheduler", "runtime", "templates", "serving", "engines"]
    tops += ["tests", "docs", "benchmarks"]
    found = [path for top in tops for path in (ROOT / top).rglob("*.*")]
    paths = [f"/{path.relative_to(ROOT).as_posix()}".replace("/warploom/", "/") for path in found]
    paths += [f"/warploom{path}" for path in paths]  # of the folder that is named so
    assert len(named) > 50
    assert not [name for name in named if not any(path.endswith(f"/{name}") for path in paths)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for match in LINK.finditer(re.sub(r"```.*?```", "", page.read_text(), flags=re.S)):
        target = match["target"] or match["image"]
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def anchors(page: Path) -> set[str]:
    """Heading names as web views of repositories make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_files_exist(page: Path) -> None:
    folders = "warploom|dsl|codegen|templates|scheduler|runtime|examples|tests|benchmarks|docs"
    named = set(re.findall(rf"`((?:{folders})/[\w./-]+)`", page.read_text()))
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_files_named_in_sources_exist() -> None:
    folders = "dsl|codegen|templates|scheduler|runtime|examples|benchmarks|docs"
    named = re.compile(rf"(?<![\w./-])(?:{folders})/[\w./-]*\.[a-z]\w+")
    for source in (x for folder in folders.split("|") for x in (ROOT / folder).rglob("*.py")):
        missing = [name for name in named.findall(source.read_text()) if not (ROOT / name).exists()]
        assert missing == [], name_of(source)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_public_names_exist(page: Path) -> None:
    used = set(re.findall(r"\bwl\.([A-Za-z_]\w*)", page.read_text()))
    assert {name for name in used if not hasattr(warploom, name)} == set()


def test_environment_variables_are_all_documented() -> None:
    page = (ROOT / "docs" / "environment.md").read_text()
    assert [setting.name for setting in SETTINGS if f"`{setting.name}`" not in page] == []
    plain = page.replace("`", "")
    for setting in SETTINGS:  # a row may say more than the command line
        if setting.name != "CUDA_PATH":  # it shares a row
            assert setting.meaning.rsplit(" when ", 1)[0] in plain
    hidden = (*HIDDEN, *HIDDEN_PREFIXES)
    assert [name for name in hidden if f"`{name}`" not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_unknown_environment_variable_is_named(page: Path) -> None:
    named = set(re.findall(r"\bWARPLOOM_[A-Z_]+\b", page.read_text()))
    assert named - {setting.name for setting in SETTINGS} == set()


def test_make_targets_in_documents_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    for page in PAGES:
        for line in re.findall(r"`make ([a-z -]+)`|^make ([a-z -]+)", page.read_text(), re.M):
            assert set("".join(line).split()) <= targets, f"{name_of(page)}: make {line}"


def test_a_decision_is_one_page() -> None:
    pages = (ROOT / "docs" / "decisions").glob("*.md")
    assert [name_of(page) for page in pages if page.read_text().count("\n") > 36] == []


def test_the_glossary_is_in_order_and_its_names_are_those_of_the_sources() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text()
    rows = [row.strip("|").split(" | ") for row in re.findall(r"^\| .* \|$", page, re.M)][2:]
    terms = [row[0].strip() for row in rows]
    assert terms == sorted(terms, key=lambda term: re.sub(r"[^\w ]", "", term.lower()))
    assert [row[0] for row in rows if len(row) != 3 or not row[2].strip()] == []
    folders = ("warploom", "dsl", "codegen", "templates", "scheduler", "runtime", "serving")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.*")]
    text = " ".join(x.read_text() for x in files if x.suffix in (".py", ".cuh", ".hpp", ".j2"))
    words = set(re.findall(r"\w+", text))
    for term, (_, meaning, _) in zip(terms, rows, strict=True):
        names = re.findall(r"`(?:wl\.)?(\w+)`", meaning.partition("In code today")[2])
        assert [name for name in names if name not in words] == [], term


DRAWING = runpy.run_path(str(ROOT / "docs" / "images" / "architecture.py"))


def test_the_picture_of_the_rooms_is_drawn_from_their_imports() -> None:
    kept = (ROOT / "docs" / "images" / "architecture.svg").read_text()
    assert DRAWING["picture"]() == kept, "imports have changed: make architecture"


def test_the_picture_has_the_rooms_in_the_order_of_their_contracts() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    layers = {
        contract["containers"][0].removeprefix("warploom."): contract["layers"]
        for contract in contracts
        if "containers" in contract
    }
    for room in DRAWING["ROOMS"]:
        names = re.findall(r"\w+", " ".join(layers.get(room.folder, ())))
        folders = {init.parent.name for init in (ROOT / room.folder).glob("*/__init__.py")}
        assert [name for name, _ in room.rooms] == [name for name in names if name in folders]
        assert {name for name, _ in room.rooms} == folders


def test_every_room_has_its_paragraph() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    known = re.findall(r"^(?:## |\*\*)`([\w/]+)/`", page, re.M)
    rooms = [room.folder for room in DRAWING["ROOMS"]]
    rooms += [f"{room.folder}/{name}" for room in DRAWING["ROOMS"] for name, _ in room.rooms]
    assert sorted(known) == sorted(rooms)
