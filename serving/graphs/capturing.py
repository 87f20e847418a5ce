"""A step captured for a bucket, and replayed: its segments in their order, between slots."""

from __future__ import annotations

import time

import torch

from warploom.graph_errors import OutputsChanged
from warploom.serving.graphs.buffers import Inputs, Slots, as_flow
from warploom.serving.graphs.driver import GraphDriver
from warploom.serving.graphs.pieces import Flow, Mode, Segment, Step
from warploom.serving.graphs.store import Entry, Link


class StepRunner:
    """The step of one pool, eagerly and captured."""

    def __init__(
        self, step: Step, inputs: Inputs, slots: Slots, driver: GraphDriver, device: torch.device
    ) -> None:
        self._step, self._inputs, self._slots = step, inputs, slots
        self._driver, self._device = driver, device
        self._outputs: str | None = None  # what the step returned first

    def eager(self, inputs: dict[str, torch.Tensor], rows: int) -> Flow:
        """What the step gives for inputs of so many rows; raises NotStatic, OutputsChanged."""
        flow: Flow = ()
        for segment in self._step.segments("eager"):
            flow = self._through(segment, flow, inputs, rows)
        self._check(flow)
        return flow

    def capture(self, mode: Mode, rows: int) -> Entry:
        """Capture the step for what the first rows of the inputs hold.

        Raises:
            CaptureFailed, NotStatic, OutputsChanged: nothing is kept.
        """
        begin = time.perf_counter()
        inputs, flow = self._inputs.first(rows), Flow()
        links: list[Link] = []
        try:
            for segment in self._step.segments(mode):
                if segment.is_captured:
                    links.append(self._captured(segment, flow, inputs, f"{mode} of {rows} rows"))
                    flow = links[-1].flow
                else:
                    result = self._through(segment, flow, inputs, rows)
                    flow = self._slots.write("in", result, rows)
                    links.append(Link(segment))
            self._check(flow)
        except BaseException:
            Entry((mode, rows), tuple(links), 0.0).close()
            raise
        return Entry((mode, rows), tuple(links), time.perf_counter() - begin)

    def replay(self, entry: Entry) -> Flow:
        """What the step gives for the inputs' first rows; it is overwritten by the next batch."""
        rows = entry.key[1]
        inputs, flow = self._inputs.first(rows), Flow()
        for link in entry.links:
            if link.capture is not None:
                link.capture.replay()
                flow = link.flow
                continue
            flow = self._through(link.segment, flow, inputs, rows)
            if link is not entry.links[-1]:
                flow = self._slots.write("in", flow, rows)
        self._check(flow)
        return flow

    def _captured(
        self, segment: Segment, flow: Flow, inputs: dict[str, torch.Tensor], what: str
    ) -> Link:
        rows = len(next(iter(inputs.values())))
        written: list[Flow] = []

        def body() -> None:
            result = self._through(segment, flow, inputs, rows)
            if written:  # slots of another shape would be made while a graph is captured
                check_alike(signature(result), signature(written[0]))
            written.append(self._slots.write("out", result, rows))

        self._driver.rehearse(body)
        return Link(segment, self._driver.capture(body, what), written[0])

    def _through(
        self, segment: Segment, flow: Flow, inputs: dict[str, torch.Tensor], rows: int
    ) -> Flow:
        for piece in segment.pieces:
            flow = as_flow(piece(flow, inputs), piece.name, rows, self._device)
        return flow

    def _check(self, flow: Flow) -> None:
        found = signature(flow)
        if self._outputs is None:
            self._outputs = found
        check_alike(found, self._outputs)


def signature(flow: Flow) -> str:
    """Types and shapes but for the rows."""
    return ", ".join(f"{x.dtype} {['rows', *x.shape[1:]]}".replace("'", "") for x in flow)


def check_alike(got: str, before: str) -> None:
    """Raises OutputsChanged."""
    if got != before:
        raise OutputsChanged(got=got, before=before)
