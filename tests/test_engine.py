"""The example engine: whatever comes, stops and is guessed, each request has its own tokens."""

from __future__ import annotations

import sys
from itertools import accumulate
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.hashed_model import VOCABULARY, HashedModel, generated_alone

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from engine import DEVICE, Engine, PagedModel
from engine_parts.drafts import EarlyExit, PromptLookup
from engine_parts.model import Decoder, Shape
from engine_parts.pages import Node, PageTree
from engine_parts.requests import Part, Request
from engine_parts.traffic import Traffic
from engine_parts.view import View

TOKEN = st.integers(0, VOCABULARY - 1)


def is_right(request: Request) -> bool:
    """Whether a request has the tokens of the same request alone, and all of them if it is done."""
    prompt, count = request.tokens[: request.prompt_length], request.limit - request.prompt_length
    expected = generated_alone(prompt, count, request.stop)
    came = len(expected) if request.state == "done" else len(request.tokens)
    return request.tokens == expected[:came]


class Served(RuleBasedStateMachine):
    """Submit, cancel and step in any order, in little memory."""

    @initialize(
        size=st.integers(1, 4),
        pages=st.integers(4, 12),
        budget=st.integers(1, 12),
        most=st.integers(1, 4),
        speculate=st.integers(0, 4),
        lookup=st.booleans(),
    )
    def begin(
        self, size: int, pages: int, budget: int, most: int, speculate: int, lookup: bool
    ) -> None:
        self.model, self.tree = HashedModel(size), PageTree(pages, size)
        draft = PromptLookup() if lookup else EarlyExit(self.model)
        self.engine = Engine(
            self.model, self.tree, budget=budget, most_running=most, draft=draft,
            speculate=speculate,
        )  # fmt: skip
        self.requests: list[Request] = []

    @rule(prompt=st.lists(TOKEN, min_size=1, max_size=8), count=st.integers(1, 8), stop=TOKEN)
    def submit(self, prompt: list[int], count: int, stop: int) -> None:
        if self.tree.pages_for(len(prompt) + count) <= self.tree.num_pages:
            self.requests.append(self.engine.submit(prompt, count, stop if count % 2 else None))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.engine.cancel(data.draw(st.sampled_from(self.requests)))

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.engine.step()
        assert self.model.most_rows <= self.engine.budget
        assert len(self.engine.running) <= self.engine.most_running

    @invariant()
    def tokens_are_those_of_the_request_alone(self) -> None:
        assert all(is_right(request) for request in getattr(self, "requests", ()))

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            for _ in range(10_000):  # more than any of these need: nobody waits for ever
                if self.engine.busy:
                    self.engine.step()
            assert {r.state for r in self.requests} <= {"done", "cancelled"}
            assert self.tree.available == self.tree.num_pages


TestServed = Served.TestCase
TestServed.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def served(
    requests: int, tree: PageTree, engine_type: type[Engine] = Engine
) -> tuple[Engine, list[Request]]:
    """Random traffic, to its end."""
    model = HashedModel(tree.page_size)
    engine = engine_type(model, tree, draft=EarlyExit(model), speculate=3)
    traffic = Traffic(requests, 0.2, VOCABULARY, seed=1)
    while traffic.feed(engine):
        engine.step()
    return engine, traffic.requests


def test_traffic_meets_all_that_an_engine_does() -> None:
    engine, requests = served(200, PageTree(48, 16))
    counts = engine.counts
    assert all(map(is_right, requests)) and engine.tree.available == engine.tree.num_pages
    assert {request.state for request in requests} == {"done", "cancelled"}
    assert counts["preempted"] and 0 < counts["accepted"] < counts["drafted"]
    assert 0 < counts["reused"] < counts["prompts"] and counts["rows"] <= 64 * counts["passes"]
    assert counts["generated"] == sum(len(request.output) for request in requests)


class Forgetful(PageTree):
    """Takes pages for equal that end with the same two tokens."""

    def match(self, tokens: list[int]) -> list[Node]:
        return super().match([token if at % 16 >= 14 else 0 for at, token in enumerate(tokens)])

    def add(self, parent: Node, tokens: tuple[int, ...], page: int) -> Node:
        return super().add(parent, (0,) * 14 + tokens[14:], page)


class Generous(PageTree):
    """Gives a page that still belongs to the tree."""

    def take(self) -> int | None:
        nodes = list(self.root.children.values())
        return nodes[0].page if nodes else super().take()


class Trusting(Engine):
    """Takes all guesses for right."""

    def _advance(self, request: Request, rows: int, draft: list[int], chosen: list[int]) -> None:
        super()._advance(request, rows, draft, chosen[: rows - 1] + draft + chosen[-1:])


@pytest.mark.parametrize(
    ("tree", "engine"), [(Forgetful, Engine), (Generous, Engine), (PageTree, Trusting)]
)
def test_mistakes_show_in_tokens(tree: type[PageTree], engine: type[Engine]) -> None:
    """What the other tests compare can differ."""
    try:
        _, requests = served(40, tree(48, 16), engine)
    except AssertionError as error:
        assert "two writers" in str(error)
    else:
        assert not all(map(is_right, requests))


@pytest.mark.parametrize(("budget", "most"), [(0, 1), (1, 0)])
def test_an_engine_that_could_compute_nothing_is_refused(budget: int, most: int) -> None:
    with pytest.raises(ValueError, match="at least one row"):
        Engine(HashedModel(4), PageTree(3, 4), budget=budget, most_running=most)


def test_requests_that_can_never_run_are_refused() -> None:
    engine = Engine(HashedModel(4), PageTree(3, 4))
    for prompt, count in (([], 1), ([1], 0), ([1] * 8, 5)):
        with pytest.raises(ValueError, match=r"a request has a prompt|never fit"):
            engine.submit(prompt, count)
    engine.submit([1] * 8, 4)
    engine.run()
    assert not engine.busy


def test_who_is_preempted_goes_on_before_those_who_never_ran() -> None:
    tree = PageTree(4, 2)
    engine = Engine(HashedModel(2), tree, most_running=2)
    old, young, new = (engine.submit([first], 6) for first in range(3))
    while not engine.counts["preempted"]:
        engine.step()
    assert engine.running == [old] and list(engine.waiting) == [young, new]
    engine.run()
    assert all(is_right(request) and request.state == "done" for request in (old, young, new))


def test_a_request_that_is_done_stays_done() -> None:
    engine = Engine(HashedModel(4), PageTree(3, 4))
    request = engine.submit([1, 2], 3)
    engine.run()
    engine.cancel(request)
    assert request.state == "done" and len(request.output) == 3


def dense(decoder: Decoder, tokens: list[int]) -> torch.Tensor:
    """Logits by torch alone: RoPE and causal attention in float64, without pages."""
    shape, places = decoder.shape, torch.arange(len(tokens), dtype=torch.float64)
    half = shape.head_dim // 2
    angles = places[:, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]  # [rows, 1, pairs]

    def rotated(x: torch.Tensor) -> torch.Tensor:
        turned = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat((turned.real, turned.imag), -1)

    def attend(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1) for x in (rotated(q), rotated(k), v))
        attended = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        return attended.transpose(0, 1)

    return decoder(torch.tensor(tokens), attend, None)


IN_FLOAT32 = pytest.mark.skipif(DEVICE != "cpu", reason="the model computes on the GPU, in 16 bits")


@IN_FLOAT32
def test_the_paged_model_chooses_what_torch_chooses() -> None:
    decoder = Decoder(Shape(), "cpu")
    tokens = torch.randint(128, (90,), generator=torch.Generator().manual_seed(5)).tolist()
    model = PagedModel(decoder, PageTree(12, 16))
    parts = [Part([7, 2, 11, 0], 0, tokens[:50]), Part([4, 6, 8], 0, tokens[50:])]
    chosen = model(parts)
    logits = torch.cat((dense(decoder, tokens[:50]), dense(decoder, tokens[50:])))
    missed = logits.amax(-1) - logits.gather(-1, chosen[:, None])[:, 0]
    assert missed.max() < 0.02 * logits.std()
    assert (logits.argmax(-1) == chosen).float().mean() > 0.9


def test_rows_do_not_depend_on_their_batch() -> None:
    """Sums of the decoder are exact: any number of rows gives the same bits."""
    decoder = Decoder(Shape(), "cpu")
    tokens = torch.arange(128)

    def attend(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q + torch.cat((k + v, k - v), 1)

    together = decoder(tokens, attend, None)
    for rows in (1, 3, 17, 64):
        parts = [decoder(part, attend, None) for part in tokens.split(rows)]
        assert torch.equal(torch.cat(parts), together)


@IN_FLOAT32
@pytest.mark.parametrize("begin", [0, 480, 3000])  # at 2048 keys splits begin
@pytest.mark.parametrize("chunks", [[1] * 60, [7, 50, 1, 2], [33, 27]])
def test_attention_does_not_depend_on_how_rows_are_cut(begin: int, chunks: list[int]) -> None:
    model = PagedModel(Decoder(Shape(), "cpu"), PageTree(192, 16))
    generator = torch.Generator().manual_seed(begin)
    cache = torch.randn(2, 192, 16, 2, 32, generator=generator)
    q = torch.randn(60, 4, 32, generator=generator)

    def attend(first: int, end: int) -> torch.Tensor:
        part = Part(list(range(192)), begin + first, [0] * (end - first))
        model.attention.plan(*model._tables([part]))
        return model.attention.run(q[first:end], tuple(cache))

    ends = list(accumulate(chunks))
    parts = [attend(end - rows, end) for rows, end in zip(chunks, ends, strict=True)]
    assert torch.equal(torch.cat(parts), attend(0, 60))


def test_the_view_draws_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    engine, _ = served(5, PageTree(48, 16))
    with View(engine) as view:
        view.update()
    shown = capsys.readouterr().out
    assert "guesses accepted" in shown and "\u2588" in shown
