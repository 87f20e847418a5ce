"""Generation is timed only where tokens agree: small, on the CPU, by transformers itself."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip(
    "transformers", reason="needs transformers: pip install 'warploom[transformers]'"
)


@pytest.fixture
def generation(harness: ModuleType) -> ModuleType:
    return import_module("transformers_generation")


def test_each_implementation_has_figures_and_equal_tokens(
    generation: ModuleType, harness: ModuleType, tmp_path: Path
) -> None:
    only = "sdpa,warploom,FlashAttention-2"
    generation.main(["--device", "cpu", "--tiny", "--only", only, "--out", str(tmp_path)])
    facts, rows = harness.load_rows(tmp_path / "transformers_generation.jsonl")
    assert facts["transformers"]
    by_impl = {row.impl: row for row in rows if row.case == "batch 6"}
    assert by_impl["FlashAttention-2"].note == "n/a: FlashAttention has no CPU kernels"
    for impl in ("sdpa", "warploom"):
        assert by_impl[impl].value == pytest.approx(6 * 8 / by_impl[impl].ms * 1e3, rel=0.01)
    params = by_impl["warploom"].params
    assert params["compared_with"] == "sdpa" and params["compiled"] == 0
    assert params["equal_requests"] == params["equal_until"] == 1.0
    assert params["farthest"] < 1e-3


def test_wrong_attention_has_no_figure(
    generation: ModuleType, harness: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = import_module("warploom.engines.transformers.continuous")
    right = module.attention_forward

    def wrong(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        out, _ = right(*args, **kwargs)
        return -out, None

    monkeypatch.setattr(module, "attention_forward", wrong)
    generation.main(
        ["--device", "cpu", "--tiny", "--only", "sdpa,warploom", "--out", str(tmp_path)]
    )
    _, rows = harness.load_rows(tmp_path / "transformers_generation.jsonl")
    (row,) = [row for row in rows if row.impl == "warploom"]
    assert row.value is None and row.note.startswith("wrong: batch 6")


def test_one_wrong_token_has_no_figure(generation: ModuleType) -> None:
    """Of a request's last ones, which no other token follows."""
    device = torch.device("cpu")
    model, prompts = generation.make_model(generation.TINY, device), [[5, 6, 7], [8, 9]]
    sdpa = generation.Way("sdpa", "sdpa", {"auto_switch_to_flash": False})
    found = generation.generate(model, sdpa, generation.TINY, prompts, 8).tokens
    assert generation.farthest(model, prompts, found) < 1e-3
    found[1][-1] = (found[1][-1] + 1) % generation.TINY.vocabulary
    assert generation.farthest(model, prompts, found) > generation.FAR


def test_no_figure_is_begun_when_time_is_over(
    generation: ModuleType, harness: ModuleType, tmp_path: Path
) -> None:
    generation.main(["--device", "cpu", "--tiny", "--budget", "0", "--out", str(tmp_path)])
    _, rows = harness.load_rows(tmp_path / "transformers_generation.jsonl")
    assert len(rows) == len(generation.WAYS)
    assert {row.note for row in rows} == {"n/a: 0 s were over"}


def test_shares_count_what_is_equal(generation: ModuleType) -> None:
    shares = generation.agreement([[1, 2, 3], [1, 5, 3], [9, 2, 3]], [[1, 2, 3]] * 3)
    assert shares == {"equal_requests": 1 / 3, "equal_until": 4 / 9}


def test_prompts_are_ragged_and_the_same_each_time(generation: ModuleType) -> None:
    prompts = generation.make_prompts(256, generation.FULL)
    assert prompts == generation.make_prompts(256, generation.FULL)
    lengths = sorted(map(len, prompts))
    assert (lengths[0], len(prompts)) == (generation.SHORTEST, 256)
    assert 512 < lengths[-1] <= generation.LONGEST
    assert lengths[128] < sum(lengths) / 256  # the shorter, the more


def test_decodes_are_those_after_the_last_prompt(generation: ModuleType) -> None:
    found = generation.Answers([[7, 7, 7], [7, 7, 7]], [[1.0, 2.0, 5.0], [3.0, 4.0, 7.0]], 0.5)
    assert found.seconds == 6.5 and found.decodes == (3, 4.0)
