"""Models of a few layers with random weights, large enough to tell tokens apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WINDOW = 24
_ALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GEMMA = {"tie_word_embeddings": True, "query_pre_attn_scalar": 32, "sliding_window": WINDOW}
_OF_ONE: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": WINDOW},
    "Gemma2": {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": None},
    "Gemma3": {
        **_GEMMA,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "GptOss": {"sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
    "DeepseekV2": {
        "num_key_value_heads": 4, "head_dim": 16, "kv_lora_rank": 32, "q_lora_rank": 32,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 2,
        "first_k_dense_replace": 2,
    },
}  # fmt: skip


def tiny(name: str, **changes: Any) -> Any:
    """A model of transformers in float32, by the stem of its classes; the same at each call."""
    import torch
    import transformers

    stem = {"Gemma3": "Gemma3Text"}.get(name, name)
    options = {**_ALL, **_OF_ONE[name], **changes}
    config = getattr(transformers, f"{stem}Config")(**options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for key, parameter in model.named_parameters():
        if key.endswith("sinks"):  # which transformers leaves as memory was
            torch.nn.init.normal_(parameter)
    if options["tie_word_embeddings"]:  # else each token is answered by itself
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(0.1)
    return model


def save(folder: Path, name: str, **changes: Any) -> Path:
    """The same on disk, as engines load it."""
    tiny(name, **changes).save_pretrained(folder)
    return folder


def prompts(lengths: tuple[int, ...] = (5, 40, 1, 97, 33, 64), shared: int = 0) -> list[list[int]]:
    """Random token ids; all begin with the same `shared` ones."""
    from random import Random

    rng = Random(0)
    first = [rng.randrange(3, 256) for _ in range(shared)]
    return [first + [rng.randrange(3, 256) for _ in range(n)] for n in lengths]
