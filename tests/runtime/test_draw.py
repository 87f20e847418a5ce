"""The picture's classes are those of the analysis, and never contradict the elements under them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from warploom.dsl.library.causal import Causal
from warploom.dsl.library.document_mask import DocumentMask
from warploom.dsl.library.packed_mask import PackedMask
from warploom.dsl.library.sliding_window import SlidingWindow
from warploom.dsl.reference import visible
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.fields import Scalar, Tensor
from warploom.dsl.variants.variant import Variant
from warploom.errors import ArgumentError, MissingInput
from warploom.runtime.calls.draw import _paint, draw_mask, tile_classes


class RequestWindow(Variant):
    """Every request looks back its own number of keys."""

    reach = Tensor("int32", ("batch",))

    def logits_mask(self, at: Position) -> Value:
        return (at.kv_pos <= at.q_pos) & (at.kv_pos >= at.q_pos - self.reach[at.batch])


class Near(Variant):
    reach = Scalar("int32")

    def logits_mask(self, at: Position) -> Value:
        return at.kv_pos >= at.q_pos - self.reach


@pytest.mark.parametrize(("q_len", "kv_len", "tile"), [(96, 200, (16, 32)), (50, 33, (8, 8))])
def test_classes_agree_with_the_elements(q_len: int, kv_len: int, tile: tuple[int, int]) -> None:
    variant = Causal() & SlidingWindow(40, sinks=5)
    classes = tile_classes(variant, q_len=q_len, kv_len=kv_len, tile=tile)
    mask = visible(variant, q_len=q_len, kv_len=kv_len)
    assert classes.shape == (-(-q_len // tile[0]), -(-kv_len // tile[1]))
    for (row, column), found in np.ndenumerate(classes):
        part = mask[row * tile[0] : (row + 1) * tile[0], column * tile[1] : (column + 1) * tile[1]]
        assert not (found == 0 and part.any())
        assert not (found == 2 and not part.all())


def test_tensor_inputs_are_read() -> None:
    sizes = {"q_len": 64, "kv_len": 64, "tile": (16, 16)}
    for reach, read in ((0, 4), (63, 10)):  # the diagonal; it and all below
        inputs = {"reach": torch.tensor([reach], dtype=torch.int32)}
        assert (tile_classes(RequestWindow(), inputs=inputs, **sizes) > 0).sum() == read


@pytest.mark.parametrize("ending", [".png", ".svg"])
def test_the_picture_is_written(tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    path = draw_mask(Causal(), tmp_path / "new folder" / f"mask{ending}", q_len=40, kv_len=64)
    assert path.stat().st_size > 5_000


def test_the_legend_shows_full_tiles_as_they_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    figure = _paint(np.ones((64, 64), bool), np.full((1, 1), 2), (64, 64), "all is visible")
    figure.savefig(tmp_path / "mask.png")
    pixels = imread(tmp_path / "mask.png")
    drawn = pixels[pixels.shape[0] // 2, pixels.shape[1] // 2, :3]
    shown: Any = figure.legends[0].get_patches()[2].get_facecolor()
    np.testing.assert_allclose(shown[:3], drawn, atol=0.01)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"tile": (0, 4)}, "tile: is 0; expected an int of at least 1"),
        ({"tile": 64}, r"tile: is 64; expected \(query rows, keys\), such as"),
        ({"q_len": -8}, "q_len: is -8; expected an int of at least 1"),
        ({"kv_len": 0}, "kv_len: is 0; expected an int of at least 1"),
        ({"q_head": 2, "num_q_heads": 2}, "q_head: is 2; valid are 0 to 1, since num_q_heads=2"),
        ({"path": "mask.foo"}, r"path: 'mask\.foo' ends in no format .*\.png, .*pdf"),
        ({"path": "mask"}, "path: 'mask' ends in no format"),
    ],
)
def test_what_cannot_be_drawn(tmp_path: Path, given: dict[str, Any], text: str) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ArgumentError, match=text):
        draw_mask(Causal(), **{"path": tmp_path / "mask.png", "q_len": 8, **given})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("variant", "text"),
    [
        (PackedMask(), r"inputs=\{'packed_mask': ...\} \(uint8 tensor \[any\]\)"),
        (DocumentMask(), r"inputs=\{'document_ids': ...\} \(int32 tensor \[batch, kv_pos\]\)"),
        (Near(), r"inputs=\{'reach': ...\} \(a number, int32\)"),
    ],
)
def test_values_of_fields_are_told_their_place(tmp_path: Path, variant: Variant, text: str) -> None:
    with pytest.raises(MissingInput, match=f"which was not given. Pass {text}"):
        draw_mask(variant, tmp_path / "mask.png", q_len=10)
