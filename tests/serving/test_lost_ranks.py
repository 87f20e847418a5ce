"""A rank that ends or is late ends the others with an error that names it, and no hang."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import crossed_ranks, lost_ranks
from support.ranks import Ranks

SOON = 20.0  # seconds; the group itself would wait for a minute


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Callable[[int], Ranks]]:
    made: list[Ranks] = []

    def start(world: int) -> Ranks:
        made.append(Ranks(world, tmp_path))
        return made[-1]

    yield start
    for ranks in made:
        ranks.close()


def check(ranks: Ranks, lost: int, witnesses: list[int]) -> list[str]:
    """All survivors tell of a lost rank, and the witnesses of the right one."""
    others = [rank for rank in range(ranks.world) if rank != lost]
    results = {rank: ranks.result(rank, 3 * SOON) for rank in others}
    for rank, result in results.items():
        assert isinstance(result, str), result
        named, seconds, *_ = result.split()
        assert float(seconds) < SOON
        assert "was lost" in result and f"between it and rank {rank}" in result
        assert int(named) == lost or rank not in witnesses
    return list(results.values())


def test_a_killed_rank_ends_decoding(group: Callable[[int], Ranks]) -> None:
    ranks = group(4)
    ranks.start(lost_ranks.decode_without, 2, None, None)
    check(ranks, 2, [0, 1, 3])
    ranks.processes[2].join(5)
    assert ranks.processes[2].exitcode == 9


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_a_killed_rank_ends_a_prefill(group: Callable[[int], Ranks], method: str) -> None:
    ranks = group(2)
    ranks.start(lost_ranks.prefill_without, 0, method, None)
    check(ranks, 0, [1])


def test_who_is_not_beside_a_killed_rank_waits_no_longer_than_the_timeout(
    group: Callable[[int], Ranks],
) -> None:
    ranks = group(4)
    ranks.start(lost_ranks.prefill_without, 0, "ring", 1.0)
    check(ranks, 0, [1, 3])


def test_a_late_rank_is_lost_after_the_timeout(group: Callable[[int], Ranks]) -> None:
    ranks = group(2)
    ranks.start(lost_ranks.decode_without, 1, 4.0, 0.5)
    (said,) = check(ranks, 1, [0])
    assert float(said.split()[1]) < 3.5


def test_what_does_not_fit_the_group_is_refused(group: Callable[[int], Ranks]) -> None:
    wanted = ["not shared evenly", "expected 'all' or 'own'", "not merged over ranks",
              "whole number from 1", "ring or all_gather", "NotPlanned",
              "planned with [8]", "2 entries for 1 requests", "2 entries for 1 requests",
              "one length per request", "Decode alone can be captured"]  # fmt: skip
    for found in group(2).run(lost_ranks.options_refused):
        assert len(found) == len(wanted)
        for said, part in zip(found, wanted, strict=True):
            assert part in said


def test_without_a_group_there_is_an_error() -> None:
    from warploom import distributed as wld
    from warploom.errors import ArgumentError

    options: dict[str, Any] = {"num_q_heads": 1, "head_dim": 16, "device": "cpu"}
    with pytest.raises(ArgumentError, match="init_process_group"):
        wld.DecodeWrapper(**options)


@pytest.mark.parametrize(
    ("case", "on_0", "on_1"),
    [
        (crossed_ranks.in_another_order, ["RankLost"] * 2, ["RankLost"] * 2),
        (crossed_ranks.after_a_failure, ["RankLost"], ["RankLost"] * 2),
        (crossed_ranks.with_another_batch, ["RankLost"], ["RankLost"]),
    ],
)
def test_ranks_at_different_calls_get_no_results(
    group: Callable[[int], Ranks], case: Any, on_0: list[str], on_1: list[str]
) -> None:
    """Messages of like sizes could be taken for each other's."""
    assert group(2).run(case) == [on_0, on_1]


def test_decodes_with_gradients_are_those_without(group: Callable[[int], Ranks]) -> None:
    assert group(2).run(crossed_ranks.with_gradients) == [(True, "NoGradient")] * 2


@pytest.mark.parametrize("kind", ["decode", "ring", "all_gather"])
def test_whatever_wants_a_gradient_is_told(group: Callable[[int], Ranks], kind: str) -> None:
    """By an error, not by silence; until then results are as any others."""
    assert group(2).run(crossed_ranks.learning, kind) == [[(True, "NoGradient")] * 4] * 2


@pytest.mark.parametrize("kind", ["decode", "ring", "all_gather"])
def test_compiled_models_send_what_others_send(group: Callable[[int], Ranks], kind: str) -> None:
    """Tensors that stand for others while torch.compile traces are no messages."""
    assert group(2).run(crossed_ranks.compiled, kind) == [[True, True]] * 2


def test_layouts_of_other_groups_are_refused(group: Callable[[int], Ranks]) -> None:
    for found in group(2).run(crossed_ranks.of_another_world):
        assert len(found) == 3
        assert all("ArgumentError: layout" in said and "of 2 ranks" in said for said in found)
