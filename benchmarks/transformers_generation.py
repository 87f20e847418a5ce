"""Tokens per second of transformers' continuous batching, by who attends.

    python benchmarks/transformers_generation.py [--quick] [--device cpu --tiny] [--only warploom]

A model in the shape of Llama 3.2 1B with random weights answers 32, 128 and 256 random prompts of
64 to 1024 tokens, the shorter the more often, with 64 tokens each, greedily. A figure is all new
tokens over the time from the first request until the last token, prompts included; "decodes" are
those after the last prompt was read. Warploom answers the same prompts before, by which its kernels
are compiled; the others warm up with a few new tokens, for they compile nothing.

"warploom" decodes by block tables where transformers offers them, "warploom lists" by lists of
places, both without CUDA graphs; "warploom decode graphs" by block tables in CUDA graphs, and
"warploom graphs" all steps in graphs, as transformers chooses by itself. FlashAttention has what
transformers chooses for it, too.

Every token of every answer is checked: sdpa reads prompt and answer at once, and each token must
be its best one or lie near it, as near as sums of bfloat16 can move it. What is farther is wrong,
and has no figure. Answers are compared with those of the first implementation that answers, too;
near ties fall otherwise there, and what follows differs then."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from harness import NotAvailable, Report, Row, placed
from pictures import picture

import warploom as wl
from warploom.engines import transformers as continuous

NAME, UNIT = "transformers_generation", "tokens/s"
SHORTEST, LONGEST, PAGE = 64, 1024, 256  # pages of 256 are transformers' default
FEW = 4  # new tokens of a warm-up that compiles nothing
FAR = 0.25  # standard deviations of a token's logits, of which the best lie about 4 from the mean


@dataclass(frozen=True)
class Size:
    """A model and how it is asked."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int
    batches: tuple[int, ...]
    longest: int
    new: int
    step: int  # tokens of a step
    spread: float = 0.02  # of weights
    dtype: torch.dtype = torch.bfloat16


FULL = Size(16, 2048, 8192, 32, 8, 32_000, (32, 128, 256), LONGEST, 64, 2048)
QUICK = Size(16, 2048, 8192, 32, 8, 32_000, (32, 128), LONGEST, 32, 2048)
TINY = Size(2, 128, 64, 4, 2, 256, (6,), 4 * SHORTEST, 8, 2048, spread=0.3, dtype=torch.float32)


@dataclass(frozen=True)
class Way:
    """An implementation by transformers' name, and options of continuous batching for it."""

    name: str
    attention: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        return self.attention.startswith("warploom")


EAGER = {"use_cuda_graph": False}
DECODES_IN_GRAPHS = {"use_cuda_graph": (False, True)}  # of steps with prompts, and of decodes
WAYS = (
    Way("sdpa", "sdpa", {"auto_switch_to_flash": False}),
    Way("warploom", continuous.NAME_BY_TABLES, EAGER),
    Way("warploom graphs", continuous.NAME_BY_TABLES),
    Way("warploom decode graphs", continuous.NAME_BY_TABLES, DECODES_IN_GRAPHS),
    Way("FlashAttention-2", "flash_attention_2"),
    Way("FlashAttention-3", "flash_attention_3"),
    Way("warploom lists", continuous.NAME, EAGER),
)


def make_model(size: Size, device: torch.device) -> Any:
    """Made on the device, so that nothing is read or copied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    options: dict[str, Any] = {"attn_implementation": "sdpa"}  # switched for each way
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=2 * LONGEST,
        initializer_range=size.spread,
        tie_word_embeddings=False,
        **options,
    )
    torch.manual_seed(0)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(size.dtype)
    try:
        with device:
            model: Any = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(usual)
    return model.eval()


def make_prompts(count: int, size: Size) -> list[list[int]]:
    """Random tokens; k times the shortest length, less up to one, is drawn with weight 1/k."""
    rng = np.random.default_rng(count)
    ranks = np.arange(1, size.longest // SHORTEST + 1)
    drawn = rng.choice(ranks, count, p=(1 / ranks) / (1 / ranks).sum())
    lengths = np.maximum(SHORTEST, drawn * SHORTEST - rng.integers(0, SHORTEST, count))
    return [rng.integers(3, size.vocabulary, int(length)).tolist() for length in lengths]


@dataclass(frozen=True)
class Answers:
    """New tokens of each prompt in order, and when they came, in seconds of one clock."""

    tokens: list[list[int]]
    times: list[list[float]]
    begin: float

    @property
    def seconds(self) -> float:
        """From the first request until the last token."""
        return max(one[-1] for one in self.times) - self.begin

    @property
    def decodes(self) -> tuple[int, float]:
        """Tokens after the last prompt was read, and the seconds that they took."""
        since = max(one[0] for one in self.times)
        end = max(one[-1] for one in self.times)
        return sum(at > since for one in self.times for at in one), end - since


def generate(model: Any, way: Way, size: Size, prompts: list[list[int]], new: int) -> Answers:
    """Ask for `new` tokens of each.

    Raises:
        RuntimeError: a request failed, in transformers' words.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    pages = sum(-(-(len(one) + size.new) // PAGE) for one in prompts)
    batching = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=pages * 5 // 4 + 8,  # no request waits for memory
        max_batch_tokens=size.step,
        max_requests_per_batch=len(prompts),
        allow_block_sharing=False,  # random prompts share nothing
        **way.options,
    )
    made: Any = GenerationConfig  # untyped
    greedy = made(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    found = model.generate_batch(
        inputs=prompts,
        generation_config=greedy,
        continuous_batching_config=batching,
        record_timestamps=True,
        progress_bar=True,  # on the standard error
    )
    failed = [one.error for one in found.values() if one.error is not None]
    if failed or len(found) != len(prompts):
        raise RuntimeError(failed[0] if failed else f"{len(found)} of {len(prompts)} came back")
    tokens = [list(one.generated_tokens) for one in found.values()]  # in the order of the prompts
    if any(len(one) != new for one in tokens):
        raise RuntimeError(f"answers of {sorted({len(one) for one in tokens})} tokens, not {new}")
    begin = min(one.created_time for one in found.values())
    return Answers(tokens, [list(one.timestamps) for one in found.values()], begin)


def attend_by(model: Any, way: Way, device: torch.device) -> None:
    """Switch the model.

    Raises:
        NotAvailable: transformers does not find the implementation here.
    """
    if way.attention.startswith("flash") and device.type != "cuda":
        raise NotAvailable("FlashAttention has no CPU kernels")
    if way.is_ours:
        continuous.register(way.attention)
    elif way.attention.startswith("flash") and not has_flash(way.attention):
        raise NotAvailable("the package is not installed")
    model.set_attn_implementation(way.attention)


def has_flash(attention: str) -> bool:
    """Of packages alone: transformers would download kernels for those that are missing."""
    from transformers.utils import import_utils

    return bool(getattr(import_utils, f"is_flash_attn_{attention[-1]}_available")())


def agreement(found: list[list[int]], expected: list[list[int]]) -> dict[str, float]:
    """Shares of requests with equal tokens, and of tokens until they part."""
    pairs = list(zip(found, expected, strict=True))
    alike = [
        next((at for at, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), len(pair[0]))
        for pair in pairs
    ]
    return {
        "equal_requests": sum(a == b for a, b in pairs) / len(pairs),
        "equal_until": sum(alike) / sum(map(len, expected)),
    }


@torch.no_grad()
def farthest(model: Any, prompts: list[list[int]], answers: list[list[int]]) -> float:
    """Of all tokens the largest distance from the best one, in standard deviations of its logits.

    The model reads each prompt with its answer at once, by sdpa.
    """
    model.set_attn_implementation("sdpa")
    worst = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt + answer], device=model.device)
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        worst = max(worst, float(((logits.amax(1) - chosen) / logits.std(1)).max()))
    return worst


def measure(
    model: Any, way: Way, size: Size, prompts: list[list[int]], device: torch.device,
    reference: dict[str, list[list[int]]],
) -> list[Row]:  # fmt: skip
    """Figures, or why there are none; the first that answers becomes the reference."""
    params: dict[str, Any] = {
        "requests": len(prompts), "prompt_tokens": sum(map(len, prompts)), "new": size.new,
        "step_tokens": size.step, "page_size": PAGE, "attention": way.attention,
    }  # fmt: skip
    case = f"batch {len(prompts)}"

    def row(value: float | None, case: str = case, **more: Any) -> Row:
        return Row(NAME, case, way.name, value, UNIT, params=params, **more)

    try:
        attend_by(model, way, device)
        tell(f"{case}, {way.name}: warm-up, then the figure")
        generate(model, way, size, prompts, size.new if way.is_ours else FEW)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        before = wl.stats()
        found = generate(model, way, size, prompts, size.new)
    except NotAvailable as reason:
        return [row(None, note=f"n/a: {reason}")]
    except Exception as failure:  # a peer's failure must not end the run: it is the figure
        first = (str(failure).strip().splitlines() or [""])[0]
        return [row(None, note=f"failed: {type(failure).__name__}: {first}"[:300])]
    after = wl.stats()
    if way.is_ours and after.plans == before.plans:
        return [row(None, note="failed: another implementation attended")]
    params["compiled"] = after.compiles - before.compiles
    if device.type == "cuda":
        params["peak_gib"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 2)
    params["farthest"] = far = round(farthest(model, prompts, found.tokens), 4)
    if far > FAR:
        note = f"wrong: {case}: a token lies {far} standard deviations below the best one"
        return [row(None, note=note)]
    note = ""
    if not reference:
        reference[way.name] = found.tokens
    else:
        ((other, expected),) = reference.items()
        shares = agreement(found.tokens, expected)
        params |= {"compared_with": other, **{k: round(v, 4) for k, v in shares.items()}}
        note = f"{case}: {shares['equal_until']:.0%} of tokens are those of {other} until they part"
    last, seconds = found.decodes
    every, whole = len(prompts) * size.new, found.seconds
    rows = [row(round(every / whole, 1), ms=round(1e3 * whole, 2), samples=1, note=note)]
    if last:
        figure = round(last / seconds, 1)
        rows += [row(figure, f"{case}, decodes", ms=round(1e3 * seconds, 2), samples=1)]
    return rows


def tell(text: str) -> None:
    print(f"{NAME}: {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two batches, half of the tokens")
    parser.add_argument("--tiny", action="store_true", help="a small model: tries the code")
    parser.add_argument("--only", default="", help="comma-separated implementations")
    parser.add_argument("--budget", type=float, help="seconds after which no figure is begun")
    options = placed(parser, argv)
    size = TINY if options.tiny else QUICK if options.quick else FULL
    budget = options.budget if options.budget is not None else 40.0 if options.quick else 90.0
    begin = time.monotonic()
    import transformers

    report = Report(NAME, options.device, options.out)
    report.facts["transformers"] = transformers.__version__
    tell("making the model")
    model = make_model(size, options.device)
    prompts = {count: make_prompts(count, size) for count in size.batches}
    references: dict[int, dict[str, list[list[int]]]] = {count: {} for count in prompts}
    ways = [one for one in WAYS if not options.only or one.name in options.only.split(",")]
    for way, count in itertools.product(ways, prompts):  # what is left out at last is one way
        if time.monotonic() - begin > budget:
            note = f"n/a: {budget:.0f} s were over"
            report.add(Row(NAME, f"batch {count}", way.name, None, UNIT, note=note))
            continue
        for row in measure(model, way, size, prompts[count], options.device, references[count]):
            report.add(row)
    report.finish()
    if any(row.value is not None for row in report.rows):
        picture(report, options.out)
    tell(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
