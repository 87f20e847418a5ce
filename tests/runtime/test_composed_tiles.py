"""The composed format where a tile holds as many rows as codes of rows allow, and more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom import errors
from warploom.runtime.trials.case import Case, Setup
from warploom.runtime.trials.trials import mismatch
from warploom.scheduler.composed import sharing
from warploom.scheduler.model.layout import ROW_CODE

pytestmark = pytest.mark.optimised

ONE_HEAD: dict[str, Any] = {
    "num_q_heads": 4, "num_kv_heads": 1, "head_dim": 64, "dtype": "float32", "device": "cpu"
}  # fmt: skip


def test_long_prefills_that_share_a_prefix_have_tiles_of_384_rows() -> None:
    rows, keys = 257, 400
    table = np.tile(np.arange(keys, dtype=np.int32), 2)
    q, cache = torch.randn(2 * rows, 4, 64), torch.randn(keys, 2, 1, 1, 64)
    composed = wl.AttentionWrapper(kv_format=wl.Composed(1), **ONE_HEAD)
    composed.plan([0, rows, 2 * rows], [0, keys, 2 * keys], table, [1, 1])
    assert composed.planned is not None
    assert composed.planned.plan.problem.rows == 384
    k, v = cache[:, 0, 0], cache[:, 1, 0]
    logits = torch.einsum("qhd,kd->hqk", q, k[:, 0]) / 8.0
    expected = torch.einsum("hqk,kd->qhd", logits.softmax(-1), v[:, 0])
    torch.testing.assert_close(composed.run(q, cache), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rows", [255, 256, 257, 384, 511, 512])
@pytest.mark.parametrize("lengths", [(600,), (600, 0, 1), (1, 0), (600, 480, 601, 0, 1)])
def test_rows_at_the_borders_of_their_codes(
    rows: int, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units of whole tiles, of single rows, and of a group that fills more than a tile."""
    monkeypatch.setattr(sharing, "PER_ITEM", 0)
    monkeypatch.setattr(sharing, "PER_ROW", 0)
    setup = Setup(wl.Composed(16), "float32", 16, 16, tile=wl.TileConfig(rows, 64, 1, 1))
    for group, q_lens in ((1, (rows + 1, 1, 0, rows, 2)), (rows + 1, (1, 2, 1, 0, 1))):
        case = Case(
            setup, q_lens[: len(lengths)], lengths, num_kv_heads=1, group_size=group, seed=rows
        )
        found = mismatch(wl.Variant(), case)
        assert found is None, found


def test_tiles_whose_rows_have_no_codes_are_refused() -> None:
    tile = wl.TileConfig(ROW_CODE + 1, 64, 1, 1)
    with pytest.raises(errors.ArgumentError, match=f"has {ROW_CODE + 1} rows; .* {ROW_CODE} at"):
        wl.AttentionWrapper(kv_format=wl.Composed(1), tile=tile, **ONE_HEAD)


class Entangled(wl.Variant):
    """A mask of conditions that GCC 12 moved from path to path, with what it knew of one."""

    squares = wl.Scalar("bool")
    table = wl.Tensor("int64", ("batch",))

    def logits_mask(self, at: wl.Position) -> Any:
        first = wl.where(self.squares, at.q_pos * at.q_pos, self.table[at.batch] - at.q_head)
        return (at.batch == at.num_q_heads) != (first == (at.q_head - at.q_idx) * at.kv_head)


@pytest.mark.parametrize("kv_format", [wl.Paged(16), wl.Composed(16)], ids=repr)
def test_compilers_do_not_carry_ranges_from_path_to_path(kv_format: Any) -> None:
    q, k = torch.randn(1, 3, 8), torch.randn(4, 16, 1, 8)
    sizes: dict[str, Any] = {"num_q_heads": 3, "num_kv_heads": 1, "head_dim": 8}
    wrapper = wl.AttentionWrapper(
        Entangled(), kv_format=kv_format, dtype="float32", device="cpu", **sizes
    )
    wrapper.plan([0, 1], [0, 1], [3], [1], table=torch.tensor([2]), squares=True)
    out = wrapper.run(q, (k, k))  # the one key is seen by all heads: 0 * 0 is 0
    torch.testing.assert_close(out, k[3, 0].expand(1, 3, 8))
