"""A step captured for a bucket, and replayed: its sections, and buffers between them."""

from __future__ import annotations

import time

import torch

from warploom.graph_errors import InputWritten, OutputsChanged
from warploom.serving.graphs.buffers import Inputs, SectionBuffers, as_flow
from warploom.serving.graphs.driver import GraphDriver
from warploom.serving.graphs.pieces import Flow, Mode, Section, Step
from warploom.serving.graphs.store import Entry, Link


class StepRunner:
    """The step of one pool, eagerly and captured."""

    def __init__(
        self,
        step: Step,
        inputs: Inputs,
        between: SectionBuffers,
        driver: GraphDriver,
        device: torch.device,
    ) -> None:
        self._step, self._inputs, self._between = step, inputs, between
        self._driver, self._device = driver, device
        self._outputs: str | None = None  # what the step returned first

    def eager(self, inputs: dict[str, torch.Tensor], rows: int) -> Flow:
        """What the step gives for inputs of so many rows; raises NotStatic, OutputsChanged."""
        flow: Flow = ()
        for section in self._step.sections("eager"):
            flow = self._through(section, flow, inputs, rows)
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
            for section in self._step.sections(mode):
                if section.is_captured:
                    links.append(self._captured(section, flow, inputs, f"{mode} of {rows} rows"))
                    flow = links[-1].flow
                else:
                    result = self._through(section, flow, inputs, rows)
                    flow = self._between.write("in", result, rows)
                    links.append(Link(section, flow=flow))
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
            flow = self._through(link.section, flow, inputs, rows)
            if link is not entry.links[-1]:
                check_alike(signature(flow), signature(link.flow))  # the next graph reads there
                flow = self._between.write("in", flow, rows)
        self._check(flow)
        return flow

    def forget(self) -> None:
        """Take whatever the step returns next for what it returns."""
        self._outputs = None

    def _captured(
        self, section: Section, flow: Flow, inputs: dict[str, torch.Tensor], what: str
    ) -> Link:
        rows = len(next(iter(inputs.values())))
        written: list[Flow] = []

        def body() -> None:
            result = self._through(section, flow, inputs, rows)
            if written:  # buffers of another shape would be made while a graph is captured
                check_alike(signature(result), signature(written[0]))
            written.append(self._between.write("out", result, rows))

        before = {name: buffer._version for name, buffer in inputs.items()}
        self._driver.rehearse(body)
        for name, buffer in inputs.items():
            if buffer._version != before[name]:
                raise InputWritten(name=name)
        return Link(section, self._driver.capture(body, what), written[0])

    def _through(
        self, section: Section, flow: Flow, inputs: dict[str, torch.Tensor], rows: int
    ) -> Flow:
        for piece in section.pieces:
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
