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
MARGIN, GAP, TOP, BOX, INNER, ROW = 14, 14, 64, 58, 26, 20


@dataclass(frozen=True)
class Room:
    """A folder of the root, what it does in one line, and its stages of the pipeline.

    `rooms` are the folders below it with what each is for: none imports one that stands above it.
    """

    folder: str
    does: str
    width: int
    stages: tuple[str, ...] = ()
    rooms: tuple[tuple[str, str], ...] = ()


ROOMS = (
    Room(FACE, "face, errors, tools", 132),
    Room(
        "dsl",
        "what users write",
        220,
        ("declare", "trace", "analyse"),
        (
            ("library", "variants that ship"),
            ("variants", "fields, tracing"),
            ("masks", "tile classes, bounds"),
            ("values", "symbols and arrays"),
            ("graphs", "built, folded, boxed"),
            ("types", "nodes, dtypes, spec"),
        ),
    ),
    Room("templates", "CUDA, C++: data", 124),
    Room(
        "codegen",
        "graphs to binary",
        220,
        ("render", "compile"),
        (
            ("archives", "kernels on the move"),
            ("choice", "tiles and their cost"),
            ("attention", "templates"),
            ("lowering", "functors to C++"),
            ("compilers", "NVRTC, host C++"),
            ("cache", "binaries on disk"),
        ),
    ),
    Room(
        "scheduler",
        "lengths to plan",
        124,
        ("plan",),
        (
            ("composed", "shared prefixes"),
            ("plans", "arrays, checks"),
            ("partition", "work to CTAs"),
            ("model", "batch, bounds, costs"),
        ),
    ),
    Room(
        "runtime",
        "devices and launches",
        240,
        ("run",),
        (
            ("trials", "random batches"),
            ("traces", "times of work items"),
            ("calls", "functions for users"),
            ("wrappers", "plan once, run often"),
            ("operators", "torch's custom ops"),
            ("declaring", "checked specs"),
            ("strategies", "who plans, and where to"),
            ("planning", "tiles, sizes, masks"),
            ("launching", "kernels and launches"),
            ("inputs", "what run is given"),
            ("formats", "KV formats as objects"),
            ("devices", "memory, streams"),
            ("tensors", "of any framework"),
        ),
    ),
    Room(
        "serving",
        "around the kernels",
        210,
        (),
        (
            ("simulation", "schedules on paper"),
            ("distributed", "keys on several ranks"),
            ("graphs", "steps, replayed"),
            ("prefetch", "into L2, beside collectives"),
            ("recommendation", "beams over items"),
            ("virtual_memory", "caches that grow in place"),
        ),
    ),
    Room(
        "engines",
        "back ends of others",
        180,
        (),
        (
            ("vllm", "a plug-in"),
            ("transformers", "continuous batching"),
            ("flashinfer", "its calls"),
        ),
    ),
)
SIDE = BOX + INNER * max(len(room.rooms) for room in ROOMS) + 6


def imports() -> Counter[tuple[str, str]]:
    """How many pairs of modules there are for each (importing room, imported room)."""
    counts = Counter[tuple[str, str]]()
    for folder in (room.folder for room in ROOMS):
        for file in (ROOT / folder).rglob("*.py"):
            importer = room_of(file.relative_to(ROOT))
            for module in set(modules(ast.parse(file.read_text()))):
                counts[importer, room_of(Path(*module.split(".")[1:], "_"))] += 1
    return Counter({pair: count for pair, count in counts.items() if pair[0] != pair[1]})


def room_of(path: Path) -> str:
    """What lies in none of the other folders is the face's."""
    return next((room.folder for room in ROOMS if room.folder == path.parts[0]), FACE)


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
    height = TOP + SIDE + 18 + ROW * len(pairs) + 34
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
            "an arrow: modules of one folder import modules of another, and the number counts such "
            "pairs; inside of a folder, rooms import those below them",
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
    fill = PALE if room.folder == "templates" else INK
    name, words = (INK, INK) if fill == PALE else (PAPER, PALE)
    yield area(left, TOP, width, SIDE, fill, f' rx="6" stroke="{INK}"')
    yield text(left + width // 2, TOP + 25, room.folder, 14, name, weight="bold")
    yield text(left + width // 2, TOP + 44, room.does, 11, words)
    for i, (inner, does) in enumerate(room.rooms):
        y = TOP + BOX + INNER * i
        yield area(left + 6, y, width - 12, INNER - 4, PALE, ' rx="4"')
        yield text(left + 48, y + 15, inner, 12, INK, weight="bold")
        yield text(left + (width + 84) // 2, y + 15, does, 11, INK)


def arrows(
    spans: dict[str, tuple[int, int]],
    pairs: list[tuple[str, str]],
    counts: Counter[tuple[str, str]],
    width: int,
) -> Iterator[str]:
    first = TOP + SIDE + 18
    last = first + ROW * len(pairs)
    row = 0
    for i, (_, group) in enumerate(groupby(pairs, key=lambda pair: pair[0])):
        size = ROW * len(list(group))
        if i % 2:
            yield area(0, first + row, width, size, FAINT)
        row += size
    centres = {folder: left + size // 2 for folder, (left, size) in spans.items()}
    for centre in centres.values():
        yield f'<path d="M{centre},{TOP + SIDE} V{last}" stroke="{SOFT}" stroke-dasharray="2 4"/>'
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
