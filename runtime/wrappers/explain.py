"""What a wrapper chose and why: facts for programs, a table for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from warploom.codegen.compilers.arch import Arch
from warploom.codegen.compilers.hostcc import HostTarget
from warploom.codegen.source import TileChoice, TileConfig
from warploom.dsl.graphs.loads import rows_are_read_as
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.spec import AttentionSpec, TracedVariant
from warploom.errors import NotReplayed
from warploom.runtime.devices.cpu import default_threads
from warploom.runtime.devices.device import Backend
from warploom.runtime.launching.pretransformed_keys import KeyTransform
from warploom.runtime.launching.program import Pass, Program
from warploom.runtime.planning.composed import depends_on_request
from warploom.runtime.planning.visibility import Heads, MaskVisibility
from warploom.runtime.strategies.strategy import Planned
from warploom.scheduler.composed.plan import ComposedPlan
from warploom.scheduler.model.roles import roles_of
from warploom.scheduler.plans.plan import Plan

_MAX_PREFIXES = 8  # shared prefixes whose choice is shown
_MAX_TILES = 200_000  # tiles above which their classes are not counted: it would take seconds

# how rows are counted, by what functors read
_ROWS = {
    "q_pos": "at.q_pos (q_idx of flex with q_idx='position') = kv_len - q_len + row: the last row "
    "stands at the last key",
    "q_idx": "at.q_idx (q_idx of flex) = row, from 0 in each request, however many keys it has",
}
_LEGEND = """\
fused rows: query rows times the query heads of one key/value head; tiles are cut from them
work item: a tile of rows over a range of keys; partial if other items have the rest of its keys
{part}: the work items that the plan gives to one worker; balance compares their costs
mask: pairs of a tile of rows and one of keys; skipped ones are not read"""


class Explained(Protocol):
    """The members of a wrapper that `explain` reads."""

    spec: AttentionSpec
    kv_format: KVFormat
    heads: Heads
    device: torch.device
    key_transform: KeyTransform

    @property
    def planned(self) -> Planned | None: ...

    @property
    def program(self) -> Program | None: ...

    @property
    def backend(self) -> Backend: ...

    @property
    def scalars(self) -> Mapping[str, int | float]: ...

    def why_roles(self) -> str | None: ...

    @property
    def target(self) -> Arch | HostTarget: ...


class Explanation:
    """Facts in order; printing shows them as a table, and `in` searches that table's text.

    Attributes:
        facts: name -> value.
        legend: what words of the table mean, shown below it.
    """

    def __init__(self, title: str, facts: Mapping[str, object], legend: str = "") -> None:
        self.title = title
        self.facts = dict(facts)
        self.legend = legend

    def __rich__(self) -> Table:
        table = Table(
            title=self.title, title_justify="left", show_header=False,
            caption=self.legend or None, caption_justify="left",
        )  # fmt: skip
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in self.facts.items():
            table.add_row(name, str(value))
        return table

    def __str__(self) -> str:
        console = Console(width=100)
        with console.capture() as captured:
            console.print(self)
        return captured.get().rstrip("\n")

    __repr__ = __str__

    def __contains__(self, text: str) -> bool:
        return text in str(self)


def explain(wrapper: Explained) -> Explanation:
    """Facts of a wrapper: the declaration, and, once it has a plan, kernel, work and memory."""
    spec, heads = wrapper.spec, wrapper.heads
    facts: dict[str, object] = {
        "back end": f"{_where(wrapper)}{_because(wrapper)}",
        "KV format": wrapper.kv_format,
        "types": f"{_types(spec)}, head_dim {spec.head_dim_qk}/{spec.head_dim_v}",
        "heads": f"{heads.num_q} query, {heads.num_kv} key/value; {heads.group_size} fused "
        "with a query row",
        "hooks": ", ".join(spec.variant.hooks) or "none: plain attention",
        **_rows(spec.variant),
        **_scalars(wrapper.scalars),
    }
    if wrapper.backend == "reference":
        facts["plan"] = "none needed: request by request"
    elif wrapper.planned is None or wrapper.program is None:
        facts["plan"] = "none yet; call plan()"
    else:
        program = wrapper.program
        facts |= (
            _kernel(program.attention)
            | _why_roles(wrapper)
            | _passes(program)
            | _keys(wrapper, wrapper.planned, program)
            | _work_if_made(wrapper.planned, spec.variant)
            | _memory(wrapper.planned)
        )
    legend = "" if wrapper.planned is None else _LEGEND.format(part=_part(wrapper.planned))
    return Explanation(f"warploom: {spec.variant.name}", facts, legend)


def _types(spec: AttentionSpec) -> str:
    if spec.kv_dtype is None:
        return spec.dtype.name
    return f"{spec.dtype.name} with {spec.kv_dtype.name} keys and values"


def _rows(variant: TracedVariant) -> dict[str, object]:
    """How the functors count query rows, if they do."""
    read = rows_are_read_as(variant)
    return {"query rows": "\n".join(_ROWS[name] for name in read)} if read else {}


def _scalars(values: Mapping[str, int | float]) -> dict[str, object]:
    """Values of scalars that the wrapper holds, whichever call set them."""
    shown = (
        f"{name} = {value if isinstance(value, int) else format(value, '.6g')}"
        for name, value in values.items()
    )
    return {"scalars": ", ".join(shown)} if values else {}


def _where(wrapper: Explained) -> str:
    device = str(wrapper.device)
    return device if wrapper.backend == wrapper.device.type else f"{wrapper.backend} on {device}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _because(wrapper: Explained) -> str:
    if wrapper.backend == "reference":
        return ": NumPy, asked for by name"
    target = wrapper.target
    if isinstance(target, Arch):
        return f": NVRTC for {target.name}"
    compiler = target.command[0] if target.command else f"none here; {target.version} before"
    return f": {compiler}, vectors of {target.vector_bytes} bytes"


def _kernel(attention: Pass) -> dict[str, object]:
    """The attention kernel, and why it was chosen."""
    kernel, choice = attention.kernel, attention.choice
    assert choice is not None  # attention kernels have a tile
    artifact, used, tile = kernel.artifact, kernel.artifact.resources, choice.tile
    on_gpu = kernel.source.language == "cuda"
    how = f", {tile.warps} warps, {tile.stages} stages" if on_gpu else ""
    facts: dict[str, object] = {
        "kernel": kernel.source.name,
        "template": tile.template if on_gpu else "cpu",
        "tile": _sizes(tile) + how,
        "why this tile": choice.reason or "given by the caller",
        **_weighed(choice),
        "built": f"{'compiled' if artifact.compiled else 'found in the cache'}"
        f" ({artifact.compile_seconds:.2f} s when compiled)",
        "source": artifact.source_path,
    }
    if used is not None:
        spills = "unknown" if used.spill_bytes is None else f"{used.spill_bytes} B"
        facts["resources"] = (
            f"{used.registers} registers, spills {spills}, local {used.local_bytes} B"
        )
    return facts


def _why_roles(wrapper: Explained) -> dict[str, object]:
    """Why a batch that could be mixed has two roles or one tile."""
    why = wrapper.why_roles()
    return {} if why is None else {"two roles": why}


def _passes(program: Program) -> dict[str, object]:
    """The passes in launch order, if there are several."""
    lines = [f"{one.kind}: {one.kernel.source.name}" for one in program.passes]
    return {"passes": "\n".join(lines)} if program.before else {}


def _sizes(tile: TileConfig) -> str:
    named = tile.of_roles or {"": tile}
    sizes = (f"{name} {own.rows} rows x {own.keys} keys".strip() for name, own in named.items())
    return ", ".join(sizes)


def _keys(wrapper: Explained, planned: Planned, program: Program) -> dict[str, object]:
    """Where keys are transformed, if they are; only the CUDA back end has more than one way."""
    if "key_transform" not in wrapper.spec.variant.hooks or wrapper.backend != "cuda":
        return {}
    rows = planned.batch.sizes.busy_rows * wrapper.heads.group_size
    return {"keys are transformed": wrapper.key_transform.explained(bool(program.before), rows)}


def _weighed(choice: TileChoice) -> dict[str, object]:
    """The predicted cost of each tile, if a cost model chose."""
    lines = [f"{us:8.3g} us  {label}" for label, us in choice.costs]
    return {"predicted cost": "\n".join(lines)} if lines else {}


def _work_if_made(planned: Planned, variant: TracedVariant) -> dict[str, object]:
    """The facts of `_work`; a plan in a CUDA graph has none before a replay has made it."""
    try:
        return _work(planned, variant)
    except NotReplayed as error:
        return {"plan": f"not made yet, by {planned.by}: {error}"}


def _work(planned: Planned, variant: TracedVariant) -> dict[str, object]:
    plan, batch = planned.plan, planned.batch
    split = _counted(len(plan.merges), "split tile")
    if isinstance(plan, ComposedPlan):
        rows = _counted(len(plan.row_merges), "row")
        split = f"{_counted(len(plan.segments), 'part')}, {rows} merged"
    on_gpu = planned.kernel.source.language == "cuda"
    part = _part(planned)
    threads = _counted(min(default_threads(), plan.problem.active_ctas), "thread")
    taken = "" if on_gpu else f", items taken one at a time by up to {threads}"
    return {
        "batch": f"{_counted(batch.num_requests, 'request')}, "
        f"{_counted(batch.sizes.total_q_rows, 'query row')}, "
        f"{_counted(int(planned.arrays.kv_lens.sum()), 'key')}, longest {batch.sizes.max_kv_len}",
        "grid": f"{_counted(plan.problem.num_ctas, part)}, {plan.busy_ctas} with work, "
        f"limit {plan.problem.active_ctas}{taken}",
        "work items": f"{len(plan.items)}, of which {int((plan.items['slot'] >= 0).sum())} "
        f"partial in {split}",
        "planned by": planned.by,
        "assigned": _assigned(plan),
        **_roles(plan, part, on_gpu),
        **_shared(plan, variant),
        "balance": _balance(plan, part),
        "mask": _classes(planned),
        **_early_rows(planned, variant),
    }


def _early_rows(planned: Planned, variant: TracedVariant) -> dict[str, object]:
    """Requests with more rows than keys: a sign that lengths are those of the previous step."""
    q_lens, kv_lens = planned.arrays.q_lens, planned.arrays.kv_lens
    early = np.flatnonzero((kv_lens > 0) & (kv_lens < q_lens))
    if "logits_mask" not in variant.hooks or not len(early):
        return {}
    first, others = int(early[0]), len(early) - 1
    more = f" (and {_counted(others, 'other')})" if others else ""
    rows, keys = int(q_lens[first]), int(kv_lens[first])
    return {
        "rows before keys": f"request {first}{more} has {_counted(rows, 'row')} and "
        f"{_counted(keys, 'key')}: the first {_counted(rows - keys, 'row')} come before every key, "
        "so that a causal mask leaves them empty. Do the lengths count this step's tokens?"
    }


def _balance(plan: Plan, part: str) -> str:
    """The largest load over the mean; only as many CTAs as there are work items count."""
    limit = plan.problem.active_ctas
    able = min(len(plan.items), limit)
    if able == 0:
        return "no work"
    longest = f"longest {part} {plan.balance * able / limit:.2f} x mean"
    return longest if able == limit else f"{longest} of {able}, as many as there are work items"


def _part(planned: Planned) -> str:
    """What the plan assigns work items to."""
    return "CTA" if planned.kernel.source.language == "cuda" else "share"


def _assigned(plan: Plan) -> str:
    if plan.problem.smaller:
        way = "longest first"
        if plan.problem.split_size is None:
            way = "by a Stream-K partition"
            if plan.problem.may_deal:
                way = f"prefills longest first where they are few or alone, else {way}"
        return f"{way}: the tile has two roles"
    return "by a Stream-K partition: few query tiles" if plan.problem.stream_k else "longest first"


def _roles(plan: Plan, part: str, on_gpu: bool) -> dict[str, object]:
    """The work of each role, if there are two, and the predicted time of both on a GPU."""
    if not plan.problem.smaller:
        return {}
    keys = "part" if isinstance(plan, ComposedPlan) else "segment"
    facts: dict[str, object] = {
        f"role {work.role.name}": f"tiles of {work.role.rows} rows x {work.role.keys} keys, "
        f"{_counted(work.segments, keys)}, {_counted(work.items, 'work item')} on "
        f"{_counted(work.ctas, part)}"
        + (f" and in {_counted(work.shared, 'list')} for whoever is done" if work.shared else "")
        for work in plan.work_of_roles()
    }
    if on_gpu:
        time = 1e6 * (plan.predicted_seconds or 0.0)
        facts["predicted time"] = f"{time:.1f} us, at the prices of an H200"
    return facts


def _shared(plan: Plan, variant: TracedVariant) -> dict[str, object]:
    """What was decided for each shared prefix, in descending order of keys x requests."""
    if not isinstance(plan, ComposedPlan):
        return {}
    choices = sorted(plan.choices, key=lambda choice: -choice.keys * choice.requests)
    lines = [str(choice) for choice in choices[:_MAX_PREFIXES]]
    if len(choices) > len(lines):
        lines.append(f"and {len(choices) - len(lines)} more")
    cause = depends_on_request(variant)
    return {"shared prefixes": "\n".join(lines) or (f"none: {cause}" if cause else "none")}


def _classes(planned: Planned) -> str:
    """How many pairs of a query tile and a key tile the planner puts into each class."""
    plan, visibility = planned.plan, planned.visibility
    segments = planned.arrays.segments
    fused = segments["num_q"].astype(np.int64) * plan.problem.group_size
    keys = segments["kv_count"].astype(np.int64)
    sizes = np.array([(role.rows, role.keys) for role in plan.problem.roles], np.int64)
    rows_of, keys_of = sizes[roles_of(segments, plan.problem.group_size, plan.problem.roles)].T
    down, across = -(-fused // rows_of), -(-keys // keys_of)
    every = int((down * across).sum())
    if not isinstance(visibility, MaskVisibility) or every == 0:
        return f"none: {_counted(every, 'tile')}, all full"
    if every > _MAX_TILES:
        return f"{every} tiles, too many to classify here"
    segment = np.repeat(np.arange(len(fused)), down * across)
    place = np.arange(every) - np.repeat(np.cumsum(down * across) - down * across, down * across)
    row = place // across[segment] * rows_of[segment]
    key = place % across[segment] * keys_of[segment]
    row_end = np.minimum(row + rows_of[segment], fused[segment])
    key_end = np.minimum(key + keys_of[segment], keys[segment])
    found = visibility.classify(segment, row, row_end, key, key_end)
    skip, partial, full = np.bincount(found, minlength=3).tolist()
    return (
        f"{_counted(every, 'tile')}: {skip} skipped, {partial} partial, {full} full (no mask code)"
    )


def _memory(planned: Planned) -> dict[str, object]:
    size = planned.size
    parts = {
        "plan": size.plan_bytes, "partial output": size.partial_o_bytes,
        "states": size.partial_state_bytes, "counters": size.arrivals_bytes + size.votes_bytes,
        "times": size.stamps_bytes,
    }  # fmt: skip
    parts["padding"] = size.total - sum(parts.values())
    sizes = ", ".join(f"{name} {size:,}" for name, size in parts.items() if size)
    return {"workspace": f"{size.total:,} B: {sizes}"}
