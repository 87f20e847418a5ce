"""Logits that are infinite or no number: what torch's softmax, logsumexp and amax make of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import warploom as wl
from warploom.codegen.source import TileConfig
from warploom.dsl.types.formats import KVFormat

ROWS16, TALL, ONE_ROW = TileConfig(16, 64, 4, 2), TileConfig(64, 32, 2, 2), TileConfig(1, 64, 2, 1)
GROUP, ROWS8 = TileConfig(64, 64, 4, 2, "hopper", 2), TileConfig(8, 64, 2, 2)
PLACES = {"NaN": {150: math.nan}, "inf": {160: math.inf}, "inf early": {3: math.inf},
          "twice inf": {3: math.inf, 290: math.inf}, "both": {150: math.nan, 160: math.inf},
          "both, far apart": {290: math.inf, 3: math.nan}, "one lane": {3: math.nan, 67: math.inf},
          "inf first": {3: math.inf, 290: math.nan}, "-inf": {160: -math.inf}}  # fmt: skip


@pytest.mark.some(3)
@pytest.mark.parametrize("told", [True, False], ids=["told", "untold"])
@pytest.mark.parametrize("tile", [None, ONE_ROW, ROWS16, ROWS8, TALL, GROUP], ids=str)
def test_logits_that_are_no_number(tile: TileConfig | None, told: bool, request: Any) -> None:
    """Maxima, sums and outputs of NaN and infinity are torch's, be keys split or not."""
    if tile is not None:
        request.getfixturevalue("emulator")
    torch.manual_seed(0)
    rows, heads = 1 if tile == ONE_ROW else 9, len(PLACES)
    wrapper = wl.AttentionWrapper(
        num_q_heads=heads, num_kv_heads=heads, head_dim=64, device="cpu", max_scores=told, tile=tile
    )
    for lens in ([300], [300] * 7, [3000]):  # the last one's keys are split
        q = torch.rand(rows * len(lens), heads, 64).half()
        k, v = torch.rand(2, sum(lens), heads, 64).half()
        v[..., ::7] = 0.0  # times infinity NaN, too
        for head, places in enumerate(PLACES.values()):
            for at, number in places.items():
                k[at :: lens[0], head] = number
        offsets = [[n * i for i in range(len(lens) + 1)] for n in (rows, lens[0])]
        wrapper.plan(*offsets)
        asked = wl.AuxRequest(lse=True, max_scores=told)
        out, aux = wrapper.run(q, (k, v), return_aux=asked)
        assert aux.lse is not None
        for i in range(len(lens)):
            mine, theirs = (slice(i * n, (i + 1) * n) for n in (rows, lens[0]))
            logits = torch.einsum("rhd,khd->hrk", q[mine].double(), k[theirs].double()) / 8
            check_like_torch(logits, v[theirs], *(x[mine] for x in (out, aux.lse)))
            if told:
                assert aux.max_scores is not None
                found = aux.max_scores[mine].T.double()
                torch.testing.assert_close(found, logits.amax(-1), equal_nan=True, **CLOSE)


CLOSE: dict[str, Any] = {"atol": 2e-3, "rtol": 2e-3}


def check_like_torch(
    logits: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Logits [heads, rows, keys] of one request against what attention made of them."""
    expected = torch.softmax(logits, -1) @ v.double().transpose(0, 1)
    found = out.double().transpose(0, 1)
    torch.testing.assert_close(found, expected, equal_nan=True, **CLOSE)
    sums = torch.logsumexp(logits, -1)
    torch.testing.assert_close(lse.double().T, sums, equal_nan=True, **CLOSE)


@pytest.mark.parametrize("kv_format", [wl.Ragged(), wl.Composed(4)], ids=str)
@pytest.mark.parametrize("backend", [None, "reference"])
def test_every_reading_tells_nan_beside_infinity(backend: Any, kv_format: KVFormat) -> None:
    torch.manual_seed(0)
    q, (k, v) = torch.rand(9, 4, 64), torch.rand(2, 24, 2, 64)
    k[5, 0], k[9], v[2] = math.nan, math.inf, 0.0
    wrapper = wl.AttentionWrapper(
        num_q_heads=4, num_kv_heads=2, head_dim=64, dtype="float32", device="cpu", max_scores=True,
        kv_format=kv_format, backend=backend,
    )  # fmt: skip
    if isinstance(kv_format, wl.Composed):
        wrapper.plan([0, 4, 9], [0, 6, 12], [*range(6)] * 2, [4, 4])
        k, v = k.view(6, 4, 2, 64), v.view(6, 4, 2, 64)
    else:
        wrapper.plan([0, 9], [0, 24])
    out, aux = wrapper.run(q, (k, v), return_aux=wl.AuxRequest(lse=True, max_scores=True))
    assert aux.max_scores is not None and aux.lse is not None and torch.isnan(out).all()
    for told in (aux.max_scores, aux.lse):
        assert torch.isnan(told[:, :2]).all() and torch.isposinf(told[:, 2:]).all()
