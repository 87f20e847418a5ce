"""A serving step of `examples/paged_llama.py`, a chunk of a prompt and decodes, as one CUDA graph.

    python benchmarks/llama_step.py [--quick] [--layers 8] [--device cpu] [--out FOLDER]

Layers have the sizes of Llama 3 8B, fp16 and random weights, pages of 16; each appends and attends.
"one tile" is the plan of a wrapper that serves the whole batch with one, "one plan" what it chooses
by itself, "two in turn" a wrapper for each kind of request, "no attention" all the rest.
Logits are compared with those of torch's SDPA over gathered pages, rotated by transformers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from batches import Shape
from harness import QUICK, Case, Check, Effort, Implementation, Report, Row, placed, time_one
from mixed_goals import ONE_PLAN, ONE_TILE, OWN_SERIAL
from mixed_ours import tables_of, tile_for_all
from rich.table import Table
from tables import CEILINGS
from torch.nn.attention.bias import causal_lower_right
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
import paged_llama
from paged_llama import PAGE, PagedLlama

NOTHING = "no attention"
TOLERANCE = 2e-2  # of the largest logit, as in the example


@dataclass(frozen=True)
class Step:
    """A batch: `decodes` requests of one row, then one with a chunk, all with `context` keys."""

    chunk: int
    context: int
    decodes: int

    @property
    def name(self) -> str:
        return f"{self.chunk}/{self.context}/{self.decodes}"

    @property
    def q_lens(self) -> list[int]:
        return [1] * self.decodes + [self.chunk]

    def shape(self, config: Any) -> Shape:
        """The batch in the heads of a model."""
        return Shape(
            tuple(self.q_lens), (self.context,) * (self.decodes + 1), config.num_attention_heads,
            config.num_key_value_heads, config.head_dim, paged_llama.DTYPE, PAGE,
        )  # fmt: skip


STEPS = [Step(1024, 8192, 64), Step(2048, 8192, 64), Step(1024, 8192, 32), Step(2048, 16384, 64)]
TINY = [Step(40, 90, 3)]


def llama(layers: int, is_tiny: bool) -> Any:
    """Random weights in the sizes of Llama 3 8B, with a small vocabulary."""
    sizes: dict[str, Any] = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
    }
    if is_tiny:
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=1024, num_hidden_layers=layers, max_position_embeddings=32_768,
        num_key_value_heads=sizes["num_attention_heads"] // (2 if is_tiny else 4), **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(paged_llama.DEVICE):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa", dtype=paged_llama.DTYPE
        )
    return model.eval()


class InTurn:
    """Attention by two wrappers, one for decodes and one for the chunk."""

    def __init__(self, decodes: Any, prefill: Any, step: Step) -> None:
        self._decodes, self._prefill, self._step = decodes, prefill, step

    def plan(self, qo: Any, kv: Any, indices: Any, last: Any) -> None:
        rows, pages = self._step.decodes, int(kv[-2])
        self._decodes.plan(qo[:-1], kv[:-1], indices[:pages].contiguous(), last[:-1].contiguous())
        self._prefill.plan(
            qo[-2:] - rows, kv[-2:] - pages, indices[pages:].clone(), last[-1:].clone()
        )

    def run(self, q: torch.Tensor, cache: Any) -> torch.Tensor:
        out, rows = torch.empty_like(q), self._step.decodes
        self._decodes.run(q[:rows], cache, out=out[:rows])
        self._prefill.run(q[rows:], cache, out=out[rows:])
        return out


class Planned:
    """Attention that is planned already: a graph cannot hold a plan by the host."""

    def __init__(self, attention: Any) -> None:
        self.run = attention.run

    def plan(self, *tables: Any) -> None:
        pass


class Skipped:
    """No attention at all."""

    def plan(self, *tables: Any) -> None:
        pass

    def run(self, q: torch.Tensor, cache: Any) -> torch.Tensor:
        return q


class Sdpa:
    """The truth: torch's attention, request by request over its gathered pages."""

    def __init__(self, model: Any, step: Step) -> None:
        self._rotary, self._step = model.model.rotary_emb, step

    def plan(self, qo: Any, kv: Any, indices: Any, last: Any) -> None:
        self._pages = indices.long().split((kv[1:] - kv[:-1]).tolist())

    def run(self, q: torch.Tensor, cache: Any) -> torch.Tensor:
        found = []
        for rows, pages in zip(q.split(self._step.q_lens), self._pages, strict=True):
            k, v = (part[pages].flatten(0, 1)[: self._step.context] for part in cache)
            at = torch.arange(len(k) - len(rows), len(k), device=q.device)[None]
            rows, keys, values = (x.transpose(0, 1)[None] for x in (rows, k, v))
            rows, _ = apply_rotary_pos_emb(rows, rows, *self._rotary(rows, at))
            mask = causal_lower_right(rows.shape[2], keys.shape[2]) if len(at[0]) > 1 else None
            out = torch.nn.functional.scaled_dot_product_attention(
                rows, keys, values, attn_mask=mask, enable_gqa=True
            )
            found.append(out[0].transpose(0, 1))
        return torch.cat(found)


class Ways:
    """One batch of one model in all ways, over the same caches."""

    def __init__(self, model: Any, step: Step) -> None:
        self.model, self.step = model, step
        self.shape = step.shape(model.config)
        self.tables = tuple(part.to(paged_llama.DEVICE) for part in tables_of(self.shape))
        rows = sum(step.q_lens)
        self.tokens = torch.randint(0, 1024, (rows,), device=paged_llama.DEVICE)
        self._first = PagedLlama(model, pages=len(self.tables[2]))
        for cache in self._first.caches:
            cache.normal_(std=0.5)
        self._first.attention.plan(*self.tables)
        truth = self._call(Sdpa(model, step))()
        self._truth, self._largest = truth.float(), truth.float().abs().max()

    def _alike(self, **options: Any) -> PagedLlama:
        """The same model, whose caches are those of the first."""
        made = PagedLlama(self.model, pages=0, **options)
        made.caches = self._first.caches
        return made

    def _call(self, attention: Any) -> Callable[[], torch.Tensor]:
        made: Any = self._alike()  # attention is whatever plans and runs
        attention.plan(*self.tables)
        made.attention = Planned(attention)
        return partial(made, self.tokens, self.tables)

    def implementations(self) -> list[Implementation]:
        alike = self._alike
        tile = tile_for_all(self._first.attention, self.shape)
        made: dict[str, Callable[[], Any]] = {
            NOTHING: Skipped,
            ONE_TILE: lambda: alike(tile=tile).attention,
            OWN_SERIAL: lambda: InTurn(alike().attention, alike().attention, self.step),
            ONE_PLAN: lambda: alike().attention,
        }
        return [
            Implementation(name, lambda _, make=make: [self._call(make())])
            for name, make in made.items()
        ]

    def check(self, name: str) -> Check:
        if name == NOTHING:  # there is nothing to compare
            return Check(lambda _: 0.0, TOLERANCE)
        return Check(self._error, TOLERANCE, of_replays=True)

    def _error(self, logits: torch.Tensor) -> float:
        return float((logits.float() - self._truth).abs().max() / self._largest)


def summary(rows: Sequence[Row]) -> Table:
    """Milliseconds of a step, and how much of one plan is attention."""
    columns = (ONE_TILE, OWN_SERIAL, ONE_PLAN, "attention", "before / after")
    table = Table("chunk/context/decodes", *columns, title="a step, ms")
    for case in dict.fromkeys(row.case for row in rows if row.case != "ceiling"):
        ms = {row.impl: row.ms for row in rows if row.case == case and row.ms}
        shown = [f"{ms[way]:.3f}" if way in ms else "" for way in (ONE_TILE, OWN_SERIAL, ONE_PLAN)]
        after, before = ms.get(ONE_PLAN), ms.get(ONE_TILE)
        share = f"{1 - ms[NOTHING] / after:.0%}" if after and NOTHING in ms else ""
        table.add_row(case, *shown, share, f"{before / after:.3f}" if before and after else "")
    return table


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one batch, shorter measurements")
    parser.add_argument("--layers", type=int, default=8)
    options = placed(parser, argv)
    on_gpu = options.device.type == "cuda"
    paged_llama.DEVICE = options.device.type
    paged_llama.DTYPE = torch.float16 if on_gpu else torch.float32
    effort = QUICK if options.quick else Effort(replays=30, seconds=0.5)
    report = Report("llama_step" if on_gpu else "llama_step_cpu", options.device, options.out)
    if on_gpu:
        for ceiling in ("matmul", "copy"):
            report.add(CEILINGS[ceiling](report.benchmark, options.device, effort))
    model = llama(options.layers if on_gpu else 2, is_tiny=not on_gpu)
    steps = STEPS if on_gpu else TINY
    for step in steps[:1] if options.quick else steps:
        ways = Ways(model, step)
        params = {"layers": options.layers, **vars(step)}
        case = Case(step.name, 0.0, "us", input_bytes=1, params=params)
        for one in ways.implementations():
            report.add(
                time_one(report.benchmark, case, one, [None], ways.check(one.name), effort,
                         options.device)
            )  # fmt: skip
        del ways
    report.console.print(summary(report.rows))


if __name__ == "__main__":
    main()
