"""Gains that xLLM reports beside those simulated here, on another machine and with costs of ours.

Liu et al., 2025: tables 6 and 7 and the end of section 5. Its machines are Ascend NPUs, whose costs
it does not give; ours are an H200's. What can be compared is the direction of a gain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from warploom.serving.prefetch.model_shapes import ModelShape
from warploom.serving.simulation.arrivals import Request, synthetic
from warploom.serving.simulation.balance import LeastTokens, Migration, Placement, RoundRobin
from warploom.serving.simulation.batcher import Limits
from warploom.serving.simulation.cores import heaviest
from warploom.serving.simulation.costs import Costs, GivenCosts, Section
from warploom.serving.simulation.measured import Line
from warploom.serving.simulation.roofline import SM_BANDWIDTH, Engine, RooflineCosts
from warploom.serving.simulation.schedules import (
    Asynchronous,
    DualStreams,
    Schedule,
    Serial,
    lay_out,
)
from warploom.serving.simulation.simulator import Deployment, Result, simulate
from warploom.serving.simulation.steps import Batch, Piece, Step


@dataclass(frozen=True)
class Comparison:
    """One figure of the paper and ours.

    Attributes:
        what: is compared.
        unit: of both.
        reported: by xLLM.
        simulated: here.
        fitted: whether a cost was chosen so that the two agree, which then says nothing.
    """

    what: str
    unit: str
    reported: float
    simulated: float
    fitted: bool = False


# As their configurations say; xLLM's table 6.
QWEN_1_5B = ModelShape("Qwen 1.5B", 28, 1536, 12, 2, 8960)
TABLE_6 = (
    (QWEN_1_5B, 17.4),
    (ModelShape("Qwen 7B", 28, 3584, 28, 4, 18944), 0.6),
    (ModelShape("Qwen 14B", 48, 5120, 40, 8, 13824), 3.7),
    (ModelShape("Qwen 32B", 64, 5120, 40, 8, 27648), 6.6),
)
_LARGEST_DEVICES = 2  # of 32B: it has 14B's throughput, with 2.2 times the weights
VOCABULARY = 151_936
# What an engine's host does in a step besides planning, half before it and half behind: chosen so
# that the smallest model gains what xLLM reports. The other three then follow.
FITTED_HOST = 0.1437e-3

# DeepSeek-R1's layers with grouped queries in place of latents: one key/value head of 576 numbers a
# token, as there, and as many query heads as make about as many weights (202 M; there 187 M).
R1_LIKE = ModelShape("R1-like", 61, 7168, 48, 1, 2048, head_dim=288, experts=256, active=9)
R1_TOKEN_BYTES = 2 * 576
R1_VOCABULARY = 129_280
# Table 7's layer computes for 13.0 ms. On an H200 no batch of decodes does, and these prompts do.
PROMPTS_OF_TABLE_7 = Batch(tuple(Piece(i, 1024, 1024) for i in range(7)))
_CORES_OF_AN_NPU = 24  # xLLM's 32k tokens on one core, and 1.3k on each when they are cut


def small_host(model: ModelShape) -> RooflineCosts:
    """A model on one H200 with the fitted host."""
    half = Line(FITTED_HOST / 2, 0.0)
    return RooflineCosts(model, vocabulary=VOCABULARY, engine=Engine(half, half))


def layered_host(model: ModelShape, devices: int = 1) -> RooflineCosts:
    """The fitted host, but with work for each layer, as launches are, and so many devices."""
    half = Line(FITTED_HOST / 2 * model.layers / QWEN_1_5B.layers, 0.0)
    engine = Engine(half, half)
    return RooflineCosts(model, devices=devices, vocabulary=VOCABULARY, engine=engine)


def decode(costs: Costs, schedule: Schedule, requests: int = 32, output: int = 100) -> Result:
    """Decodes from the middle of generations with prompts and outputs of 1000 tokens."""
    given = synthetic(requests, prompt=1450, output=output, handed_over=True)
    return simulate(given, costs, schedule, limits=Limits(requests, requests))


def gain(faster: Result, slower: Result) -> float:
    """More tokens a second, in per cent."""
    return 100 * (faster.throughput / slower.throughput - 1)


def gain_ahead(costs: Costs) -> float:
    """Of planning a step ahead; outputs are equally long in table 6, so that ends are known."""
    return gain(decode(costs, Asynchronous(knows_ends=True)), decode(costs, Serial()))


def scattered(requests: int, seed: int = 1) -> list[Request]:
    """Decodes with prompts of 4,000 tokens in the mean, and outputs of 24 to 39."""
    drawn = synthetic(requests, prompt=4000, spread=0.6, seed=seed, handed_over=True)
    return [replace(one, output=24 + 7 * i % 16) for i, one in enumerate(drawn)]


def balanced(placement: Placement, migration: Migration | None, groups: int = 40) -> Result:
    """32 scattered requests for each of the groups of an R1-like model."""
    costs = RooflineCosts(R1_LIKE, groups=groups, vocabulary=R1_VOCABULARY)
    deployment = Deployment(groups=groups, placement=placement, migration=migration)
    limits = Limits(64, 64, 3_000_000)
    given = scattered(32 * groups)
    return simulate(given, costs, Asynchronous(), limits=limits, deployment=deployment)


def step_seconds(schedule: Schedule, costs: Costs, step: Step) -> float:
    """Of a step on the device."""
    return max(end for _, end in lay_out(schedule.tasks(costs, step)))


def decodes(keys: Sequence[int]) -> Batch:
    """One row of each request."""
    return Batch(tuple(Piece(i, 1, n) for i, n in enumerate(keys)))


def streams_of_xllm() -> tuple[float, float]:
    """Milliseconds of a layer in turn and on two streams, from the times of table 7.

    The paper has the sums of each stream; halves are taken for attention and experts, and for the
    way there and back.
    """

    def costs(compute: float, communication: float) -> GivenCosts:
        names = ("attention", "dispatch", "experts", "combine")
        times = (compute, communication) * 2
        sections = tuple(
            Section(name, "communication" if i % 2 else "compute", 0.5e-3 * ms)
            for i, (name, ms) in enumerate(zip(names, times, strict=True))
        )
        return GivenCosts(sections, layers=R1_LIKE.layers, rows=64)

    step = Step(0, (decodes([4000] * 64),))
    one = step_seconds(Serial(), costs(13.0, 9.3), step)
    two = step_seconds(DualStreams(), costs(17.0, 12.4), step)
    return 1e3 * one / R1_LIKE.layers, 1e3 * two / R1_LIKE.layers


def streams_of_ours(batch: Batch, groups: int = 32) -> float:
    """Per cent that two streams save of an R1-like model's step, by the batch of each group."""
    costs = RooflineCosts(R1_LIKE, groups=groups, vocabulary=R1_VOCABULARY)
    step = Step(0, (batch,) * groups)
    one, two = (step_seconds(schedule, costs, step) for schedule in (Serial(), DualStreams()))
    return 100 * (1 - two / one)


def evened_out(gap: int) -> float:
    """Microseconds of a step that a group saves when the other takes half of the gap."""
    costs = RooflineCosts(R1_LIKE, groups=2, vocabulary=R1_VOCABULARY)

    def seconds(more: int) -> float:
        batches = decodes([4000] * 31 + [4000 + more]), decodes([4000] * 31 + [4000 + gap - more])
        return step_seconds(Serial(), costs, Step(0, batches))

    return 1e6 * (seconds(gap) - seconds(gap // 2))


def comparisons() -> Iterator[Comparison]:
    """All of them; some seconds on one core."""
    for model, reported in TABLE_6:
        fitted = model is QWEN_1_5B
        simulated = gain_ahead(small_host(model))
        yield Comparison(f"asynchronous, {model.name}", "%", reported, simulated, fitted)
    for model, reported in TABLE_6[1:]:
        devices = _LARGEST_DEVICES if model is TABLE_6[-1][0] else 1
        what = f"host by layers, {model.name} on {devices}"
        yield Comparison(what, "%", reported, gain_ahead(layered_host(model, devices)))
    one, two = streams_of_xllm()
    yield Comparison("dual streams, xLLM's times", "ms a layer", 2.8, one - two)
    what, saved = "dual streams, 7k rows of prompts a group", 100 * 2.8 / 22.3
    yield Comparison(what, "%", saved, streams_of_ours(PROMPTS_OF_TABLE_7))
    static = balanced(RoundRobin(), None)
    moving = balanced(LeastTokens(), Migration())
    yield Comparison("balance: by KV tokens, and migration", "%", 5.0, gain(moving, static))
    yield Comparison("balance: a gap of 20k tokens", "us a step", 600, evened_out(20_000))
    whole, cut = (heaviest([32_000], _CORES_OF_AN_NPU, how) for how in ("in turn", "cut"))
    yield Comparison("balance: 32k tokens, cut", "tokens a core", 1300, cut)
    spared = 1e6 * (whole - cut) * R1_TOKEN_BYTES / SM_BANDWIDTH
    yield Comparison("balance: 32k tokens, cut", "us of a kernel", 800, spared)
