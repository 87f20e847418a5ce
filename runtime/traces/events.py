"""A trace as trace events in JSON, which Perfetto's user interface and chrome://tracing open.

By the "Trace Event Format" of Chromium: complete events (X) on lanes that are named by metadata
events (M). Times are microseconds. A multiprocessor is a process there, and a CTA a thread of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from warploom.runtime.traces.run_times import RunTimes

Event = dict[str, Any]


def write_events(trace: RunTimes, path: Path) -> None:
    """Write one JSON object with all events."""
    about = {"kernel": trace.kernel, "device": trace.device, "summary": trace.summary}
    document = {
        "traceEvents": [*_lanes(trace), *_items(trace), _prediction(trace)],
        "displayTimeUnit": "ns",
        "otherData": about,
    }
    path.write_text(json.dumps(document))


def _lanes(trace: RunTimes) -> Iterator[Event]:
    """Names of processes and of their threads, and the order of the former."""
    for sm, lane in trace.lanes[0].tolist():
        process = f"SM {sm}" if trace.on_gpu else trace.device
        thread = f"CTA {lane}" if trace.on_gpu else f"thread {sm}"
        at = {"ph": "M", **_place(trace, sm, lane)}
        yield {"name": "process_name", **at, "args": {"name": process}}
        yield {"name": "process_sort_index", **at, "args": {"sort_index": at["pid"]}}
        yield {"name": "thread_name", **at, "args": {"name": thread}}


def _items(trace: RunTimes) -> Iterator[Event]:
    names = trace.items.dtype.names or ()
    lanes, lane = trace.lanes
    for number, (record, place) in enumerate(
        zip(trace.items.tolist(), lanes[lane].tolist(), strict=True)
    ):
        item = dict(zip(names, record, strict=True))
        yield {
            "name": _title(item),
            "cat": item["role"],
            "ph": "X",
            "ts": item["begin_us"],
            "dur": item["end_us"] - item["begin_us"],
            **_place(trace, *place),
            "args": {
                "item": number,
                "request": item["request"],
                "kv head": item["kv_head"],
                "query rows": f"{item['q_begin']} to {item['q_end'] - 1}",
                "keys": f"{item['kv_begin']} to {item['kv_end'] - 1}",
                "partial": item["is_partial"],
                "CTA" if trace.on_gpu else "list": item["cta"],
                "cycles": item["cycles"],
            },
        }


def _prediction(trace: RunTimes) -> Event:
    return {
        "name": "predicted end",
        "ph": "i",
        "s": "g",  # across all lanes
        "ts": trace.predicted.us,
        "pid": 0,
        "tid": 0,
        "args": {"by": trace.predicted.by},
    }


def _place(trace: RunTimes, sm: int, lane: int) -> Event:
    return {"pid": sm if trace.on_gpu else 0, "tid": lane}


def _title(item: Event) -> str:
    """Role and request: the user interface colours events by their names without numbers."""
    if item["request"] < 0:
        return f"{item['role']}, several requests"
    return f"{item['role']} {item['request']}"
