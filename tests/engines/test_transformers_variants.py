"""A variant of the user's in a model of transformers, beside the same in eager torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: make test-engines")

from support.continuous_batches import HOW, alone, batches
from support.tiny_models import prompts, tiny
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

import warploom as wl
from warploom.engines import transformers as continuous
from warploom.engines.layers import AttentionLayer
from warploom.errors import ArgumentError, UnsupportedSpec

CAP, PLAIN_LAYER = 4.0, 0
SLOPES = torch.tensor([0.3, 0.05, 0.7, 0.0])


class Decay(wl.Variant):
    """Keys count less the farther they are, in each head at its own rate."""

    slopes = wl.Tensor("float32", ("q_head",))

    def logits_transform(self, logits: Any, at: Any) -> Any:
        return CAP * wl.tanh((logits - self.slopes[at.q_head] * (at.q_pos - at.kv_pos)) / CAP)


def choose(layer: AttentionLayer) -> wl.Variant | None:
    return None if layer.index == PLAIN_LAYER else Decay(slopes=SLOPES) & layer.variant


def decayed(
    module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float,
    sliding_window: int | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """What `choose` means, by plain torch; padding is taken from transformers' mask."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    rows, keys = query.shape[2], key.shape[2]
    distance = torch.arange(keys - rows, keys)[:, None] - torch.arange(keys)
    logits = scaling * query @ key.transpose(2, 3)
    if module.layer_idx != PLAIN_LAYER:
        logits = CAP * ((logits - SLOPES[:, None, None] * distance) / CAP).tanh()
    hidden = (distance < 0) | (distance >= (sliding_window or keys))
    if mask is not None:
        hidden = hidden | (mask < 0)
    weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    weights = weights.nan_to_num(0.0)  # of rows of padding, which see nothing
    return (weights @ value).transpose(1, 2), None


@pytest.fixture(autouse=True)
def registered() -> None:
    AttentionInterface.register("decayed", decayed)
    AttentionMaskInterface.register("decayed", eager_mask)
    continuous.register(variant=choose)


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_continuous_batches_compute_it(name: str) -> None:
    """Of layers with windows the cache keeps the window alone; distances are right all the same."""
    given = prompts((5, 40, 1, 90, 33, 60), 48)
    model = tiny(name)
    model.set_attn_implementation("decayed")
    expected = alone(model, given, "decayed")
    assert expected != alone(tiny(name), given)
    before = wl.stats().plans
    assert batches(tiny(name), given, continuous.NAME) == expected
    assert wl.stats().plans > before


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_dynamic_caches_compute_it(name: str) -> None:
    """The second of two prompts is padded on the left."""
    given = prompts((30, 21))
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, :9] = 0
    padded = torch.tensor([given[0], [0] * 9 + given[1]])
    found = []
    for implementation in ("decayed", continuous.NAME):
        model = tiny(name)
        model.set_attn_implementation(implementation)
        found.append(model.generate(padded, attention_mask=mask, **HOW).tolist())
    assert found[0] == found[1]


def test_compiled_models_compute_it() -> None:
    model = tiny("Llama")
    model.set_attn_implementation(continuous.NAME)
    ids = torch.tensor(prompts((24, 24)))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        found = compiled(ids).logits
        model.set_attn_implementation("decayed")
        expected = model(ids).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_layers_that_are_alike_share_a_plan() -> None:
    """Whoever makes a variant anew for each layer gets one plan for all of them."""
    given = prompts((5, 9))
    asked = []

    def chosen(layer: AttentionLayer) -> wl.Variant:
        asked.append((layer.index, layer.num_q_heads, layer.num_kv_heads, layer.window))
        return Decay(slopes=SLOPES) & layer.variant

    plans = []
    for variant in (None, chosen):
        continuous.register(variant=variant)
        before = wl.stats().plans
        batches(tiny("Llama"), given, continuous.NAME)
        plans.append(wl.stats().plans - before)
    assert plans[0] == plans[1]
    heads = tiny("Llama").config
    each = heads.num_attention_heads, heads.num_key_value_heads, None
    assert asked == [(index, *each) for index in range(heads.num_hidden_layers)]


def test_requests_are_told_apart_in_one_batch_alone() -> None:
    """Of the steps of continuous batching, none says which requests of the user's it holds."""
    given = prompts((9, 9), 48)
    hidden = torch.tensor([0.0, -torch.inf])

    class Hidden(wl.Variant):
        """The second request sees its first key alone."""

        hidden = wl.Tensor("float32", ("batch",))

        def logits_transform(self, logits: Any, at: Any) -> Any:
            return wl.where(at.kv_pos > 0, logits + self.hidden[at.batch], logits)

    continuous.register(variant=lambda layer: Hidden(hidden=hidden) & layer.variant)
    model = tiny("Llama")
    model.set_attn_implementation(continuous.NAME)
    found = model(torch.tensor(given)).logits
    model.set_attn_implementation("sdpa")
    plain = model(torch.tensor(given)).logits
    torch.testing.assert_close(found[0], plain[0], rtol=1e-4, atol=1e-4)
    assert (found[1] - plain[1]).abs().max() > 1e-2
    model.set_attn_implementation(continuous.NAME)
    failed = model.generate_batch(given, progress_bar=False, max_new_tokens=2).values()
    assert len(failed) == 2
    for one in failed:
        assert "reads at.batch" in str(one.error) and "Call generate." in str(one.error)


def test_masks_of_all_rows_and_keys_are_refused() -> None:
    """As a static cache has them: a row's place in the sequence is known to the mask alone."""
    model = tiny("Llama")
    model.set_attn_implementation(continuous.NAME)
    ids = torch.tensor(prompts((9,)))
    with pytest.raises(UnsupportedSpec, match="dynamic cache, or by continuous batching"):
        model.generate(ids, attention_mask=torch.ones_like(ids), disable_compile=True,
                       cache_implementation="static", **HOW)  # fmt: skip


@pytest.mark.parametrize("wrong", [Decay, Decay(slopes=SLOPES), "Decay"])
def test_what_is_no_function_is_refused(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match="expected a function that is given a layer"):
        continuous.register(variant=wrong)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (3, r"for LlamaAttention\.0 is 3; expected a warploom"),
        (Decay, r"reads \['slopes'\], which have no value; .* as Mine\(slopes=\.\.\.\)"),
    ],
)
def test_what_is_no_variant_or_lacks_a_value_is_refused(wrong: Any, says: str) -> None:
    continuous.register(variant=lambda layer: wrong)
    model = tiny("Llama")
    model.set_attn_implementation(continuous.NAME)
    ids = torch.tensor(prompts((9,)))
    with pytest.raises(ArgumentError, match=says):
        model.generate(ids, attention_mask=torch.ones_like(ids), **HOW)
