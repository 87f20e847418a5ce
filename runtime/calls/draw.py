"""A picture of a mask: every element, and the tile classes that let the kernel skip work."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from warploom.dsl.masks.intervals import TileAnalysis
from warploom.dsl.reference import visible
from warploom.dsl.values.arrays import to_numpy
from warploom.dsl.variants.trace import trace
from warploom.dsl.variants.variant import Variant, as_variant
from warploom.errors import ArgumentError, MissingInput
from warploom.runtime.calls.pictures import picture_path
from warploom.runtime.declaring.declare import checked_count, checked_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLASSES = ("skip: never read", "partial: mask evaluated", "full: no mask code")
_COLORS = ("#e5e7eb", "#f59e0b", "#16a34a")
_MOST_ELEMENTS = 2**27  # each needs a few bytes of memory
_SHADE = 0.35  # darkness of visible elements

Grid: TypeAlias = np.ndarray[Any, Any]


def tile_classes(
    variant: Variant | type[Variant] | None,
    *,
    q_len: int,
    kv_len: int,
    tile: tuple[int, int] = (64, 64),
    inputs: Mapping[str, Any] | None = None,
    q_head: int = 0,
    num_q_heads: int = 1,
) -> Grid:
    """The class of every tile of one request and query head, as the planner and kernel see it.

    Args:
        variant: its `logits_mask` is analysed.
        q_len: number of query rows, which are aligned to the end of the keys.
        kv_len: number of keys.
        tile: (query rows, keys) of a tile.
        inputs: run-time values of the variant's fields.
        q_head: query head.
        num_q_heads: number of query heads, and of key/value heads.

    Returns:
        int8 [tiles of rows, tiles of keys]: 0 skip, 1 partial, 2 full.

    Raises:
        ArgumentError: a wrong length, tile or head, or no variant.
        VariantError: the variant cannot be traced.
    """
    variant = as_variant(variant)
    _check_sizes(q_len, kv_len, tile, q_head, num_q_heads)
    values = {
        name: to_numpy(value) for name, value in {**variant.inputs(), **(inputs or {})}.items()
    }
    traced = trace(variant)
    scalars = {f.name: values.get(f.name, f.default) for f in traced.scalars}
    tensors = {f.name: values[f.name] for f in traced.tensors if f.name in values}
    numbers = {name: np.asarray(value).item() for name, value in scalars.items()}
    try:
        analysis = TileAnalysis(traced, numbers, tensors)
    except MissingInput as error:
        facts = (str(error.facts[each]) for each in ("variant", "name", "expected"))
        raise MissingInput.among_inputs(*facts) from None
    rows, keys = tile
    first_row, first_key = np.meshgrid(
        np.arange(0, q_len, rows), np.arange(0, kv_len, keys), indexing="ij"
    )
    q_pos = first_row + kv_len - q_len
    same = {"batch": 0, "kv_head": q_head, "q_len": q_len, "kv_len": kv_len}
    same |= {"num_q_heads": num_q_heads, "num_kv_heads": num_q_heads}
    return analysis.classify(
        **{name: np.full(first_row.shape, value) for name, value in same.items()},
        q_head=(np.full(first_row.shape, q_head), np.full(first_row.shape, q_head + 1)),
        q_pos=(q_pos, np.minimum(q_pos + rows, kv_len)),
        kv_pos=(first_key, np.minimum(first_key + keys, kv_len)),
    )


def draw_mask(
    variant: Variant | type[Variant] | None,
    path: str | Path,
    *,
    q_len: int,
    kv_len: int | None = None,
    tile: tuple[int, int] = (64, 64),
    inputs: Mapping[str, Any] | None = None,
    q_head: int = 0,
    num_q_heads: int = 1,
) -> Path:
    """Save a picture of a variant's mask with its tile classes; needs matplotlib.

    Dark elements are visible (by the plain Python functor); the colour of a tile is its class (by
    interval arithmetic). A wrong class would show as dark elements in a grey tile.

    Args:
        variant: its mask is drawn.
        path: file to write; its ending decides the format. Missing folders are created.
        q_len, kv_len, tile, inputs, q_head, num_q_heads: as in `tile_classes`; kv_len is q_len by
            default.

    Returns:
        The path.

    Raises:
        ArgumentError: a wrong length, tile or head, no variant, or a path whose ending is no
            picture format.
        VariantError: the variant cannot be traced.
        MissingInput, UnknownInput: `inputs` lacks a field of the mask, or has a name of no field.
        MissingPackage: matplotlib is not installed.
    """
    target = picture_path(path, "draw_mask()")
    variant = as_variant(variant)
    kv_len = q_len if kv_len is None else kv_len
    heads = {"q_head": q_head, "num_q_heads": num_q_heads}
    sizes = {"q_len": q_len, "kv_len": kv_len}
    classes = tile_classes(variant, **sizes, tile=tile, inputs=inputs, **heads)
    mask = visible(
        variant, **sizes, inputs=inputs, kv_head=q_head, num_kv_heads=num_q_heads, **heads
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    title = f"{variant!r}, tiles of {tile[0]} x {tile[1]}"
    _paint(mask, classes, tile, title).savefig(target, dpi=130)
    return target


def _check_sizes(q_len: Any, kv_len: Any, tile: Any, q_head: Any, num_q_heads: Any) -> None:
    checked_count("q_len", q_len)
    checked_count("kv_len", kv_len)
    if q_len * kv_len > _MOST_ELEMENTS:
        reason = f"{q_len} x {kv_len} elements are too many; {_MOST_ELEMENTS} at most"
        raise ArgumentError(name="q_len", reason=reason)
    checked_count("num_q_heads", num_q_heads)
    if checked_number("q_head", q_head) >= num_q_heads:
        reason = f"is {q_head}; valid are 0 to {num_q_heads - 1}, since num_q_heads={num_q_heads}"
        raise ArgumentError(name="q_head", reason=reason)
    if not isinstance(tile, (tuple, list)) or len(tile) != 2:
        reason = f"is {tile!r}; expected (query rows, keys), such as (64, 64)"
        raise ArgumentError(name="tile", reason=reason)
    for side in tile:
        checked_count("tile", side)


def _shaded(color: str) -> str:
    """A colour as it looks under visible elements; in a full tile all elements are visible."""
    parts = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part * (1 - _SHADE)):02x}" for part in parts)


def _paint(mask: Grid, classes: Grid, tile: tuple[int, int], title: str) -> Figure:
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure  # without pyplot: no window, no global state
    from matplotlib.patches import Patch

    rows, keys = mask.shape
    figure = Figure(figsize=(1.5 + 6 * min(2.0, keys / rows), 6.6), layout="constrained")
    axes = figure.subplots()
    colors = np.kron(classes, np.ones(tile, np.int8))[:rows, :keys]
    axes.imshow(colors, cmap=ListedColormap(_COLORS), vmin=0, vmax=2, interpolation="nearest")
    shade = np.zeros((rows, keys, 4))
    shade[..., 3] = _SHADE * mask
    axes.imshow(shade, interpolation="nearest")
    axes.set_yticks(np.arange(0, rows, tile[0]) - 0.5, minor=True)
    axes.set_xticks(np.arange(0, keys, tile[1]) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=0.5)
    axes.tick_params(which="minor", length=0)
    axes.set(xlabel="key position", ylabel="query row")
    axes.set_title(title, fontsize=9)
    counts = np.bincount(classes.ravel(), minlength=3)
    drawn = (_COLORS[0], _COLORS[1], _shaded(_COLORS[2]))
    legend = [
        Patch(color=color, label=f"{name} ({count})")
        for color, name, count in zip(drawn, CLASSES, counts, strict=True)
    ]
    legend.append(Patch(color=(0, 0, 0, _SHADE), label="visible element"))
    figure.legend(handles=legend, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure
