"""Schedules of serving, simulated: what asynchronous planning, streams and placement would gain.

After xLLM (Liu et al., 2025), sections 4.1 and 4.4.3. `docs/simulation.md` begins with a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from warploom.lazy import lazy_names

if TYPE_CHECKING:
    from warploom.serving.prefetch.model_shapes import ModelShape as ModelShape
    from warploom.serving.simulation.arrivals import Request as Request
    from warploom.serving.simulation.arrivals import read_trace as read_trace
    from warploom.serving.simulation.arrivals import synthetic as synthetic
    from warploom.serving.simulation.arrivals import write_trace as write_trace
    from warploom.serving.simulation.balance import Hashed as Hashed
    from warploom.serving.simulation.balance import LeastRequests as LeastRequests
    from warploom.serving.simulation.balance import LeastTokens as LeastTokens
    from warploom.serving.simulation.balance import Migration as Migration
    from warploom.serving.simulation.balance import Placement as Placement
    from warploom.serving.simulation.balance import RoundRobin as RoundRobin
    from warploom.serving.simulation.batcher import Limits as Limits
    from warploom.serving.simulation.comparisons import Comparison as Comparison
    from warploom.serving.simulation.comparisons import comparisons as comparisons
    from warploom.serving.simulation.costs import Costs as Costs
    from warploom.serving.simulation.costs import GivenCosts as GivenCosts
    from warploom.serving.simulation.costs import HostSeconds as HostSeconds
    from warploom.serving.simulation.costs import Section as Section
    from warploom.serving.simulation.measured import RECORDED as RECORDED
    from warploom.serving.simulation.measured import Line as Line
    from warploom.serving.simulation.measured import Measured as Measured
    from warploom.serving.simulation.measured import read_measured as read_measured
    from warploom.serving.simulation.roofline import Engine as Engine
    from warploom.serving.simulation.roofline import Machine as Machine
    from warploom.serving.simulation.roofline import RooflineCosts as RooflineCosts
    from warploom.serving.simulation.schedules import Asynchronous as Asynchronous
    from warploom.serving.simulation.schedules import DualStreams as DualStreams
    from warploom.serving.simulation.schedules import Schedule as Schedule
    from warploom.serving.simulation.schedules import Serial as Serial
    from warploom.serving.simulation.schedules import Task as Task
    from warploom.serving.simulation.simulator import Deployment as Deployment
    from warploom.serving.simulation.simulator import Result as Result
    from warploom.serving.simulation.simulator import simulate as simulate
    from warploom.serving.simulation.timeline import Timeline as Timeline
    from warploom.serving.simulation.timeline import draw_timelines as draw_timelines

_HOME = {
    "Asynchronous": "schedules",
    "Comparison": "comparisons",
    "Costs": "costs",
    "Deployment": "simulator",
    "DualStreams": "schedules",
    "Engine": "roofline",
    "GivenCosts": "costs",
    "Hashed": "balance",
    "HostSeconds": "costs",
    "LeastRequests": "balance",
    "LeastTokens": "balance",
    "Limits": "batcher",
    "Line": "measured",
    "Machine": "roofline",
    "Measured": "measured",
    "Migration": "balance",
    "ModelShape": "roofline",  # which imports it
    "Placement": "balance",
    "RECORDED": "measured",
    "Request": "arrivals",
    "Result": "simulator",
    "RooflineCosts": "roofline",
    "RoundRobin": "balance",
    "Schedule": "schedules",
    "Section": "costs",
    "Serial": "schedules",
    "Task": "schedules",
    "Timeline": "timeline",
    "comparisons": "comparisons",
    "draw_timelines": "timeline",
    "read_measured": "measured",
    "read_trace": "arrivals",
    "simulate": "simulator",
    "synthetic": "arrivals",
    "write_trace": "arrivals",
}

if not TYPE_CHECKING:  # there the imports above say it
    __all__ = sorted(_HOME)

__getattr__, __dir__ = lazy_names(__name__, "warploom.serving.simulation", _HOME)
