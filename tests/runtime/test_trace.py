"""`wl.trace`: items of real runs lie within the time around them, and files agree with them."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.parts import compiled

import warploom as wl
from warploom import errors
from warploom.runtime.devices import graph
from warploom.runtime.traces.picture import paint, places
from warploom.runtime.traces.trace import Trace

BOTH = wl.TileConfig(48, 128, 1, 1, decode=wl.TileConfig(12, 64, 1, 1))
ROLES = wl.TileConfig(64, 64, 4, 2, "hopper", 2, decode=wl.TileConfig(16, 64, 2, 2))
MIXED = [70, 1, 0, 33, 1, 2], [130, 257, 40, 33, 500, 64]


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPLOOM_TRACE", "1")
    monkeypatch.setenv("WARPLOOM_THREADS", "2")


def make(tile: wl.TileConfig | None = None, **options: Any) -> wl.AttentionWrapper:
    given = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": "float32"} | options
    return wl.AttentionWrapper(wl.Causal(), kv_format=wl.Ragged(), device="cpu", tile=tile, **given)


def plan(wrapper: wl.AttentionWrapper, lengths: tuple[list[int], list[int]] = MIXED) -> None:
    wrapper.plan(*(np.append(0, np.cumsum(x)).astype(np.int32) for x in lengths))


def run(wrapper: wl.AttentionWrapper, lengths: tuple[list[int], list[int]] = MIXED) -> float:
    """Seconds that a run takes, with what Python does around it."""
    heads, spec = wrapper.heads, wrapper.spec
    dtype = getattr(torch, spec.dtype.name)
    q = torch.randn(sum(lengths[0]), heads.num_q, spec.head_dim_qk).to(dtype)
    k, v = torch.randn(2, sum(lengths[1]), heads.num_kv, spec.head_dim_qk).to(dtype)
    begin = time.perf_counter()
    wrapper.run(q, (k, v))
    return time.perf_counter() - begin


def traced_run(wrapper: wl.AttentionWrapper) -> tuple[Trace, float]:
    plan(wrapper)
    seconds = run(wrapper)
    return wl.trace(wrapper), seconds


@pytest.mark.parametrize("tile", [None, BOTH], ids=["one role", "two roles"])
def test_items_lie_within_the_time_around_the_run(tile: wl.TileConfig | None) -> None:
    wrapper = make(tile)
    found, seconds = traced_run(wrapper)
    items, wall = found.items, 1e6 * seconds
    assert wrapper.planned is not None
    assert len(items) == len(wrapper.planned.plan.items) > 3
    assert items["begin_us"].min() == 0 and (items["end_us"] > items["begin_us"]).all()
    assert 0 < found.span_us == items["end_us"].max() <= wall
    busy = sum(one.busy_us for one in found.roles())
    assert found.predicted.us <= busy * (1 + 1e-9)  # sums of the same times in another order
    assert busy <= 2 * wall  # of two threads
    assert set(found.busy()) <= {0, 1}
    assert sum(found.busy().values()) * found.span_us == pytest.approx(busy)
    assert max(found.busy().values()) <= 1 + 1e-9
    names = ["single"] if tile is None else ["prefill", "decode"]
    assert [one.role for one in found.roles()] == names
    assert sum(one.items for one in found.roles()) == len(items)


def test_roles_are_those_of_requests() -> None:
    """Requests 1, 4 and 5 have as many rows as a decode's tile holds."""
    found, _ = traced_run(make(BOTH))
    for name, requests in (("prefill", {0, 3}), ("decode", {1, 4, 5})):
        assert set(found.items["request"][found.items["role"] == name].tolist()) == requests


def test_a_later_run_has_times_of_its_own() -> None:
    wrapper = make()
    first, _ = traced_run(wrapper)
    kept = first.items.copy()
    run(wrapper)
    second = wl.trace(wrapper)
    assert np.array_equal(first.items, kept)  # it is no view of memory that runs write to
    assert not np.array_equal(second.items["end_us"], kept["end_us"])
    assert np.array_equal(second.items["request"], kept["request"])


def overlaps(lines: dict[Any, list[tuple[float, float]]]) -> bool:
    """Whether two of a line's events run at once, but for rounding."""
    return any(
        end > begin + 1e-6
        for events in lines.values()
        for (_, end), (begin, _) in zip(sorted(events), sorted(events)[1:], strict=False)
    )


def check_events(found: Trace, path: Path) -> dict[Any, list[tuple[float, float]]]:
    """What a viewer of trace events makes of the file: begin and end of events on each line."""
    document = json.loads(found.save(path).read_text())
    events = document["traceEvents"]
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    lines = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["ts"] >= 0 and 0 < event["dur"] <= found.span_us - event["ts"] + 1e-6
            assert event["cat"] in event["name"]
            lines[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert set(lines) == named and sum(map(len, lines.values())) == len(found.items)
    (end,) = [event for event in events if event["ph"] == "i"]
    assert end["ts"] == pytest.approx(found.predicted.us)
    assert not overlaps(lines)
    return lines


def test_events_tell_what_an_item_is(tmp_path: Path) -> None:
    found, _ = traced_run(make(BOTH))
    assert len(check_events(found, tmp_path / "new folder" / "run.JSON")) <= 2
    events = json.loads((tmp_path / "new folder" / "run.JSON").read_text())["traceEvents"]
    first = next(event for event in events if event["ph"] == "X")["args"]
    assert set(first) == {
        "item", "request", "kv head", "query rows", "keys", "partial", "list", "cycles",
    }  # fmt: skip
    item = found.items[first["item"]]
    assert first["keys"] == f"{item['kv_begin']} to {item['kv_end'] - 1}"


def drawn_lines(found: Trace) -> set[tuple[float, float]]:
    """Upper and lower ends of the bars in a picture."""
    lines = set()
    for collection in paint(found).axes[0].collections:
        for path in collection.get_paths():
            y = np.asarray(path.vertices)[:, 1]
            lines.add((round(float(y.min()), 6), round(float(y.max()), 6)))
    return lines


@pytest.mark.usefixtures("emulator")
def test_ctas_of_a_gpu_have_lines_of_their_own(tmp_path: Path) -> None:
    """The text of a CUDA kernel, on the host: five CTAs, two of which are on one multiprocessor."""
    pytest.importorskip("matplotlib")
    found, seconds = traced_run(make(ROLES, dtype="bfloat16", head_dim=128))
    assert found.on_gpu and found.span_us <= 1e6 * seconds
    assert [one.role for one in found.roles()] == ["prefill", "decode"]
    lines = check_events(found, tmp_path / "run.json")
    assert set(lines) == {(cta // 2, cta) for cta in range(5)}
    assert set(found.busy()) == {0, 1, 2}
    assert len(drawn_lines(found)) == 5
    assert "SMs" in str(found)


def test_lines_of_one_multiprocessor_share_its_place() -> None:
    top, height = places(np.array([[3, 0], [7, 1], [7, 4], [9, 2]]))
    np.testing.assert_allclose(height, [0.85, 0.425, 0.425, 0.85])
    np.testing.assert_allclose(top, [0.075, 1.075, 1.5, 2.075])


@pytest.mark.parametrize("ending", [".png", ".svg"])
def test_the_picture_is_written(tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    wrapper = make(BOTH)
    traced_run(wrapper)
    path = tmp_path / f"run{ending}"
    found = wl.trace(wrapper, path, tmp_path / "run.json")
    assert path.stat().st_size > 5_000 and (tmp_path / "run.json").exists()
    assert len(drawn_lines(found)) == len(found.busy())
    shown = [text.get_text() for text in paint(found).legends[0].get_texts()]
    assert [text.split()[0] for text in shown] == ["prefill:", "decode:", "predicted"]


def test_the_table_has_a_line_for_each_role() -> None:
    found, _ = traced_run(make(BOTH))
    assert found.table().row_count == 2
    text = str(found)
    assert "prefill" in text and "decode" in text and "threads" in text
    assert f"predicted end {found.predicted.us:,.1f} us" in " ".join(text.split())
    assert repr(found).startswith(f"<Trace of {len(found.items)} items: ")


def test_a_batch_without_rows_has_an_empty_trace(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    wrapper = make()
    plan(wrapper, ([0, 0], [5, 9]))
    run(wrapper, ([0, 0], [5, 9]))
    found = wl.trace(wrapper, tmp_path / "run.json", tmp_path / "run.png")
    assert (len(found.items), found.span_us, found.busy(), found.roles()) == (0, 0.0, {}, [])
    assert "no work items" in str(found)


def test_the_plan_is_read_from_memory_where_a_replay_may_have_changed_it() -> None:
    wrapper = make()
    first, _ = traced_run(wrapper)
    assert wrapper.planned is not None and wrapper.planned.plan is not None  # it is kept
    memory = compiled(wrapper).planner._memory
    assert memory.room is not None
    items = memory.workspace.plan_ints[memory.room.offsets["items"] :]
    items[1] = 1 - items[1]  # the key/value head of the first item
    assert wl.trace(wrapper).items["kv_head"][0] == 1 - first.items["kv_head"][0]


def test_what_has_not_run_has_no_times() -> None:
    wrapper = make()
    with pytest.raises(errors.NotPlanned):
        wl.trace(wrapper)
    plan(wrapper)
    assert wrapper.planned is not None
    count = len(wrapper.planned.plan.items)
    with pytest.raises(errors.NotRun, match=rf"{count} of {count} .* Call run\(\), or replay"):
        wl.trace(wrapper)
    run(wrapper)
    wl.trace(wrapper)
    plan(wrapper)
    with pytest.raises(errors.NotRun):
        wl.trace(wrapper)


def test_other_wrappers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.ArgumentError, match="backend: is 'reference'"):
        wl.trace(make(backend="reference"))
    with pytest.raises(errors.ArgumentError, match="wrapper: is None; expected an Att"):
        wl.trace(None)  # type: ignore[arg-type]
    monkeypatch.delenv("WARPLOOM_TRACE")
    wrapper = make()
    for _ in range(2):
        with pytest.raises(errors.NotTraced, match="WARPLOOM_TRACE=1, make the wrapper anew"):
            wl.trace(wrapper)
        plan(wrapper)
        run(wrapper)


def test_memory_that_another_wrapper_has_planned_into_is_not_read() -> None:
    memory = torch.empty(1 << 22, dtype=torch.uint8)
    mine, other = (make(workspace=memory) for _ in range(2))
    traced_run(mine)
    plan(other)
    with pytest.raises(errors.PlanMismatch, match="another wrapper"):
        wl.trace(mine)


def test_nothing_waits_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = make()
    traced_run(wrapper)
    monkeypatch.setattr(graph, "is_capturing", lambda _: True)
    with pytest.raises(errors.ForbiddenUnderCapture, match="times of work items"):
        wl.trace(wrapper)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("run.foo", r"path: '.*run\.foo' ends in no format .* in \.json, \.png, \.svg or another"),
        ("run", "path: '.*run' ends in no format"),
    ],
)
def test_no_file_is_written_where_one_has_no_known_ending(
    path: str, text: str, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    wrapper = make()
    found, _ = traced_run(wrapper)
    with pytest.raises(errors.ArgumentError, match=text):
        wl.trace(wrapper, tmp_path / "run.json", tmp_path / path)
    with pytest.raises(errors.ArgumentError, match=text):
        found.save(tmp_path / path)
    with pytest.raises(errors.ArgumentError, match="path: is 3; expected the name of a file"):
        found.save(3)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_events_need_no_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found, _ = traced_run(make())
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.backend_bases", None)
    assert found.save(tmp_path / "run.json").exists()
    with pytest.raises(errors.MissingPackage, match=r"trace\(\) needs the package matplotlib"):
        found.save(tmp_path / "run.png")
