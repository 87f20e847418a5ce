"""An LLM engine: all that is to be written around warploom to serve requests, in one file.

`PagedModel` touches attention: it plans once for each pass, and each layer appends and attends.
`Engine` decides what a pass computes: decodes and chunks of prompts under one budget of rows; pages
that requests share; tokens guessed by a draft; whom to stop when pages run out. Run it to see it
serve random requests, each with the tokens that it gets alone. docs/engine.md is its guide.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from itertools import accumulate

import click
import numpy as np
import torch
from engine_parts.drafts import Draft, EarlyExit, PromptLookup
from engine_parts.model import Decoder, Shape
from engine_parts.pages import PageTree
from engine_parts.requests import Forward, Part, Request, State
from engine_parts.traffic import Traffic, alone
from engine_parts.view import View
from rich.progress import track

import warploom as wl

# kernels for GPUs compute in 16-bit types, those for CPUs in float32 too
DEVICE, DTYPE = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)


class QueryRope(wl.Rope):  # the keys are rotated as they are appended
    def key_transform(self, k, at):
        return k


class PagedModel:
    """A decoder over a paged cache; its rows do not depend on what else is in a pass."""

    def __init__(self, model: Decoder, tree: PageTree) -> None:
        shape, self.model, self.tree = model.shape, model, tree
        declared = {
            "num_q_heads": shape.q_heads, "num_kv_heads": shape.kv_heads, "dtype": DTYPE,
            "head_dim": shape.head_dim, "kv_format": wl.Paged(tree.page_size), "device": DEVICE,
        }  # fmt: skip
        rotated = wl.Causal() & QueryRope()
        self.attention = wl.AttentionWrapper(rotated, **declared, batch_invariant=True)
        self.append = wl.Appender(wl.Rope(), **declared)
        size = (tree.num_pages, tree.page_size, shape.kv_heads, shape.head_dim)
        self.caches = torch.zeros(shape.layers, 2, *size, dtype=DTYPE, device=DEVICE)

    @torch.no_grad()
    def __call__(self, parts: list[Part], layers: int | None = None) -> torch.Tensor:
        """The next token of every row, [rows] int64 on the host, after the first layers or all."""
        tables = self._tables(parts)
        self.attention.plan(*tables)  # once for all layers

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            cache = tuple(self.caches[layer])
            self.append(k.to(DTYPE), v.to(DTYPE), cache, *tables)
            return self.attention.run(q.to(DTYPE), cache)

        tokens = torch.tensor([token for part in parts for token in part.tokens], device=DEVICE)
        return self.model(tokens, attend, layers).argmax(-1).cpu()

    def _tables(self, parts: list[Part]) -> list[np.ndarray]:
        """indptr of rows, indptr and indices of pages, and tokens in each last page."""
        listed = [part.pages[: self.tree.pages_for(part.end)] for part in parts]
        lists = (
            [0, *accumulate(len(part.tokens) for part in parts)],
            [0, *accumulate(map(len, listed))],
            [page for pages in listed for page in pages],
            [(part.end - 1) % self.tree.page_size + 1 for part in parts],
        )
        return [np.array(numbers, np.int32) for numbers in lists]


class Engine:
    """Serves requests: `submit`, `cancel`, and `step` until `busy` is false. One thread calls it.

    Attributes:
        tree: the pages of the cache.
        waiting, running: requests in the order in which they are served, oldest first.
        counts: what happened so far: "passes", "rows", "generated", "drafted", "accepted",
            "prompts" and "reused" (tokens of admitted requests), "preempted".
    """

    def __init__(
        self, forward: Forward, tree: PageTree, *, budget: int = 64, most_running: int = 32,
        draft: Draft | None = None, speculate: int = 0,
    ) -> None:  # fmt: skip
        """An idle engine.

        Args:
            forward: computes parts of requests; a `PagedModel`, or a stand-in.
            tree: pages of the cache that it writes to.
            budget, most_running: rows and requests of a pass, at most. Prompts are cut to fit.
            draft: guesses tokens; None for no speculation.
            speculate: tokens to guess for each request and pass.
        """
        if budget < 1 or most_running < 1:
            raise ValueError("a pass has at least one row and one request")
        self.forward, self.tree, self.budget = forward, tree, budget
        self.most_running, self.draft, self.speculate = most_running, draft, speculate
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.counts: Counter[str] = Counter()

    def submit(self, prompt: list[int], max_tokens: int, stop: int | None = None) -> Request:
        """Take a request for at most so many tokens behind its prompt.

        Raises:
            ValueError: there is nothing to compute, or its pages could never lie in the cache.
        """
        request = Request(list(prompt), len(prompt), len(prompt) + max_tokens, stop)
        if not prompt or max_tokens < 1:
            raise ValueError("a request has a prompt, and generates at least one token")
        if self.tree.pages_for(request.limit) > self.tree.num_pages:
            raise ValueError(f"{request.limit} tokens never fit into {self.tree.num_pages} pages")
        self.waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request between two steps. What it generated stays; one that is done stays done."""
        if request.state in ("waiting", "running"):
            (self.waiting if request.state == "waiting" else self.running).remove(request)
            self._release(request, "cancelled")

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def run(self) -> None:
        while self.busy:
            self.step()

    def step(self) -> None:
        """One pass: schedule, guess, compute, and take what was chosen."""
        batch = self._schedule()
        if not batch:
            return
        drafts = self._guess(batch)
        parts = [
            Part(r.pages, r.computed, r.tokens[r.computed : r.computed + rows] + drafts.get(r, []))
            for r, rows in batch.items()
        ]
        chosen = self.forward(parts, None).split([len(part.tokens) for part in parts])
        self.counts.update(passes=1, rows=sum(len(part.tokens) for part in parts))
        for (request, rows), choices in zip(batch.items(), chosen, strict=True):
            self._advance(request, rows, drafts.get(request, []), choices.tolist())

    def _schedule(self) -> dict[Request, int]:
        """Rows for each request of a pass: those that run, oldest first, then new ones.

        A decode is a request that lacks one row, and a prompt one that lacks many: no other
        difference is made. Only the youngest may lack many, so the budget has a row for each.
        """
        batch: dict[Request, int] = {}
        budget, preempted = self.budget, self.counts["preempted"]
        for request in list(self.running):
            rows = min(len(request.tokens) - request.computed, budget)
            if self._make_room(request, request.computed + rows):
                batch[request] = rows
                budget -= rows
        admitting = self.counts["preempted"] == preempted  # or it would be preempted again
        while admitting and budget and self.waiting and len(self.running) < self.most_running:
            if not self._admit(request := self.waiting[0]):
                break
            batch[request] = min(len(request.tokens) - request.computed, budget)
            budget -= batch[request]
        return batch

    def _make_room(self, request: Request, tokens: int) -> bool:
        """Pages for so many tokens, if need be those of the youngest; False if that is itself.

        Requests are scheduled oldest first, so whoever has to go is in no batch yet. The oldest can
        have all pages, hence something always runs.
        """
        while request.state == "running" and self._reserve(request, tokens) < tokens:
            self._preempt(self.running[-1])
        return request.state == "running"

    def _reserve(self, request: Request, tokens: int) -> int:
        """Take pages up to so many tokens, as far as there are any; tokens that have room."""
        missing = self.tree.pages_for(tokens) - len(request.pages)
        while missing > 0 and (page := self.tree.take()) is not None:
            request.pages.append(page)
            missing -= 1
        return min(tokens, len(request.pages) * self.tree.page_size)

    def _preempt(self, request: Request) -> None:
        """Stop a request, to be computed anew; its full pages stay in the tree while they can."""
        self.running.remove(request)
        self._release(request, "waiting")
        self.waiting.appendleft(request)
        self.counts["preempted"] += 1

    def _admit(self, request: Request) -> bool:
        """Start the first of the waiting, if all tokens that it has fit without preempting anyone.

        The last token is always computed: its row chooses the next one.
        """
        request.nodes = self.tree.match(request.tokens[:-1])
        missing = self.tree.pages_for(len(request.tokens)) - len(request.nodes)
        if missing > self.tree.available:
            self._release(request, "waiting")
            return False
        request.pages = [node.page for node in request.nodes]
        request.computed = len(request.nodes) * self.tree.page_size
        self._reserve(request, len(request.tokens))
        request.state = "running"
        self.running.append(self.waiting.popleft())
        self.counts.update(prompts=len(request.tokens), reused=request.computed)
        return True

    def _guess(self, batch: dict[Request, int]) -> dict[Request, list[int]]:
        """Drafts for decodes, in rows and pages that nobody else needs now."""
        if self.draft is None:
            return {}
        budget, counts = self.budget - sum(batch.values()), {}
        for request in batch:
            length = len(request.tokens)
            if request.computed == length - 1:
                most = min(self.speculate, budget, request.limit - length - 1)
                count = self._reserve(request, length + most) - length
                if count > 0:
                    counts[request] = count
                    budget -= count
        return self.draft.propose(counts)

    def _advance(self, request: Request, rows: int, draft: list[int], chosen: list[int]) -> None:
        """Take the choices behind rows that were known, and behind guesses that came true."""
        request.computed += rows
        if request.computed == len(request.tokens):
            after = chosen[rows - 1 :]  # choices behind the last known token, and each guess
            right = 0
            while right < len(draft) and draft[right] == after[right]:
                right += 1
            before = len(request.tokens)
            request.extend(after[: right + 1])
            request.computed = min(before + right, len(request.tokens))
            self.counts.update(drafted=len(draft), accepted=right)
            self.counts["generated"] += len(request.tokens) - before
        self._share(request)
        if request.state == "done":
            self.running.remove(request)
            self._release(request, "done")

    def _share(self, request: Request) -> None:
        """Move pages that have become full into the tree."""
        size = self.tree.page_size
        for number in range(len(request.nodes), request.computed // size):
            parent = request.nodes[-1] if request.nodes else self.tree.root
            tokens = tuple(request.tokens[number * size : (number + 1) * size])
            node = self.tree.add(parent, tokens, request.pages[number])
            request.pages[number] = node.page
            request.nodes.append(node)

    def _release(self, request: Request, state: State) -> None:
        self.tree.release(request.nodes, request.pages[len(request.nodes) :])
        request.nodes, request.pages, request.computed, request.state = [], [], 0, state


@click.command(context_settings={"show_default": True})
@click.option("--requests", default=60, help="How many to serve.")
@click.option("--cancelled", default=0.1, help="Share of them that is cancelled at a random time.")
@click.option("--pages", default=64, help="Pages of the cache.")
@click.option("--page-size", default=16, help="Tokens of a page.")
@click.option("--budget", default=64, type=click.IntRange(1), help="Rows of a pass, at most.")
@click.option("--running", default=24, type=click.IntRange(1), help="Requests in a pass, at most.")
@click.option("--speculate", default=3, help="Tokens to guess for each request and pass.")
@click.option("--draft", type=click.Choice(["layer", "lookup"]), default="layer",
              help="The model's first layer, or what followed the same tokens before.")  # fmt: skip
@click.option("--seed", default=0, help="Of requests; the model stays the same.")
def main(
    requests: int, cancelled: float, pages: int, page_size: int, budget: int, running: int,
    speculate: int, draft: str, seed: int,
) -> None:  # fmt: skip
    """Serve random requests, then compute each one alone and compare the tokens."""
    decoder = Decoder(Shape(), DEVICE)
    tree, unused = PageTree(pages, page_size), PageTree(pages, page_size)
    model, reference = PagedModel(decoder, tree), PagedModel(decoder, unused)
    guesses = EarlyExit(model) if draft == "layer" else PromptLookup()
    engine = Engine(model, tree, budget=budget, most_running=running, draft=guesses,
                    speculate=speculate)  # fmt: skip
    traffic = Traffic(requests, cancelled, decoder.shape.vocabulary, seed)
    with View(engine) as view:
        while traffic.feed(engine):
            engine.step()
            view.update()
    lost, served = pages - tree.available, track(traffic.requests, "each alone")
    different = sum(request.tokens != alone(reference, request, unused) for request in served)
    ended = Counter(request.state for request in traffic.requests)
    result = f"{lost} pages lost, {different} with other tokens than alone"
    print(f"{ended['done']} requests done, {ended['cancelled']} cancelled; {result}")
    sys.exit(lost > 0 or different > 0)


if __name__ == "__main__":
    main()
