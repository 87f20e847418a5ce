"""Models that are no text decoders, with the name of continuous batching.

Vision towers lay images one behind the other for names that contain "flash", encoders see both
ways, and decoders look across to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: make test-engines")

import transformers

import warploom as wl
from warploom.engines import transformers as continuous
from warploom.engines.layers import AttentionLayer

_SMALL: dict[str, Any] = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2}
_GRID = torch.tensor([[1, 4, 4], [1, 6, 4], [1, 2, 2]])  # three images


def qwen_tower() -> tuple[Any, dict[str, Any]]:
    from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig

    config = Qwen2VLVisionConfig(
        depth=2, embed_dim=64, hidden_size=64, num_heads=2, mlp_ratio=2, patch_size=4
    )
    patches = int(_GRID.prod(1).sum())
    inputs = {"hidden_states": torch.randn(patches, 3 * 2 * 4 * 4), "grid_thw": _GRID}
    return qwen.Qwen2VisionTransformerPretrainedModel(config), inputs


def pixtral_tower() -> tuple[Any, dict[str, Any]]:
    config = transformers.PixtralVisionConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        image_size=32, patch_size=4,
    )  # fmt: skip
    inputs = {
        "pixel_values": torch.randn(3, 3, 32, 32),
        "image_sizes": torch.tensor([[16, 32], [32, 16], [8, 8]]),
    }
    return transformers.PixtralVisionModel(config), inputs


def bert() -> tuple[Any, dict[str, Any]]:
    config = transformers.BertConfig(**_SMALL, num_attention_heads=2, intermediate_size=64)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, 13:] = 0
    inputs = {"input_ids": torch.randint(3, 90, (2, 20)), "attention_mask": mask}
    return transformers.BertModel(config), inputs


def bart() -> tuple[Any, dict[str, Any]]:
    config = transformers.BartConfig(
        vocab_size=100, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
    )  # fmt: skip
    ids = torch.randint(3, 90, (2, 20))
    return transformers.BartModel(config), {"input_ids": ids, "decoder_input_ids": ids[:, :7]}


MODELS = [qwen_tower, pixtral_tower, bert, bart]


@torch.no_grad()
def answers(make: Callable[[], tuple[Any, dict[str, Any]]], *names: str) -> list[torch.Tensor]:
    """Last states of one model with weights that attend to some more than to others."""
    torch.manual_seed(0)
    model, inputs = make()
    model.eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    found = []
    for name in names:
        model.set_attn_implementation(name)
        found.append(model(**inputs).last_hidden_state)
    mask = inputs.get("attention_mask")
    return found if mask is None else [x[mask.bool()] for x in found]


@pytest.mark.parametrize("make", MODELS)
def test_models_answer_as_with_sdpa(make: Callable[[], tuple[Any, dict[str, Any]]]) -> None:
    wl.register_huggingface()
    continuous.register()
    expected, plain, found = answers(make, "sdpa", "warploom", continuous.NAME)
    torch.testing.assert_close(plain, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("make", MODELS)
def test_variants_are_given_what_each_layer_means(
    make: Callable[[], tuple[Any, dict[str, Any]]],
) -> None:
    """A cap that caps nothing leaves all as it was: only decoders are causal."""
    asked = []

    def choose(layer: AttentionLayer) -> wl.Variant:
        asked.append((layer.name, layer.is_causal))
        return wl.SoftCap(1e6) & layer.variant

    continuous.register(variant=choose)
    expected, found = answers(make, "sdpa", continuous.NAME)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert len(asked) == {bart: 6}.get(make, 2)  # layers
    assert sum(is_causal for _, is_causal in asked) == {bart: 2}.get(make, 0)


def test_a_field_of_the_user_s_may_have_any_name() -> None:
    class Keep(wl.Variant):
        keep = wl.Tensor("float32", ("q_head",))

        def logits_transform(self, logits: Any, at: Any) -> Any:
            return logits * self.keep[at.q_head]

    continuous.register(variant=lambda layer: Keep(keep=torch.ones(2)) & layer.variant)
    expected, found = answers(bert, "sdpa", continuous.NAME)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
