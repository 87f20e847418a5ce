"""Plans by NumPy: the reference of all plans, and the fallback where no native planner can plan."""

from __future__ import annotations

from warploom.codegen.source import TileChoice
from warploom.runtime.formats import make_batch
from warploom.runtime.formats.batch import Arguments, Batch, HostBatch
from warploom.runtime.inputs.inputs import Inputs
from warploom.runtime.launching.kernels import Kernels
from warploom.runtime.planning.memory import PlanMemory
from warploom.runtime.planning.rules import Rules
from warploom.runtime.planning.verify_plans import verify_planned
from warploom.runtime.strategies.strategy import Planned, Read


class NumpyStrategy:
    """Takes every batch."""

    def __init__(self, rules: Rules, kernels: Kernels, memory: PlanMemory) -> None:
        self._rules, self._kernels, self._memory = rules, kernels, memory

    def prepare(self) -> None:
        """Nothing is built."""

    def read(self, given: Arguments) -> HostBatch:
        """Check the arguments; raises what `make_batch` does."""
        return make_batch(self._rules.spec.kv_format, *given[:5])

    def plan(self, batch: Batch, choice: TileChoice, inputs: Inputs) -> Planned:
        rules, memory = self._rules, self._memory
        kernel, lengths = self._kernels.get(choice), batch.on_host
        chunks = rules.chunks(lengths, kernel.tile)
        room, size = memory.fit(rules.least_bounds(lengths, kernel.tile), kernel, chunks)
        plan, visibility = rules.make(lengths, kernel, inputs)
        memory.send(plan, room, size)
        made = Read(plan, visibility, lengths.arrays)
        return Planned(lengths, choice, kernel, size, "NumPy", lambda: made, is_native=False)

    def verify(self, planned: Planned) -> None:
        """Check the last plan; raises PlanInvalid."""
        room = self._memory.room
        assert room is not None  # a plan was made
        check = self._rules.check_of(planned.arrays)
        packed = self._memory.packed(room)
        verify_planned(planned.plan, planned.visibility, room, packed, planned.by, check)
