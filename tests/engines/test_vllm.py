"""vLLM on a CPU answers with the tokens of its own attention when warploom attends."""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-engines")

from support.layer_variants import soft_capped
from support.tiny_models import prompts
from support.vllm_tokens import SMALL
from vllm import LLM, SamplingParams
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import _cached_get_attn_backend

import warploom as wl
from warploom.engine_errors import BadVariantChoice, UnsupportedByEngine, WrongEngineVersion
from warploom.engines import vllm as plugin
from warploom.engines.vllm import use_variant
from warploom.engines.vllm.kinds import Kind
from warploom.engines.vllm.layers import Layer
from warploom.engines.vllm.variants import chosen

OVERRIDDEN = ("CPU_ATTN", "CPU_MLA", "AMX_MLA")
Saved = Callable[..., Path]


@pytest.fixture(autouse=True)
def own() -> Iterator[None]:
    """Begin and end with vLLM's own back ends."""
    use_variant(None)
    _forget()
    yield
    use_variant(None)
    _forget()


def _forget() -> None:
    for name in OVERRIDDEN:
        AttentionBackendEnum[name].clear_override()
    _cached_get_attn_backend.cache_clear()


def engine(model: Path, **options: Any) -> LLM:
    return LLM(
        model=str(model), skip_tokenizer_init=True, enforce_eager=True, disable_log_stats=True,
        **{"dtype": "float32", **SMALL, **options},
    )  # fmt: skip


def answers(llm: LLM, given: list[list[int]], tokens: int = 16) -> list[list[int]]:
    how = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
    asked: Any = [{"prompt_token_ids": one} for one in given]
    return [list(x.outputs[0].token_ids) for x in llm.generate(asked, how, use_tqdm=False)]


def both(model: Path, given: list[list[int]], **options: Any) -> tuple[Any, Any]:
    """Tokens of vLLM's own attention and of warploom's."""
    expected = answers(engine(model, **options), given)
    _forget()
    plugin.register()
    before = wl.stats().plans
    got = answers(engine(model, **options), given)
    assert wl.stats().plans > before  # else nobody asked warploom
    return expected, got


@pytest.mark.parametrize(
    "name", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "Gemma3", "GptOss"]
)
def test_tokens_are_those_of_its_own_attention(saved: Saved, name: str) -> None:
    """Six prompts of 240 tokens in chunks of 64 in all, beside requests that decode."""
    expected, got = both(saved(name), prompts())
    assert got == expected
    assert len({token for one in expected for token in one}) > 12  # six if each repeated its last


@pytest.mark.parametrize(("name", "seconds"), [("Llama", 0.0), ("Gemma2", 0.0), ("Llama", 1.0)])
def test_prefixes_of_the_cache_are_shared(
    saved: Saved, name: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time all requests list the pages of the first one's prefix.

    The last case weighs what a GPU would, with keys that take so many seconds to read.
    """
    from warploom.engines.vllm.sharing import Sharing
    from warploom.engines.vllm.steps import Step

    made = Sharing.of
    monkeypatch.setattr(Sharing, "of", lambda *args: replace(made(*args), seconds_of_key=seconds))

    seen = []
    shares = Step.shares_pages.func  # type: ignore[attr-defined]
    monkeypatch.setattr(
        Step, "shares_pages", property(lambda step: seen.append(shares(step)) or seen[-1])
    )
    given = prompts((7, 20, 3, 12), shared=96)
    options = {"block_size": 32, "enable_prefix_caching": True}
    expected = answers(engine(saved(name), **options), given)
    _forget()
    plugin.register()
    llm = engine(saved(name), **options)
    assert answers(llm, given[:1]) == expected[:1]
    assert answers(llm, given) == expected
    assert any(seen)


def test_a_function_chooses_the_variant_of_each_layer(saved: Saved) -> None:
    """A model with a wide soft-cap answers as one with a tight one, by a variant."""
    tight, wide = (saved("Gemma2", attn_logit_softcapping=cap) for cap in (2.0, 50.0))
    expected = answers(engine(tight), prompts())
    assert answers(engine(wide), prompts()) != expected
    _forget()
    plugin.register()
    use_variant(soft_capped)
    assert os.environ["VLLM_WARPLOOM_VARIANT"] == "support.layer_variants:soft_capped"
    assert answers(engine(wide), prompts()) == expected


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("support.layer_variants:no_variant", "for model.*attn is 'model.layers.0"),
        ("support.layer_variants:none_such", "has no function none_such"),
        ("no_such_module:choose", "there is no module no_such_module"),
        ("no_colon", "no pair with a colon"),
        ("support.layer_variants:without_values", r"reads \['slopes'\], which have no value"),
        ("support.layer_variants:by_request", "reads at.batch, and steps hold any requests"),
    ],
)
def test_choices_that_choose_nothing_are_told(
    spec: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_WARPLOOM_VARIANT", spec)
    with pytest.raises(BadVariantChoice, match=reason):
        chosen(Layer("model.layers.0.self_attn.attn", 4, 2, 32, 0.2))


def test_functions_that_no_other_process_finds_are_refused() -> None:
    with pytest.raises(BadVariantChoice, match="cannot from there"):
        use_variant(lambda layer: None)


def test_latent_attention_is_refused_while_loading(saved: Saved) -> None:
    plugin.register()
    with pytest.raises(UnsupportedByEngine, match="latent attention"):
        engine(saved("DeepseekV2"))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"attn_type": "encoder_only"}, "encoder_only"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "int8_per_token_head"),
        ({"head_size": 20}, "heads of 20 lanes"),
        ({"head_size": 512}, "heads of 512 lanes"),
        ({"chunk_lookback": 3}, "chunk_lookback"),
    ],
)
def test_layers_that_no_kernel_serves_are_refused(options: dict[str, Any], name: str) -> None:
    from warploom.engines.vllm.impl import LayerAttention

    layer = {"num_heads": 4, "head_size": 64, "scale": 0.125, **options}
    with pytest.raises(UnsupportedByEngine, match=name):
        LayerAttention(**layer)


@pytest.mark.parametrize("kind", ["auto", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("slopes", [None, [0.5, 0.25, 0.125, 0.0625]])
def test_a_layer_reads_what_it_wrote(kind: str, slopes: list[float] | None) -> None:
    """Scales of the cache and ALiBi, beside torch on the numbers that were stored."""
    from warploom.engines.vllm.builder import StepMetadata
    from warploom.engines.vllm.impl import LayerAttention
    from warploom.engines.vllm.kinds import kinds_of
    from warploom.engines.vllm.steps import Step

    page, tokens, dtype = 16, 21, torch.bfloat16
    impl = LayerAttention(4, 32, 0.2, 2, slopes, None, kind)
    impl.process_weights_after_loading(dtype)
    known = impl.described("layers.0", None)
    kinds = kinds_of([known], page_size=page, dtype=dtype, device=torch.device("cpu"))
    layer: Any = SimpleNamespace(layer_name="layers.0", _k_scale_float=0.5, _v_scale_float=0.25)
    k_scale, v_scale = (1.0, 1.0) if kind == "auto" else (0.5, 0.25)
    q, k, v = torch.randn(3, tokens, 4, 32).to(dtype)
    k, v = k[:, :2].contiguous(), v[:, :2].contiguous()
    stored = {"auto": dtype, "fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[kind]
    cache = torch.zeros(5, 2, page, 64, dtype=dtype if kind == "auto" else torch.uint8)
    pages = torch.tensor([[3, 1]], dtype=torch.int32)
    place = torch.arange(tokens)
    slots = pages[0, place // page].long() * page + place % page
    padded = torch.cat((slots, torch.tensor([-1])))  # which writes nothing
    more = torch.ones(1, 2, 32, dtype=dtype)
    impl.do_kv_cache_update(layer, torch.cat((k, more)), torch.cat((v, more)), cache, padded)
    lens = torch.tensor([tokens], dtype=torch.int32)
    qo = torch.tensor([0, tokens], dtype=torch.int32)
    step = Step(page, tokens, tokens, tokens, qo, lens, pages, qo.numpy(), lens.numpy())
    out = torch.empty_like(q)
    impl.forward(layer, q, k, v, cache, StepMetadata(step, kinds, tokens), out)

    k, v = (
        ((x.float() / scale).to(stored).float() * scale).repeat_interleave(2, 1)
        for x, scale in ((k, k_scale), (v, v_scale))
    )
    logits = torch.einsum("qhd,khd->hqk", q.float(), k) * 0.2
    if slopes is not None:
        logits += torch.tensor(slopes)[:, None, None] * (place[None] - place[:, None])
    logits.masked_fill_(place[None] > place[:, None], -torch.inf)
    expected = torch.einsum("hqk,khd->qhd", logits.softmax(-1), v)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("part", "changes", "name"),
    [
        ("model_config", {"is_mm_prefix_lm": True}, "both ways"),
        ("model_config", {"rswa_window": 64}, "R-SWA"),
        ("attention_config", {"use_non_causal": True}, "not causal"),
        ("parallel_config", {"decode_context_parallel_size": 2}, "decode context parallelism"),
        ("parallel_config", {"prefill_context_parallel_size": 2}, "prefill context parallelism"),
        ("speculative_config", {"enable_adaptive_verification": True}, "adaptive verification"),
    ],
)
def test_options_that_are_not_connected_are_refused(
    part: str, changes: dict[str, Any], name: str
) -> None:
    from warploom.engines.vllm import builder

    config = {
        "model_config": {"is_mm_prefix_lm": False, "rswa_window": None},
        "attention_config": {"use_non_causal": False},
        "parallel_config": {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1},
        "speculative_config": {"enable_adaptive_verification": False},
    }

    def made(parts: dict[str, dict[str, Any]]) -> Any:
        return SimpleNamespace(**{key: SimpleNamespace(**one) for key, one in parts.items()})

    builder._refuse(made(config))
    with pytest.raises(UnsupportedByEngine, match=name):
        builder._refuse(made({**config, part: {**config[part], **changes}}))


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.__version__", "0.33.0")
    with pytest.raises(WrongEngineVersion, match=r"vLLM 0\.33\.0 is installed.*>=0\.32, <0\.33"):
        plugin.register()
    assert not AttentionBackendEnum.CPU_ATTN.is_overridden()


def test_nothing_is_replaced_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    plugin.load_plugin()
    assert not AttentionBackendEnum.CPU_ATTN.is_overridden()
    monkeypatch.setenv("VLLM_PLUGINS", "warploom")
    plugin.load_plugin()
    assert "warploom" in AttentionBackendEnum.CPU_ATTN.get_path()


def test_what_the_user_has_bound_is_not_replaced_by_the_model_s() -> None:
    """Sinks of one's own on a layer with sinks, and a field with the name of ALiBi's slopes."""
    mine = torch.randn(4)

    class Decay(wl.Variant):
        slopes = wl.Tensor("float32", ("q_head",))

        def logits_transform(self, logits: Any, at: Any) -> Any:
            return logits - self.slopes[at.q_head]

    shape: Any = {"page_size": 16, "dtype": torch.float32, "device": torch.device("cpu")}
    with_sinks = Layer("layers.0", 4, 2, 32, 0.2, has_sinks=True)
    own, model = wl.Causal() & wl.AttentionSink(sink=mine), with_sinks.variant
    assert Kind(with_sinks, own, **shape).names == frozenset()
    assert Kind(with_sinks, model, **shape).names == {"sink"}
    biased = Layer("layers.0", 4, 2, 32, 0.2, alibi_slopes=(0.5, 0.25, 0.125, 0.1))
    assert Kind(biased, wl.Causal() & Decay(slopes=mine), **shape).names == frozenset()
    assert Kind(biased, biased.variant, **shape).names == {"slopes"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_that_are_loaded_again_come_to_where_graphs_read_them(dtype: torch.dtype) -> None:
    from warploom.engines.vllm.impl import LayerAttention

    sinks = torch.nn.Parameter(torch.randn(4).to(dtype))
    impl = LayerAttention(4, 32, 0.2, 2, None, None, "auto", sinks=sinks)
    impl.process_weights_after_loading(dtype)
    place = impl._given["sink"].data_ptr()
    with torch.no_grad():
        sinks.copy_(torch.randn(4))
    impl.process_weights_after_loading(dtype)
    assert impl._given["sink"].data_ptr() == place
    assert torch.equal(impl._given["sink"], sinks.detach().float())
