"""Plans by NumPy: the definition of all plans, and what plans where no native planner can."""

from __future__ import annotations

from warploom.codegen.source import TileChoice
from warploom.runtime.formats import make_batch
from warploom.runtime.formats.base import Arguments
from warploom.runtime.formats.batch import Batch
from warploom.runtime.inputs.inputs import Inputs
from warploom.runtime.launching.kernels import Kernels
from warploom.runtime.planning.memory import PlanMemory
from warploom.runtime.planning.rules import Rules
from warploom.runtime.planning.verify_plans import verify_planned
from warploom.runtime.strategies.strategy import Planned


class NumpyStrategy:
    """Takes every batch."""

    def __init__(self, rules: Rules, kernels: Kernels, memory: PlanMemory) -> None:
        self._rules, self._kernels, self._memory = rules, kernels, memory

    def prepare(self) -> None:
        """Nothing is built."""

    def read(self, given: Arguments) -> Batch:
        """Check the arguments; raises what `make_batch` does."""
        return make_batch(self._rules.spec.kv_format, *given[:5])

    def plan(self, batch: Batch, choice: TileChoice, inputs: Inputs) -> Planned:
        rules, memory = self._rules, self._memory
        kernel = self._kernels.get(choice)
        chunks = rules.chunks(batch, kernel.tile)
        room, size = memory.fit(rules.least_bounds(batch, kernel.tile), kernel, chunks)
        both = rules.make(batch, kernel, inputs)
        memory.send(both[0], room, size)
        return Planned(batch, choice, kernel, size, "NumPy", lambda: both, is_native=False)

    def verify(self, planned: Planned) -> None:
        """Check the last plan; raises PlanInvalid."""
        room = self._memory.room
        assert room is not None  # there is a plan
        check = self._rules.check_of(planned.batch)
        packed = self._memory.packed(room)
        verify_planned(planned.plan, planned.visibility, room, packed, planned.by, check)
