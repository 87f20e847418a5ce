"""Would it pay to plan a step ahead? Three schedules of a server, simulated from measured costs.

A model of 7B answers requests that come at random, on the figures of an H200; the engine's own work
on the host is assumed. Planning ahead hides the host behind the device; the device's planner leaves
it less to do. Nothing is computed but times, so it runs anywhere, and each run gives the same ones.
"""

import sys

import rich
from rich.table import Table

from warploom.simulate import (
    Asynchronous,
    Engine,
    Limits,
    Line,
    ModelShape,
    RooflineCosts,
    Serial,
    simulate,
    synthetic,
)

MODEL = ModelShape("7B", layers=28, hidden=3584, heads=28, kv_heads=4, ffn=18_944)
HOST = Engine(schedule=Line(0.3e-3, 4e-6), output=Line(0.2e-3, 2e-6))  # seconds; and per request
LIMITS = Limits(requests=64, rows=2048)
SCHEDULES = {
    "in turn": Serial(),
    "a step ahead": Asynchronous(),
    "a step ahead, planned by the device": Asynchronous(device_planner=True),
}


def main(path: str = "") -> None:
    costs = RooflineCosts(MODEL, vocabulary=151_936, engine=HOST)
    requests = synthetic(300, rate=18.0, prompt=900, output=150, spread=0.6, seed=0)
    ran = {name: simulate(requests, costs, one, limits=LIMITS) for name, one in SCHEDULES.items()}
    table = Table("schedule", "tokens/s", "first token, p95", "a token, p50", "device idle")
    for name, result in ran.items():
        first, each = 1e3 * result.ttft(0.95), 1e3 * result.tpot(0.5)
        idle = f"{result.idle('device'):.1%}"
        table.add_row(name, f"{result.throughput:.0f}", f"{first:.0f} ms", f"{each:.2f} ms", idle)
    rich.print(table)
    serial, ahead, planned = ran.values()
    assert ahead.tpot(0.5) < serial.tpot(0.5), "the host is hidden"
    assert ahead.idle("device") < serial.idle("device")
    hidden = 1e3 * (serial.tpot(0.5) - ahead.tpot(0.5))
    print(f"a step ahead takes {hidden:.2f} ms off each token")
    extra = 1e3 * (planned.tpot(0.5) - ahead.tpot(0.5))
    print(f"the device's planner {'adds' if extra > 0 else 'saves'} {abs(extra):.3f} ms more")
    if path:
        ahead.timeline.write(path)
        print(f"wrote {path}: open it in Perfetto")


if __name__ == "__main__":
    main(*sys.argv[1:2])  # a file for Perfetto, such as ahead.json
