"""What `explain()` says reads as a sentence would."""

from __future__ import annotations

import re
from typing import Any

import pytest

from warploom import Causal, SlidingWindow, SoftCap, flex
from warploom.codegen.source import TileChoice, TileConfig
from warploom.runtime.wrappers.wrapper import AttentionWrapper


def test_one_thing_is_not_named_as_many() -> None:
    wrapper = AttentionWrapper(num_q_heads=1, head_dim=64, dtype="float32", device="cpu")
    wrapper.plan([0, 1], [0, 1])
    facts = wrapper.explain().facts
    assert facts["batch"] == "1 request, 1 query row, 1 key, longest 1"
    assert facts["mask"] == "none: 1 tile, all full"
    wrapper.plan([0, 1, 3], [0, 1, 4])
    assert str(wrapper.explain().facts["batch"]).startswith("2 requests, 3 query rows, 4 keys")


def test_scalars_that_are_kept_are_told() -> None:
    wrapper = AttentionWrapper(
        SoftCap(30.0) & SlidingWindow(9), num_q_heads=1, head_dim=64, dtype="float32", device="cpu"
    )
    wrapper.plan([0, 1], [0, 3], cap=20.0, left=1234567)
    wrapper.plan([0, 1], [0, 4])
    assert wrapper.explain().facts["scalars"] == "right = -1, cap = 20, left = 1234567"


def test_how_rows_are_counted_is_told_where_they_are_read() -> None:
    def told(variant: Any) -> str:
        wrapper = AttentionWrapper(
            variant, num_q_heads=1, head_dim=64, dtype="float32", device="cpu"
        )  # fmt: skip
        return str(wrapper.explain().facts.get("query rows", ""))

    def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx >= kv_idx

    among_keys = "at.q_pos (q_idx of flex with q_idx='position') = kv_len - q_len + row: the last "
    from_zero = "at.q_idx (q_idx of flex) = row, from 0 in each request"
    assert told(Causal()).startswith(among_keys)
    assert told(flex(None, causal)).startswith(from_zero)
    assert told(flex(None, causal, q_idx="position")) == told(Causal())
    first, second = told(Causal() & flex(None, causal)).splitlines()
    assert first.startswith(among_keys)
    assert second.startswith(from_zero)
    assert told(SoftCap(30.0)) == ""


def test_rows_before_all_keys_are_told() -> None:
    """As lengths of the step before have them; a request without keys is none of a server's."""
    wrapper = AttentionWrapper(
        Causal(), num_q_heads=1, head_dim=64, dtype="float32", device="cpu"
    )  # fmt: skip
    wrapper.plan([0, 1, 9, 9, 11], [0, 3, 11, 15, 15])
    assert "rows before keys" not in wrapper.explain().facts
    wrapper.plan([0, 1, 9, 13], [0, 3, 7, 9])
    told = str(wrapper.explain().facts["rows before keys"])
    assert told.startswith("request 1 (and 1 other) has 8 rows and 4 keys: the first 4 rows")
    plain = AttentionWrapper(num_q_heads=1, head_dim=64, dtype="float32", device="cpu")
    plain.plan([0, 8], [0, 4])
    assert "rows before keys" not in plain.explain().facts


def test_a_workspace_is_the_sum_of_its_parts() -> None:
    wrapper = AttentionWrapper(num_q_heads=1, head_dim=64, dtype="float32", device="cpu")
    wrapper.plan([0, 1, 3], [0, 1, 400])
    total, *parts = re.findall(r"[\d,]+(?= B|,|$)", str(wrapper.explain().facts["workspace"]))
    assert int(total.replace(",", "")) == sum(int(part.replace(",", "")) for part in parts)


def test_what_spoke_for_a_tile_lies_beside_it() -> None:
    declared: dict[str, Any] = {"num_q_heads": 1, "dtype": "float32", "device": "cpu"}
    wrapper = AttentionWrapper(head_dim=64, **declared)
    assert wrapper.choice is None and wrapper.tile is None
    for rows in (1, 40):  # the second batch has another tile
        wrapper.plan([0, rows], [0, 64])
        assert wrapper.choice is not None and wrapper.choice.tile == wrapper.tile
        assert f"tiles of {wrapper.choice.tile.rows}" in wrapper.choice.reason
        assert wrapper.explain().facts["why this tile"] == wrapper.choice.reason
    given = AttentionWrapper(head_dim=64, tile=TileConfig(12, 64, 1, 1), **declared)
    given.plan([0, 1], [0, 1])
    choice = given.choice
    assert choice is not None and choice.reason == ""
    assert choice == TileChoice(TileConfig(12, 64, 1, 1))
    assert given.explain().facts["why this tile"] == "given by the caller"


def test_a_back_end_of_its_devices_name_is_said_once() -> None:
    declared: dict[str, Any] = {
        "num_q_heads": 1,
        "head_dim": 64,
        "dtype": "float32",
        "device": "cpu",
    }
    assert str(AttentionWrapper(**declared).explain().facts["back end"]).startswith("cpu: ")
    reference = AttentionWrapper(**declared, backend="reference")
    assert str(reference.explain().facts["back end"]).startswith("reference on cpu: NumPy")


def test_the_words_of_a_plan_are_explained_below_the_table() -> None:
    wrapper = AttentionWrapper(num_q_heads=2, head_dim=64, dtype="float32", device="cpu")
    assert wrapper.explain().legend == ""
    assert str(wrapper.explain()).endswith("┘") and "head_dim" in wrapper.explain()
    wrapper.plan([0, 1], [0, 1])
    legend = [line.rstrip() for line in str(wrapper.explain()).rpartition("┘")[2].splitlines()]
    explained = [line.partition(":")[0] for line in legend if line]
    assert explained == ["fused rows", "work item", "share", "mask"]


def test_a_plan_is_shown_on_one_line() -> None:
    attention = AttentionWrapper(num_q_heads=2, head_dim=16, dtype="float32", device="cpu")
    attention.plan([0, 2], [0, 5])
    shown = repr(attention.planned)
    assert shown.startswith("Planned(tile=TileConfig(rows=") and "num_ctas=" in shown
    assert len(shown) < 200 and "\n" not in shown


def test_balance_is_that_of_shares_that_can_have_work() -> None:
    wrapper = AttentionWrapper(num_q_heads=2, num_kv_heads=2, head_dim=16, device="cpu")
    wrapper.plan([0, 1], [0, 40])  # an item for each head
    assert wrapper.planned is not None
    if wrapper.planned.plan.problem.active_ctas <= 2:
        pytest.skip("a machine of so few cores has no share without work")
    told = "longest share 1.00 x mean of 2, as many as there are work items"
    assert wrapper.explain().facts["balance"] == told
    wrapper.plan(range(65), range(0, 65 * 40, 40))
    assert str(wrapper.explain().facts["balance"]).endswith(" x mean")
    wrapper.plan([0, 0], [0, 40])
    assert wrapper.explain().facts["balance"] == "no work"
