"""Small random models give the same with warploom as with transformers' own attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")

from transformers import (
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MistralConfig,
    MistralForCausalLM,
)
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
)

from warploom.errors import ArgumentError, UnsupportedSpec
from warploom.runtime.calls import huggingface
from warploom.runtime.calls.huggingface_masks import make_mask

TINY: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
WINDOW = 9
MODELS: dict[str, Any] = {
    "bert": (BertModel, BertConfig, {"num_key_value_heads": None, "head_dim": None}),  # head_dim 12
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": WINDOW}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"sliding_window": WINDOW}),
    "gpt-oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {"sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "llama4": (
        Llama4ForCausalLM,
        Llama4TextConfig,
        {
            "attention_chunk_size": 8,
            "intermediate_size_mlp": 32,
            "num_local_experts": 2,
            "layer_types": ["chunked_attention", "full_attention"],
        },
    ),
}


def model(name: str, implementation: str) -> Any:
    cls, config, changes = MODELS[name]
    torch.manual_seed(0)
    options = {key: value for key, value in {**TINY, **changes}.items() if value is not None}
    return cls(config(**options, attn_implementation=implementation)).eval()


@pytest.fixture(autouse=True)
def registered() -> None:
    huggingface.register_huggingface()


def batch() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids = torch.randint(5, 90, (2, 25), generator=torch.Generator().manual_seed(0))
    right, left = torch.ones(2, 2, 25, dtype=torch.long)
    right[0, 18:] = 0
    left[1, :6] = 0
    return ids, {"none": torch.ones(2, 25, dtype=torch.long), "right": right, "left": left}


@pytest.mark.some(5)
@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize("name", list(MODELS))
def test_models_give_the_same_as_with_eager_attention(name: str, padding: str) -> None:
    ids, masks = batch()
    mask = masks[padding]
    outputs = []
    for implementation in ("eager", huggingface.NAME):
        with torch.no_grad():
            outputs.append(model(name, implementation)(input_ids=ids, attention_mask=mask)[0])
    kept = mask.bool()
    torch.testing.assert_close(outputs[1][kept], outputs[0][kept], atol=2e-5, rtol=1e-4)


@pytest.mark.some(4)
@pytest.mark.parametrize("padded", [6, 20])  # the second reaches into the window
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_generation_gives_the_same_tokens(name: str, cache: str, padded: int) -> None:
    ids, masks = batch()
    left = masks["none"]
    left[1, :padded] = 0
    found = [
        model(name, implementation).generate(
            ids,
            attention_mask=left,
            cache_implementation=cache,
            disable_compile=True,
            max_new_tokens=8,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        for implementation in ("eager", huggingface.NAME)
    ]
    assert found[0].sequences.tolist() == found[1].sequences.tolist()
    for expected, logits in zip(found[0].logits, found[1].logits, strict=True):
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)


def test_masks_stay_small_where_layers_know_the_rest() -> None:
    padding = torch.ones(2, 20, dtype=torch.bool)
    padding[1, 15:] = False
    sizes = {"batch_size": 2, "q_length": 4, "kv_length": 20, "q_offset": 16}
    window = sliding_window_causal_mask_function(WINDOW)
    for function, local in ((causal_mask_function, None), (window, WINDOW)):
        make = {**sizes, "mask_function": function, "local_size": local}
        assert make_mask(**make) is None
        assert make_mask(**make, attention_mask=padding | True) is None
        found = make_mask(**make, attention_mask=padding)
        assert found is not None
        assert torch.equal(found, padding)
        # of a cache that has let go of the first keys; generation hands it back
        cut = {**make, "kv_length": 8, "kv_offset": 12}
        found = make_mask(**cut, attention_mask=padding)
        assert found is not None
        assert torch.equal(found, padding)
        again = make_mask(**cut, attention_mask=found)
        assert again is not None
        assert torch.equal(again, padding)
    both_ways = {**sizes, "q_offset": 0, "mask_function": bidirectional_mask_function}
    assert make_mask(**both_ways) is None


def test_masks_that_say_more_come_whole() -> None:
    sizes = {"batch_size": 1, "q_length": 4, "kv_length": 20}
    chunks = chunked_causal_mask_function(WINDOW, torch.zeros(1, dtype=torch.long))
    for changes in (
        {"q_offset": 16, "mask_function": chunks, "local_size": WINDOW},
        {"q_offset": 3, "mask_function": causal_mask_function},  # a static cache with room left
        {"q_offset": torch.tensor(16), "mask_function": causal_mask_function},
    ):
        found = make_mask(**sizes, **changes)  # type: ignore[arg-type]
        assert found is not None
        q, kv = torch.arange(4)[:, None] + changes["q_offset"], torch.arange(20)
        zero = torch.zeros((), dtype=torch.long)
        assert torch.equal(found[0, 0], changes["mask_function"](zero, zero, q, kv))


@pytest.mark.parametrize("joined", ["image", "packed"])
def test_windows_joined_with_other_masks_come_whole(joined: str) -> None:
    """Gemma 3's images see themselves both ways; packed sequences do not see each other."""
    window = sliding_window_causal_mask_function(8)
    image = torch.tensor([[-1, -1, 0, 0, 0, 0, *[-1] * 18]])
    packed = torch.tensor([[0] * 6 + [1] * 4])
    function, tokens = {
        "image": (or_masks(window, blockwise_overlay(image)), 24),
        "packed": (and_masks(window, packed_sequence_mask_function(packed)), 10),
    }[joined]
    found = make_mask(1, tokens, tokens, mask_function=function, local_size=8)
    assert found is not None and found.shape == (1, 1, tokens, tokens)
    q, kv = torch.meshgrid(torch.arange(tokens), torch.arange(tokens), indexing="ij")
    zero = torch.zeros_like(q)
    assert torch.equal(found[0, 0], function(zero, zero, q, kv))


def test_additive_masks_and_position_biases_are_added() -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 16, generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(1, 1, 6, 6).masked_fill(~torch.ones(6, 6).tril().bool(), -3e38)
    bias = torch.randn(1, 4, 6, 6)
    out, weights = huggingface.attention_forward(
        torch.nn.Module(), q, k, v, mask, scaling=0.3, position_bias=bias
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask + bias, scale=0.3
    )
    assert weights is None
    torch.testing.assert_close(out, expected.transpose(1, 2))


@pytest.mark.parametrize(
    "wrong", [{"dropout": 0.1}, {"output_attentions": True}, {"cache": object()}]
)
def test_what_is_not_served_is_refused(wrong: dict[str, Any]) -> None:
    q = torch.zeros(1, 1, 2, 16)
    with pytest.raises(UnsupportedSpec, match="is not supported"):
        huggingface.attention_forward(torch.nn.Module(), q, q, q, None, **wrong)


@pytest.mark.parametrize("lies_by", ["rows", "heads", "lanes"])
@pytest.mark.parametrize("dim", [16, 12])
def test_results_are_contiguous(lies_by: str, dim: int) -> None:
    """As those of transformers' own functions, wherever a rotation has left the queries."""
    q, k, v = torch.randn(3, 2, 4, 6, dim)
    order = {"heads": (0, 1, 2, 3), "rows": (0, 2, 1, 3), "lanes": (0, 3, 1, 2)}[lies_by]
    back = [order.index(axis) for axis in range(4)]
    moved = q.permute(order).contiguous().permute(back)
    out, _ = huggingface.attention_forward(torch.nn.Module(), moved, k, v, None)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert out.is_contiguous()
    torch.testing.assert_close(out, exact.transpose(1, 2), atol=1e-5, rtol=1e-4)


@pytest.mark.some(3)
@pytest.mark.parametrize("padding", ["none", "right"])
@pytest.mark.parametrize("name", ["bert", "mistral", "gemma2"])
def test_models_compile_whole(name: str, padding: str) -> None:
    ids, masks = batch()
    torch._dynamo.reset()
    tested = model(name, huggingface.NAME)
    compiled = torch.compile(tested, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        outputs = [f(input_ids=ids, attention_mask=masks[padding])[0] for f in (compiled, tested)]
    torch.testing.assert_close(outputs[0], outputs[1], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", [3, None, ""])
def test_models_ask_for_attention_by_name(name: Any) -> None:
    with pytest.raises(ArgumentError, match=f"name: is {name!r}; expected the name"):
        huggingface.register_huggingface(name)
