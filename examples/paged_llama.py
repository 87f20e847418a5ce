"""A Llama of transformers over a paged cache: each layer appends and attends through warploom."""

from copy import deepcopy

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import warploom as wl

PAGE = 16
DEVICE, DTYPE = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)


class QueryRope(wl.Rope):  # the keys are rotated as they are appended
    def key_transform(self, k, at):
        return k


def small_llama(layers: int = 3) -> LlamaForCausalLM:
    """Random weights: 8 query and 2 key/value heads of 64."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=512, intermediate_size=768, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=512,
        initializer_range=0.1, eos_token_id=None)  # fmt: skip
    llama = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return llama.eval().to(DEVICE, DTYPE)


class PagedLlama:
    """A LlamaForCausalLM with a cache of pages, one for each layer."""

    def __init__(self, model, pages: int, **options) -> None:
        config, self.model, self.dim = model.config, model, model.config.head_dim
        shape = {
            "num_q_heads": config.num_attention_heads, "num_kv_heads": config.num_key_value_heads,
            "head_dim": self.dim, "kv_format": wl.Paged(PAGE), "dtype": DTYPE, "device": DEVICE,
        }  # fmt: skip
        self.attention = wl.AttentionWrapper(wl.Causal() & QueryRope(), **shape, **options)
        self.append = wl.Appender(wl.Rope(), **shape)
        size = (2, pages, PAGE, config.num_key_value_heads, self.dim)
        self.caches = [torch.zeros(size, dtype=DTYPE, device=DEVICE) for _ in model.model.layers]

    def __call__(self, tokens: torch.Tensor, tables: tuple) -> torch.Tensor:
        """Logits [rows, vocabulary] of a batch; `tables` as `plan` and `Appender` take them."""
        self.attention.plan(*tables)  # once for all layers
        x = self.model.model.embed_tokens(tokens)
        for layer, cache in zip(self.model.model.layers, self.caches, strict=True):
            attend, h = layer.self_attn, layer.input_layernorm(x)
            projections = attend.q_proj, attend.k_proj, attend.v_proj
            q, k, v = (part(h).unflatten(-1, (-1, self.dim)) for part in projections)
            self.append(k, v, tuple(cache), *tables)
            x = x + attend.o_proj(self.attention.run(q, tuple(cache)).flatten(1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.lm_head(self.model.model.norm(x))


def is_greedy(model: LlamaForCausalLM, prompt: torch.Tensor, new: torch.Tensor) -> bool:
    """True if each new token is the first choice; scores may err twice as far as SDPA's fp16 do."""
    text, asked = torch.cat((prompt, new))[None], slice(len(prompt) - 1, -1)
    exact, rounded = (m(text).logits[0, asked].float() for m in (deepcopy(model).float(), model))
    missed = exact.amax(-1, keepdim=True) - exact.gather(1, new[:, None])  # of two scores
    return bool((missed <= 4 * (rounded - exact).abs().amax()).all())


@torch.no_grad()
def main() -> None:
    model = small_llama()
    tokens = torch.randint(0, 97, (40 + 21,), device=DEVICE)  # two prompts, one after the other
    tables = [0, 40, 61], [0, 3, 5], np.random.default_rng(0).permutation(8)[:5], [8, 5]
    logits = PagedLlama(model, pages=8)(tokens, tables)
    theirs = torch.cat([model(part[None]).logits[0] for part in tokens.split([40, 21])])
    difference = ((logits - theirs).abs().max() / theirs.abs().max()).item()
    print(f"prompts of 40 and 21 tokens: relative difference to SDPA's logits {difference:.1e}")
    assert difference < (1e-5 if DEVICE == "cpu" else 2e-2)


if __name__ == "__main__":
    main()
