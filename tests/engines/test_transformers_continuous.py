"""Continuous batching answers with sdpa's tokens when warploom attends."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: make test-engines")

from support.continuous_batches import HOW, alone, batches
from support.tiny_models import prompts, tiny
from transformers import CompileConfig

import warploom as wl
from warploom.engine_errors import UnsupportedByEngine, WrongEngineVersion
from warploom.engines import transformers as continuous
from warploom.engines.transformers.masks import make_mask_or_none
from warploom.engines.transformers.steps import Step
from warploom.errors import ArgumentError


@pytest.fixture(autouse=True)
def registered() -> None:
    wl.register_huggingface()
    continuous.register()


@pytest.mark.parametrize(("name", "shared"), [("Llama", 48), ("Gemma2", 0), ("Gemma3", 0)])
def test_continuous_batches_answer_as_sdpa(name: str, shared: int) -> None:
    """Prompts share pages with those that came before. Soft-caps are eager `generate`'s alone."""
    given = prompts((5, 40, 1, 90, 33, 60), shared)
    expected = alone(tiny(name), given) if name == "Gemma2" else batches(tiny(name), given, "sdpa")
    before = wl.stats().plans
    assert len({token for one in expected for token in one}) > 12  # six if each repeated its last
    assert batches(tiny(name), given, continuous.NAME) == expected
    assert wl.stats().plans > before


def test_block_tables_answer_as_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers offers them on devices that this one is taken for; the rest is its own."""
    found = import_module("transformers.generation.continuous_batching.initialization")
    monkeypatch.setattr(found, "is_torch_xpu_available", lambda *_, **__: True)
    made, shapes = Step.of_table, []

    def counted(kv_indptr: torch.Tensor, table: torch.Tensor, page: int) -> Step:
        shapes.append(table.shape)
        return made(kv_indptr, table, page)

    monkeypatch.setattr(Step, "of_table", counted)
    given = prompts((5, 40, 1, 90, 33, 60), 48)
    expected = batches(tiny("Llama"), given, "sdpa")
    continuous.register(continuous.NAME_BY_TABLES)
    assert batches(tiny("Llama"), given, continuous.NAME_BY_TABLES) == expected
    assert len(shapes) > 5  # decodes at the end; once for both layers


def test_block_tables_are_no_invitation_to_call_flash() -> None:
    utils: Any = import_module("transformers.modeling_flash_attention_utils")
    continuous.register(continuous.NAME_BY_TABLES)
    with pytest.raises(UnsupportedByEngine, match="flash_attn_with_kvcache"):
        utils._flash_with_kvcache_fn()


def test_generation_serves_the_name() -> None:
    """As it serves `warploom`, of which tests/runtime/test_huggingface.py has more."""
    model, found = tiny("Gemma3"), []
    ids = torch.tensor(prompts((30, 30)))
    for implementation in ("sdpa", continuous.NAME):
        model.set_attn_implementation(implementation)
        found.append(
            model.generate(
                ids, attention_mask=torch.ones_like(ids), cache_implementation="static",
                disable_compile=True, **HOW,
            ).tolist()
        )  # fmt: skip
    assert found[0] == found[1]


def test_assisted_decoding_serves_the_name() -> None:
    model, draft, found = tiny("Llama"), tiny("Llama", num_hidden_layers=1), []
    ids = torch.tensor(prompts((30,)))
    for implementation in ("sdpa", continuous.NAME):
        for one in (model, draft):
            one.set_attn_implementation(implementation)
        found.append(
            model.generate(
                ids, attention_mask=torch.ones_like(ids), assistant_model=draft, **HOW
            ).tolist()
        )
    assert found[0] == found[1]


@pytest.mark.parametrize("tells_lengths", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_packed_sequences_do_not_see_each_other(name: str, tells_lengths: bool) -> None:
    """The mask that continuous batching needs not is made where a plain forward reads it.

    Whoever collates for FlashAttention tells lengths, too, by which sequences are told apart.
    """
    model, found = tiny(name), []
    ids = torch.tensor([prompts((50,))[0]])
    places = torch.cat((torch.arange(32), torch.arange(18)))[None]
    ends = torch.tensor([0, 32, 50], dtype=torch.int32)
    told: dict[str, Any] = {"max_length_q": 32, "max_length_k": 32} if tells_lengths else {}
    told |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends} if tells_lengths else {}
    for implementation in ("sdpa", continuous.NAME):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            found.append(model(ids, position_ids=places, use_cache=False, **told).logits)
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_steps_may_be_compiled(name: str) -> None:
    """As transformers compiles steps if asked to: attention itself is left out."""
    given = prompts((5, 40, 1, 33), 48)
    how = CompileConfig(fullgraph=False, dynamic=True, backend="aot_eager")
    torch._dynamo.reset()
    found = batches(tiny(name), given, continuous.NAME, varlen_compile_config=how)
    assert found == alone(tiny(name), given)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize("is_packed", [False, True], ids=["one sequence", "packed"])
@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_models_compile_whole(name: str, is_packed: bool) -> None:
    model = tiny(name)
    model.set_attn_implementation(continuous.NAME)
    ids = torch.tensor([prompts((24,))[0]])
    places = torch.cat((torch.arange(16), torch.arange(8)))[None] if is_packed else None
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        found = [f(ids, position_ids=places, use_cache=False).logits for f in (compiled, model)]
    torch.testing.assert_close(found[0], found[1], atol=2e-5, rtol=1e-4)


def test_continuous_batching_itself_refuses_names_without_flash() -> None:
    with pytest.raises(ValueError, match="warploom is not supported for continuous batching"):
        batches(tiny("Llama"), prompts((5,)), "warploom")
    for wrong in ("warploom", lambda layer: None):
        with pytest.raises(ArgumentError, match="contain 'flash' alone, like"):
            continuous.register(wrong)  # type: ignore[arg-type]


def test_names_of_warploom_do_not_displace_each_other() -> None:
    given = prompts((5, 9))
    for name in (continuous.NAME, continuous.NAME_BY_TABLES):
        continuous.register(name)
    found = [
        batches(tiny("Llama"), given, name)
        for name in (continuous.NAME, continuous.NAME_BY_TABLES, continuous.NAME)
    ]
    assert found[0] == found[1] == found[2]


def test_masks_may_close_over_themselves() -> None:
    """And over names that are not bound yet: whoever looks into a mask must not fall over them."""

    def itself(batch: Any, head: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx <= q_idx if itself is not None else later

    function: Any = itself
    made = make_mask_or_none(
        batch_size=1, q_length=4, kv_length=4, mask_function=function, local_size=2
    )
    assert isinstance(made, torch.Tensor)
    assert torch.equal(made[0, 0], torch.ones(4, 4, dtype=torch.bool).tril())
    later = 1


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", "5.30.0")
    with pytest.raises(WrongEngineVersion, match=r"transformers 5\.30\.0 is installed"):
        continuous.register()
