"""Draws architecture.svg: the rooms in the order of the pipeline, and who imports whom."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PICTURE = Path(__file__).with_suffix(".svg")

FACE = "warploom"
INK, SOFT, PALE, FAINT, PAPER = "#1f3b57", "#5f7a93", "#e8eef4", "#f5f7fa", "#ffffff"
MARGIN, GAP, TOP, BOX, ROW = 14, 12, 64, 62, 20


@dataclass(frozen=True)
class Room:
    """A folder, what it does in one line, and its stages of the pipeline."""

    folder: str
    does: str
    width: int
    stages: tuple[str, ...] = ()


ROOMS = (
    Room(FACE, "face, errors, tools", 128),
    Room("dsl", "what users write", 196, ("declare", "trace", "analyse")),
    Room("templates", "CUDA, C++: data", 112),
    Room("codegen", "graphs to binary", 150, ("render", "compile")),
    Room("codegen/attention", "templates as objects", 160),
    Room("scheduler", "lengths to plan", 112, ("plan",)),
    Room("runtime/formats", "KV formats as objects", 144),
    Room("runtime", "devices and launches", 140, ("run",)),
)


def imports() -> Counter[tuple[str, str]]:
    """How many pairs of modules there are for each (importing room, imported room)."""
    counts = Counter[tuple[str, str]]()
    for folder in (room.folder for room in ROOMS if "/" not in room.folder):
        for file in (ROOT / folder).rglob("*.py"):
            importer = room_of(file.relative_to(ROOT))
            for module in set(modules(ast.parse(file.read_text()))):
                counts[importer, room_of(Path(*module.split(".")[1:], "_"))] += 1
    return Counter({pair: count for pair, count in counts.items() if pair[0] != pair[1]})


def room_of(path: Path) -> str:
    """The innermost; what lies in none of the other folders is the face's."""
    known = {room.folder for room in ROOMS}
    return next((str(folder) for folder in path.parents if str(folder) in known), FACE)


def modules(tree: ast.AST) -> Iterator[str]:
    """Modules of ours that a file imports; what is for type checkers alone is left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (x.name for x in node.names if x.name.split(".")[0] == FACE)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == FACE:
            yield from {member_or_module(node.module or "", x.name) for x in node.names}
        else:
            yield from modules(node)


def member_or_module(package: str, name: str) -> str:
    """`from package import name` may name a module of the package, or something inside of it."""
    folders = [ROOT.joinpath(*package.split(".")[1:]), ROOT.joinpath(*package.split("."))]
    found = any((x / name).is_dir() or (x / f"{name}.py").exists() for x in folders)
    return f"{package}.{name}" if found else package


def picture() -> str:
    """The SVG: rooms as columns, and an arrow in a row of its own for each pair of them."""
    lefts = list(accumulate((room.width + GAP for room in ROOMS), initial=MARGIN))
    width = lefts[-1] - GAP + MARGIN
    spans = {room.folder: (left, room.width) for room, left in zip(ROOMS, lefts, strict=False)}
    counts = imports()
    order = [room.folder for room in ROOMS]
    pairs = sorted(counts, key=lambda pair: (order.index(pair[0]), order.index(pair[1])))
    height = TOP + BOX + 18 + ROW * len(pairs) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="Helvetica, Arial, DejaVu Sans, sans-serif" '
        'text-anchor="middle">',
        "<title>Rooms in the order of the pipeline, and who imports whom</title>",
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
        'markerHeight="7" orient="auto">'
        f'<path d="M0,0 L10,5 L0,10 z" fill="{INK}"/></marker></defs>',
        area(0, 0, width, height, PAPER),
        *pipeline(spans),
        *arrows(spans, pairs, counts, width),
        *(part for room in ROOMS for part in box(room, *spans[room.folder])),
        text(
            width // 2,
            height - 12,
            "an arrow: modules of one room import modules of another; the number counts such pairs",
            12,
            SOFT,
        ),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def pipeline(spans: dict[str, tuple[int, int]]) -> Iterator[str]:
    """One long arrow above the boxes, with each stage above its room."""
    left = spans["dsl"][0]
    right = sum(spans["runtime"])
    yield line(left, right, 32)
    for room in ROOMS:
        start, size = spans[room.folder]
        step = size / max(len(room.stages), 1)
        for i, stage in enumerate(room.stages):
            centre = round(start + step * (i + 0.5))
            half = 4 * len(stage) + 4
            yield area(centre - half, 22, 2 * half, 20, PAPER)
            yield text(centre, 37, stage, 14, INK, weight="bold")


def box(room: Room, left: int, width: int) -> Iterator[str]:
    fill = PALE if "/" in room.folder or room.folder == "templates" else INK
    name, words = (INK, INK) if fill == PALE else (PAPER, PALE)
    yield area(left, TOP, width, BOX, fill, f' rx="6" stroke="{INK}"')
    yield text(left + width // 2, TOP + 27, room.folder, 14, name, weight="bold")
    yield text(left + width // 2, TOP + 47, room.does, 11, words)


def arrows(
    spans: dict[str, tuple[int, int]],
    pairs: list[tuple[str, str]],
    counts: Counter[tuple[str, str]],
    width: int,
) -> Iterator[str]:
    first = TOP + BOX + 18
    last = first + ROW * len(pairs)
    row = 0
    for i, (_, group) in enumerate(groupby(pairs, key=lambda pair: pair[0])):
        size = ROW * len(list(group))
        if i % 2:
            yield area(0, first + row, width, size, FAINT)
        row += size
    centres = {folder: left + size // 2 for folder, (left, size) in spans.items()}
    for centre in centres.values():
        yield f'<path d="M{centre},{TOP + BOX} V{last}" stroke="{SOFT}" stroke-dasharray="2 4"/>'
    for i, (importer, imported) in enumerate(pairs):
        y = first + ROW * i + ROW // 2
        start, end = centres[importer], centres[imported]
        yield f'<circle cx="{start}" cy="{y}" r="3" fill="{INK}"/>'
        yield line(start, end, y)
        behind = start + (-18 if end > start else 18)
        yield text(behind, y + 4, str(counts[importer, imported]), 12, INK)


def area(x: int, y: int, width: int, height: int, fill: str, more: str = "") -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}"{more}/>'


def line(start: int, end: int, y: int) -> str:
    return (
        f'<path d="M{start},{y} H{end}" stroke="{INK}" stroke-width="1.5" marker-end="url(#tip)"/>'
    )


def text(x: int, y: int, words: str, size: int, fill: str, weight: str = "normal") -> str:
    style = f'font-size="{size}" font-weight="{weight}" fill="{fill}"'
    return f'<text x="{x}" y="{y}" {style}>{words}</text>'


if __name__ == "__main__":
    PICTURE.write_text(picture())
