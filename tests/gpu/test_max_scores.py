"""The largest score of each row on a GPU: every template against the oracle, and in CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import warploom as wl
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.runtime.trials.case import Case, Setup
from warploom.runtime.trials.trials import mismatch

pytestmark = pytest.mark.gpu
BOTH = wl.AuxRequest(lse=True, max_scores=True)


class Sharp(wl.Variant):
    """Scores grow and fall along the keys, so that maxima move by little and by much."""

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return 1.5 * logits + wl.to_float(at.kv_pos % 50) * 0.3


FORMATS: dict[str, KVFormat] = {
    "ragged": wl.Ragged(),
    "dense HND": wl.Dense(layout="HND"),
    "paged": wl.Paged(16),
    "pages of 1": wl.Paged(1),
    "blocks": wl.BlockSparse(block=(16, 8)),
    "composed": wl.Composed(16),
}


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("kv_format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize("variant", [Sharp(), wl.Causal() & wl.Alibi()], ids=repr)
def test_formats(variant: wl.Variant, group_size: int, kv_format: KVFormat) -> None:
    setup = Setup(kv_format, "bfloat16", 128, 128, device="cuda", max_scores=True)
    for q_lens, kv_lens in (
        ((1, 1, 1), (500, 500, 500)),
        ((1,), (40_000,)),  # split over all SMs
        ((5, 5), (700, 700)),
        ((300, 300), (400, 400)),
        ((90, 90), (40, 40)),  # rows without a visible key
    ):
        case = Case(setup, q_lens, kv_lens, 2, group_size, scale=3.0)
        found = mismatch(variant, case)
        assert found is None, f"{case}: {found}"


def test_they_are_those_of_compiled_flex_attention(cuda: Any) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 256, 64, device=cuda).half() for h in (8, 2, 2))

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + (kv_idx - q_idx) * 0.02

    asked = torch_flex.AuxRequest(lse=True, max_scores=True)
    compiled = torch.compile(torch_flex.flex_attention)
    _, theirs = compiled(q, k, v, score_mod=score_mod, enable_gqa=True, return_aux=asked)
    _, ours = wl.attention(q, k, v, variant=wl.flex(score_mod), layout="HND", return_aux=asked)
    torch.testing.assert_close(ours.max_scores, theirs.max_scores, atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(ours.lse, theirs.lse, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("given", [False, True], ids=["made", "given"])
def test_graphs_write_them_at_each_replay(given: bool, cuda: Any) -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(n, h, 64, device=cuda).half() for n, h in ((3, 8), (900, 2), (900, 2)))
    wrapper = wl.AttentionWrapper(
        num_q_heads=8, num_kv_heads=2, head_dim=64, device=cuda, max_scores=True
    )
    wrapper.plan([0, 1, 3], [0, 500, 900])
    options: dict[str, Any] = {"max_scores": torch.empty(3, 8, device=cuda)} if given else {}
    wrapper.run(q, (k, v), return_aux=BOTH, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, aux = wrapper.run(q, (k, v), return_aux=BOTH, **options)
    for _ in range(2):
        q.copy_(torch.randn_like(q))
        graph.replay()
        logits = torch.einsum("rhd,khd->rhk", q.float(), k.float().repeat_interleave(4, 1)) / 8
        expected = torch.cat((logits[:1, :, :500].amax(-1), logits[1:, :, 500:].amax(-1)))
        torch.testing.assert_close(aux.max_scores, expected, atol=1e-3, rtol=1e-3)
        assert not given or aux.max_scores is options["max_scores"]
