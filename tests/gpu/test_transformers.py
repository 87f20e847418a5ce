"""Models of transformers generate on a device with warploom: each token is one that float32 allows.

Half precision may choose another token where two are as good. So what was generated is read once
more by the same model in float32 with eager attention, and every token must be its best one, within
twice the error that eager attention in half precision makes on the same text.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")

from packaging.specifiers import SpecifierSet
from support.continuous_batches import HOW, batches
from support.tiny_models import prompts, tiny

import warploom as wl
from warploom.engines import transformers as continuous

pytestmark = pytest.mark.gpu

NAMES = ("Llama", "Mistral", "Gemma2", "Gemma3", "GptOss")
SPREAD = 0.1  # of weights: float16 then tells tokens apart


@pytest.fixture(autouse=True)
def registered() -> None:
    wl.register_huggingface()


def made(name: str, device: torch.device, dtype: torch.dtype, **changes: Any) -> Any:
    return tiny(name, initializer_range=SPREAD, **changes).to(device, dtype)


def on(device: torch.device, name: str, implementation: str, **changes: Any) -> Any:
    model = made(name, device, torch.float16, **changes)
    model.set_attn_implementation(implementation)
    return model


def check(name: str, device: torch.device, prompt: list[int], found: list[int]) -> None:
    """Tokens behind a prompt against the model's own in float32."""
    assert len(found) == HOW["max_new_tokens"]
    ids = torch.tensor([prompt + found], device=device)
    rows = slice(len(prompt) - 1, -1)
    with torch.no_grad():
        exact = read(made(name, device, torch.float32), ids)[rows]
        naive = read(made(name, device, torch.float16), ids)[rows].float()
    allowed = 2 * (2 * (naive - exact).abs().max() + 1e-3)
    chosen = exact.gather(1, torch.tensor(found, device=device)[:, None])[:, 0]
    assert (exact.amax(1) - chosen <= allowed).all()
    assert allowed < 0.25 * exact.std(), "tokens would be told from each other by nothing"


def read(model: Any, ids: torch.Tensor) -> torch.Tensor:
    model.set_attn_implementation("eager")
    return model(ids, use_cache=False).logits[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_by_caches(name: str, cache: str, cuda: Any) -> None:
    """Two prompts, the second of which is padded on the left."""
    model = on(cuda, name, "warploom")
    given = prompts((30, 21))
    mask = torch.ones(2, 30, dtype=torch.long, device=cuda)
    mask[1, :9] = 0
    padded = torch.tensor([given[0], [0] * 9 + given[1]], device=cuda)
    before = wl.stats().plans
    found = model.generate(
        padded, attention_mask=mask, cache_implementation=cache, disable_compile=True, **HOW
    )
    assert wl.stats().plans > before
    for prompt, ids in zip(given, found.tolist(), strict=True):
        check(name, cuda, prompt, ids[30:])


def test_assisted_decoding(cuda: Any) -> None:
    """A draft of one layer proposes; the model reads several rows at once."""
    model = on(cuda, "Llama", "warploom")
    draft = on(cuda, "Llama", "warploom", num_hidden_layers=1)
    (prompt,) = prompts((30,))
    ids = torch.tensor([prompt], device=cuda)
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), assistant_model=draft, **HOW
    )  # fmt: skip
    check("Llama", cuda, prompt, found[0, 30:].tolist())


@pytest.mark.parametrize(
    ("name", "implementation", "graphs"),
    [
        ("Llama", continuous.NAME, False),
        ("Llama", continuous.NAME_BY_TABLES, False),  # the decode fast path
        ("Llama", continuous.NAME_BY_TABLES, (False, True)),  # and its CUDA graphs
        ("Gemma2", continuous.NAME, False),
        ("Gemma3", continuous.NAME, False),
        ("Gemma3", continuous.NAME_BY_TABLES, (False, True)),  # windows: no graph is made
        # by default all steps lie in graphs
        ("Llama", continuous.NAME, None),
        ("Llama", continuous.NAME_BY_TABLES, None),
        ("Gemma2", continuous.NAME, None),
        ("Gemma3", continuous.NAME, None),
    ],
)
def test_continuous_batching(name: str, implementation: str, graphs: Any, cuda: Any) -> None:
    got = version("transformers")
    if not SpecifierSet(continuous.TESTED).contains(got, prereleases=True):
        pytest.skip(f"transformers {got} is not one of {continuous.TESTED}")
    continuous.register(implementation)
    given = prompts((5, 40, 1, 90, 33, 60), 48)
    found = batches(on(cuda, name, implementation), given, implementation, num_blocks=96,
                    use_cuda_graph=graphs)  # fmt: skip
    assert len(found) == len(given)
    for prompt, tokens in zip(given, found, strict=True):
        check(name, cuda, prompt, tokens)
