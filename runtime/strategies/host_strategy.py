"""Plans by the planner compiled for the host, without loops in Python."""

from __future__ import annotations

from logging import INFO, WARNING

from warploom.codegen.source import TileChoice
from warploom.errors import CompileForbidden, NoHostCompiler, WarploomError
from warploom.logs import log
from warploom.runtime.formats.batch import Arguments, Batch, Measured, RoleSizes, RoleTiles
from warploom.runtime.inputs.inputs import Inputs
from warploom.runtime.planning.planner_kinds import host_partition, planner_kinds
from warploom.runtime.strategies.host_planner import HostPlanner
from warploom.runtime.strategies.replan import ReplanGuard
from warploom.runtime.strategies.size_classes import SizeClass, SizeClasses, Values, values_of
from warploom.runtime.strategies.strategy import Planned
from warploom.scheduler.model.problem import Partition

_BY = "the host, natively"


class HostStrategy:
    """Plans batches that it has measured, if the host knows the mask's inputs."""

    def __init__(self, classes: SizeClasses) -> None:
        rules = classes.rules
        options = rules.options
        self._classes = classes
        self._may_be = options.may_plan_natively
        self._planners: dict[Partition, HostPlanner | None] = {}
        self._last: HostPlanner | None = None  # also measures: the next batch is mostly alike
        self._guard: ReplanGuard | None = None  # of the last batch that was planned here
        # The same guard, with the input values of that plan. Set only if no other strategy has
        # planned since and that batch was like the one before it: where batches differ, trying
        # costs half of what it saves where they are alike.
        self._steady: tuple[ReplanGuard, Values] | None = None

    def _found(self) -> HostPlanner | None:
        """The current planner, made when first needed; None if it cannot be built."""
        if self._last is None and self._may_be:
            self._last = self._of(host_partition(self._classes.rules.always_has_roles))
            self._may_be = self._last is not None
        return self._last

    def _of(self, kind: Partition) -> HostPlanner | None:
        """The planner for plans of a partition."""
        if kind not in self._planners:
            self._planners[kind] = self._made(kind)
        return self._planners[kind]

    def _made(self, kind: Partition) -> HostPlanner | None:
        rules = self._classes.rules
        spec = rules.spec
        try:
            return HostPlanner(
                spec.variant, spec.kv_format, rules.heads, kind.has_roles, kind.deals
            )
        except (WarploomError, OSError) as error:
            is_meant = isinstance(error, (NoHostCompiler, CompileForbidden))
            log.log(INFO if is_meant else WARNING, "no native planner, so NumPy plans: %s", error)
            return None

    def prepare(self) -> None:
        rules = self._classes.rules
        if self._found() is None:
            return
        tiles, group_size = (choice.tile for choice in rules.choices()), rules.heads.group_size
        for kind in planner_kinds(tiles, rules.options, group_size):
            self._of(kind)

    def replan(self, given: Arguments) -> Planned | None:
        """Plan a batch like the last one, if this strategy planned the last one; else None.

        Args:
            given: the arguments of `plan`; inputs have the same values as for the last plan.
        """
        planner, classes = self._last, self._classes
        if self._steady is None or planner is None or given.q_rows is not None:
            return None
        guard, values = self._steady
        size_class, memory = guard.size_class, classes.memory
        lengths, target = planner.known(given), memory.workspace.ready_plan_ints(size_class.size)
        if lengths is None or target is None or not guard.address:
            return None
        delivery = memory.upload.delivery(target, lengths.staying)
        if delivery is None:
            return None
        memory.number += 1  # first: an interrupt may come before all is written
        found = planner.replan(lengths, guard, delivery)
        if found is None:
            memory.number -= 1
            return None
        batch, is_sent = found
        if not is_sent:
            self._send(batch, size_class)
        return classes.made(batch, size_class, values, _BY)

    def forget(self) -> None:
        """Disable `replan` until the next plan, since another strategy may plan in between."""
        self._steady = None

    def read(self, given: Arguments) -> Measured | None:
        planner = self._last or self._found()
        if planner is None:
            return None
        return planner.measure(given, self._classes.rules.options.bounds)

    def count(self, batch: Batch, inputs: Inputs, sizes: RoleSizes) -> RoleTiles | None:
        """Key tiles of both roles of the last measured batch; None: NumPy must count them."""
        if self._last is None or not isinstance(batch, Measured):
            return None
        return self._last.count(batch.lengths, inputs, sizes)

    def plan(self, batch: Batch, choice: TileChoice, inputs: Inputs) -> Planned | None:
        classes, memory, last = self._classes, self._classes.memory, self._last
        if last is None or not isinstance(batch, Measured):
            return None
        if not last.has_mask_inputs(inputs):
            return None
        size_class = classes.of(batch, choice)
        if not size_class.site.is_in_range:
            return None
        planner = self._of(size_class.partition)
        if planner is None:
            return None
        if planner is not last:
            last.release()
            planner.reader, self._last = last.reader, planner
        planner.take(batch.lengths, classes.rules.options.bounds)
        memory.workspace.fit(size_class.size)
        stage = memory.upload.stage(memory.workspace.plan_ints)
        planner.plan(inputs, size_class.site, stage.address)
        self._send(batch, size_class)
        now, before = ReplanGuard(classes.rules, size_class, batch.sizes), self._guard
        self._guard, self._steady = now, None
        if now.repeats(before):
            self._steady = now, values_of(inputs)
        return classes.planned(batch, size_class, inputs, _BY)

    def _send(self, batch: Measured, size_class: SizeClass) -> None:
        """Enqueue the upload of the staged plan."""
        upload, lengths = self._classes.memory.upload, batch.lengths
        used, count = size_class.site.room.offsets["indices"], batch.sizes.num_blocks
        if count and lengths.staying is not None:
            upload.append(lengths.staying, used, count)
            count = 0
        upload.send(used + count)
