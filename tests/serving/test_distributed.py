"""Attention over 2 and 4 gloo processes against one process and against the oracle."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import numpy as np
import pytest
from support import lost_ranks, rank_cases
from support.rank_cases import CHAINS, VARIANTS
from support.ranks import Ranks

import warploom as wl
import warploom.dsl.library
from warploom.serving.distributed import scaling

NAMES = list(VARIANTS)


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Ranks]:
    group = Ranks(request.param, tmp_path_factory.mktemp("ranks"))
    yield group
    group.close()


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[Any, Any]]:
    return {name: rank_cases.oracle(name) for name in (*NAMES, *CHAINS)}


def assert_same(name: str, got: tuple[Any, Any], exact: tuple[Any, Any]) -> None:
    for what, found, wanted in zip(("output", "lse"), got, exact, strict=True):
        np.testing.assert_allclose(found, wanted, 2e-5, 2e-5, err_msg=f"{what} of {name}")


def test_every_shipped_variant_is_among_the_cases() -> None:
    modules = [m.name for m in iter_modules(warploom.dsl.library.__path__)]
    found = {
        name
        for module in modules
        for name, value in vars(import_module(f"warploom.dsl.library.{module}")).items()
        if inspect.isclass(value) and issubclass(value, wl.Variant) and name[0] != "_"
    }
    assert found - {"Variant"} <= set(VARIANTS)


def test_decode_of_every_variant(ranks: Ranks, expected: dict[str, Any]) -> None:
    interleave, heads = (1, "all") if ranks.world == 2 else (3, "own")
    results = ranks.run(rank_cases.decoded, NAMES, "reference", interleave, heads)
    for i, name in enumerate(NAMES):
        each = [result[i] for result in results]
        if heads == "all":
            for out, lse in each[1:]:
                assert np.array_equal(out, each[0][0]) and np.array_equal(lse, each[0][1])
            found = each[0]
        else:
            outs, lses = zip(*each, strict=True)
            found = np.concatenate(outs, 1), np.concatenate(lses, 1)
        assert_same(name, found, expected[name])


def test_prefill_of_every_variant(ranks: Ranks, expected: dict[str, Any]) -> None:
    method = "ring" if ranks.world == 2 else "all_gather"  # of four, rings of all take seconds
    results = ranks.run(rank_cases.prefilled, NAMES, "reference", method, 0)
    for i, name in enumerate(NAMES):
        assert_same(name, gathered([result[i] for result in results]), expected[name])


def test_other_orders_and_methods(ranks: Ranks, expected: dict[str, Any]) -> None:
    names = ["rows", "FlashSigmoid"]
    for method, block in (("ring", 2), ("all_gather", 0)):
        results = ranks.run(rank_cases.prefilled, names, "reference", method, block)
        for i, name in enumerate(names):
            assert_same(name, gathered([result[i] for result in results]), expected[name])


def gathered(parts: list[Any]) -> tuple[Any, Any]:
    """Rows of all ranks in order; each must be there once."""
    rows = np.concatenate([part[0] for part in parts])
    assert np.array_equal(np.sort(rows), np.arange(len(rows)))
    order = np.argsort(rows)
    out, lse = (np.concatenate([part[i] for part in parts])[order] for i in (1, 2))
    return out, lse


def test_kernels_of_long_chains(ranks: Ranks, expected: dict[str, Any]) -> None:
    """The same as compiled code: what functors do on arrays, graphs must do, too.

    A ring's kernel serves any number of ranks, a decode's is made for one.
    """
    results = ranks.run(rank_cases.prefilled, ["chain"], None, "ring", 0)
    assert_same("ring", gathered([result[0] for result in results]), expected["chain"])
    if ranks.world == 4:
        for result in ranks.run(rank_cases.decoded, ["masks"], None, 3, "all"):
            assert_same("decode", result[0], expected["masks"])


def test_memory_stays_between_plans_of_a_graph(ranks: Ranks) -> None:
    if ranks.world == 4:  # the kernel of the test above
        exact = rank_cases.replanned_oracle("masks")
        for result in ranks.run(rank_cases.replanned, ["masks"]):
            for found, wanted in zip(result[0], exact, strict=True):
                assert_same("masks", found, wanted)


def test_keys_travel_while_attention_runs(ranks: Ranks) -> None:
    steps = ["start", "run", "wait"] * (ranks.world - 1)
    assert ranks.run(rank_cases.order_of_a_ring) == [[*steps, "run"]] * ranks.world


def test_what_is_sent_is_what_the_model_says(ranks: Ranks) -> None:
    tokens, world = 64, ranks.world
    heads, machine = scaling.Heads(4, 2, 16), scaling.Machine(1e12, 1e12, 8, 1e9, 1e9, 0.0, 0.0)
    decodes = {
        name: scaling.decode(
            heads, machine, rows=3, tokens=tokens, world=world, own_heads=name == "own"
        )
        for name in ("all", "own")
    }
    found = {name: estimate.sent for name, estimate in decodes.items()}
    for method in (scaling.ring, scaling.all_gather):
        found[method.__name__] = method(heads, machine, tokens=tokens, world=world).sent
    assert ranks.run(rank_cases.sent, tokens) == [found] * world


@pytest.mark.parametrize("kind", ["ring", "all_gather", "own"])
def test_a_refused_run_sends_nothing(ranks: Ranks, kind: str) -> None:
    first, *others = ranks.run(lost_ranks.repeated, kind)
    assert first == (["WrongShape", "WrongDType", "UnknownInput"], True)
    assert others == [([], True)] * (ranks.world - 1)


@pytest.mark.parametrize("kind", ["ring", "all_gather"])
def test_after_a_failure_in_an_exchange_no_run_begins(ranks: Ranks, kind: str) -> None:
    first, *others = ranks.run(lost_ranks.broken, kind)
    assert first[0] == "RuntimeError: out of memory" and len(first) == 3
    for said in first[1:]:
        assert said.startswith("OutOfStep") and "new process group" in said
    assert others == [[]] * (ranks.world - 1)  # what they need was sent before


FORMATS = [
    wl.Paged(4),
    wl.Paged(4, layout="HND"),
    wl.Composed(4),
    wl.Dense(),
    wl.Dense(layout="HND"),
    wl.BlockSparse(block=(2, 4)),
]


def test_a_group_of_some_ranks(ranks: Ranks, expected: dict[str, Any]) -> None:
    if ranks.world == 4:
        first, *members = (x for x in ranks.run(rank_cases.in_a_subgroup) if x is not None)
        for result in (first, *members):
            assert_same("Alibi", result, expected["Alibi"])
        assert len(members) == 1


def test_rings_of_tokens_are_shared_out(ranks: Ranks) -> None:
    """What is left of a sequence is the same, be it in one ring or in one for each rank."""
    lengths = {"q_lens": (2, 2, 2), "kv_lens": (37, 3, 15)}
    exact = rank_cases.of_a_ring(wl.Rolling(8, 4), lengths)
    share = wl.Rolling(8 // ranks.world, 4 // ranks.world)
    for result in ranks.run(rank_cases.decoded_format, share, lengths):
        assert_same(str(share), result, exact)


@pytest.mark.parametrize("kv_format", FORMATS, ids=str)
def test_formats_of_caches(ranks: Ranks, kv_format: Any) -> None:
    lengths = {"q_lens": (2, 2, 2), "kv_lens": (37, 2, 9)}
    batch = rank_cases.Batch(**lengths)
    parts = (batch.per_request(x, n) for x, n in (
        (batch.q, batch.q_lens), (batch.k, batch.kv_lens), (batch.v, batch.kv_lens)))  # fmt: skip
    out, lse = map(np.concatenate, wl.reference_batch(wl.Alibi(), *parts))
    exact = out, lse
    for result in ranks.run(rank_cases.decoded_format, kv_format, lengths):
        assert_same(str(kv_format), result, exact)
