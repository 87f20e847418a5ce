"""vLLM as it is for CUDA serves with warploom, beside its Triton back end and float32."""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM for CUDA: pip install vllm==0.32.0")
pytest.importorskip("transformers", reason="needs transformers")
if find_spec("vllm._C_stable_libtorch") is None:
    pytest.skip("this vLLM has no compiled CUDA operations", allow_module_level=True)
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from support.tiny_models import prompts
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from warploom.engines import vllm as plugin
from warploom.engines.vllm.kinds import Kind
from warploom.runtime.devices.graph import is_capturing

pytestmark = pytest.mark.gpu

Saved = Callable[..., Path]
Answer = tuple[list[int], list[float]]  # tokens, and the log-probability of each
TOKENS = 24
BASE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 128,
    "initializer_range": 0.15,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Llama": BASE,
    "Gemma2": {**BASE, "query_pre_attn_scalar": 128},
    # all experts, small weights: a router's choices would make bfloat16 itself err by 2
    "GptOss": {**BASE, "head_dim": 64, "num_experts_per_tok": 2, "initializer_range": 0.08},
}
EAGER: dict[str, Any] = {"enforce_eager": True}
SIZES = {"cudagraph_capture_sizes": [1, 2, 4, 8]}
FULL = {"compilation_config": {**SIZES, "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
BOTH = {"compilation_config": {**SIZES, "cudagraph_mode": "FULL_AND_PIECEWISE"}}
CHUNKED = {"max_num_batched_tokens": 48}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "eager": ("Llama", EAGER | CHUNKED),
    "full": ("Llama", FULL),
    "full-and-piecewise": ("Llama", BOTH | CHUNKED),
    "prefix-cache": ("Llama", FULL | {"enable_prefix_caching": True}),
    "fp8-cache": ("Llama", FULL | {"kv_cache_dtype": "fp8"}),
    "soft-caps-and-windows": ("Gemma2", FULL | CHUNKED),
    "sinks": ("GptOss", FULL),
}


@pytest.fixture(autouse=True)
def queries_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside an fp8 cache vLLM's Triton back end takes queries of fp8, too; not in these tests."""
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

    made = TritonAttentionImpl.__init__

    @functools.wraps(made)
    def without(self: Any, *given: Any, **named: Any) -> None:
        made(self, *given, **named)
        self.supports_quant_query_input = False

    monkeypatch.setattr(TritonAttentionImpl, "__init__", without)


def answers(model: Path, backend: str, options: dict[str, Any]) -> list[Answer]:
    """The last of two times where there is a prefix cache, which the first one fills."""
    given: dict[str, Any] = {
        "dtype": "bfloat16", "seed": 0, "max_model_len": 256, "max_num_seqs": 8,
        "max_num_batched_tokens": 512, "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 64 << 20, "gpu_memory_utilization": 0.05,
    }  # fmt: skip
    llm = LLM(
        model=str(model), skip_tokenizer_init=True, disable_log_stats=True,
        attention_config={"backend": backend}, **{**given, **options},
    )  # fmt: skip
    try:
        how = SamplingParams(
            max_tokens=TOKENS, temperature=0, ignore_eos=True, detokenize=False, logprobs=0
        )
        asked: Any = [{"prompt_token_ids": one} for one in prompts()]
        if options.get("enable_prefix_caching"):  # the answers are those from the cache
            llm.generate(asked, how, use_tqdm=False)
        found = [one.outputs[0] for one in llm.generate(asked, how, use_tqdm=False)]
        pairs = [list(zip(one.token_ids, one.logprobs, strict=True)) for one in found]
        return [([token for token, _ in row], [x[t].logprob for t, x in row]) for row in pairs]
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def faults(model: Path, found: list[Answer]) -> tuple[float, float]:
    """By how much a better token led, and how far log-probabilities are off, by float32."""
    from transformers import AutoModelForCausalLM

    judge = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    lead = error = 0.0
    with torch.inference_mode():
        for weights in judge.parameters():
            weights.copy_(weights.bfloat16())  # as vLLM has them
        for prompt, (tokens, given) in zip(prompts(), found, strict=True):
            logits = judge(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            right = logits.float().log_softmax(-1)
            chosen = right.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            lead = max(lead, float((right.max(-1).values - chosen).max()))
            error = max(error, float((chosen - torch.tensor(given)).abs().max()))
    return lead, error


@pytest.mark.parametrize("case", CASES)
def test_answers_are_as_good_as_vllms(
    case: str, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, options = CASES[case]
    model = saved(name, **MODELS[name])
    cache = {"kv_cache_dtype": options.get("kv_cache_dtype", "auto")}
    theirs = answers(model, "TRITON_ATTN", EAGER | cache)
    plugin.register()
    ran: list[bool] = []
    run = Kind.run

    def noted(kind: Kind, step: Any, q: torch.Tensor, *given: Any) -> None:
        ran.append(is_capturing(q.device))
        run(kind, step, q, *given)

    monkeypatch.setattr(Kind, "run", noted)
    ours = answers(model, "CUSTOM", options)
    assert not all(ran) and any(ran) == ("compilation_config" in options)
    for (tokens, logs), (others, other_logs) in zip(ours, theirs, strict=True):
        same = next((i for i in range(TOKENS) if tokens[i] != others[i]), TOKENS)
        pairs = zip(logs[: same + 1], other_logs[: same + 1], strict=True)
        assert max(abs(a - b) for a, b in pairs) <= 0.25  # bfloat16: 0.08 were seen
    bounds = [2 * one + 0.05 for one in faults(model, theirs)]
    assert all(a <= b for a, b in zip(faults(model, ours), bounds, strict=True))
