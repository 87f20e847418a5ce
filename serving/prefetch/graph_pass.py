"""PRESERVE's algorithm on FX graphs: prefetches beside collectives of what is read behind them.

Algorithm 1 of the paper: from each collective on, the products and attentions that depend on it, up
to the next collective, have their weights and keys prefetched while it runs, under a limit of what
L2 holds. Three things differ. Nodes are visited in the order of the graph, which is that of use,
where the paper goes breadth first. What passes the limit is cut off there, where the paper leaves
it out: half of a weight that L2 cannot hold is still worth its time. And what an earlier collective
has prefetched and nobody has read yet counts against the limit, and is not fetched again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node

from warploom.errors import ArgumentError
from warploom.logs import log
from warploom.prefetch_errors import BudgetTooSmall
from warploom.runtime.launching.prefetch import LINE, SMS, checked_budget
from warploom.serving.prefetch.checks import checked_keep
from warploom.serving.prefetch.graph_nodes import (
    RUN,
    dense_size,
    is_launch,
    is_reader,
    is_stored,
    linear_of,
    moved_bytes,
    name_of,
    size_of,
    source_of,
    tensor_of,
)
from warploom.serving.prefetch.operators import join_prefetch_op, prefetch_op, prefetch_pages_op
from warploom.serving.prefetch.safe_budget import Collective, SafeBudget

_told: set[str] = set()  # collectives whose absence was logged
_OURS = ("warploom::prefetch", "warploom::prefetch_pages", "warploom::join_prefetch")


@dataclass(frozen=True)
class Insertion:
    """What is prefetched beside one collective.

    Attributes:
        collective: name of its node.
        tensors: names of placeholders, attributes and views, in order of use.
        bytes: of them, as far as they fit the limit.
        sms: CTAs that ask.
        pages: runs of wrappers whose pages are prefetched.
    """

    collective: str
    tensors: tuple[str, ...]
    bytes: int
    sms: int
    pages: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Read:
    """Memory that a node reads.

    Attributes:
        key: its node, or the path of an attribute.
        bytes: that are prefetched.
        reader: the node.
    """

    key: Node | str
    bytes: int
    reader: Node


_Step: TypeAlias = "list[_Read] | Node"  # tensors of one prefetch, or a run whose pages are


@dataclass(frozen=True)
class _Beside:
    """What is prefetched beside a collective.

    Attributes:
        steps: in the order of use.
        left: bytes that weights leave for pages.
        sms: CTAs that ask.
    """

    steps: list[_Step]
    left: int
    sms: int

    def insertion(self, collective: Node) -> Insertion:
        reads = [read for step in self.steps if isinstance(step, list) for read in step]
        names = tuple(key if isinstance(key, str) else key.name for key in (x.key for x in reads))
        pages = tuple(step.name for step in self.steps if isinstance(step, Node))
        size = sum(read.bytes for read in reads)
        return Insertion(collective.name, names, size, self.sms, pages)


@dataclass
class _Pass:
    """One graph, with what is on its way to L2 at the collective in hand."""

    graph: Graph
    module: GraphModule | None
    budget: int | SafeBudget
    sms: int
    keep: bool | None
    collectives: frozenset[str]
    readers: frozenset[str]
    flying: list[_Read] = field(default_factory=list)

    def run(self) -> list[Insertion]:
        nodes = list(self.graph.nodes)
        if any(name_of(node) in _OURS for node in nodes):
            return []  # the pass was here before
        place = {node: i for i, node in enumerate(nodes)}
        found = []
        for i, node in enumerate(nodes):
            if self._communicates(node) and node.all_input_nodes and not _has_several(node):
                self.flying = [read for read in self.flying if place[read.reader] > i]
                beside = self._beside(node, nodes[i + 1 :])
                if beside.steps:
                    self._insert(node, beside)
                    found.append(beside.insertion(node))
        return found

    def _communicates(self, node: Node) -> bool:
        return is_launch(node) or name_of(node) in self.collectives

    def _readers_behind(self, collective: Node, following: Sequence[Node]) -> Iterator[Node]:
        """Nodes that read memory and wait for a collective, up to the next one that does."""
        reached = {collective}
        for node in following:
            if reached.isdisjoint(node.all_input_nodes):
                continue
            if self._communicates(node):
                return
            reached.add(node)
            if is_reader(node, self.readers) or name_of(node) == RUN or self._linear(node):
                yield node

    def _linear(self, node: Node) -> torch.nn.Linear | None:
        return linear_of(node, self.module)

    def _beside(self, collective: Node, following: Sequence[Node]) -> _Beside:
        """What to prefetch, in the order of use, within the limit."""
        wanted = list(self._wanted(collective, following))
        left, sms = self._limit(collective, wanted)
        steps: list[_Step] = []
        for one in wanted:
            if isinstance(one, Node):
                steps.append(one)
                continue
            taken = min(one.bytes, left)
            if taken < LINE:
                continue
            read = replace(one, bytes=taken)
            self.flying.append(read)
            left -= taken
            if steps and isinstance(steps[-1], list):
                steps[-1].append(read)
            else:
                steps.append([read])
        if left < LINE:
            steps = [step for step in steps if isinstance(step, list)]
        return _Beside(steps, left, sms)

    def _wanted(self, collective: Node, following: Sequence[Node]) -> Iterator[_Read | Node]:
        """All memory that is read behind a collective and not on its way yet, and runs."""
        known = {read.key for read in self.flying}
        for reader in self._readers_behind(collective, following):
            if name_of(reader) == RUN:
                given = _arguments(reader)
                if is_stored(given["k"]) and is_stored(given["v"]):
                    yield reader
                continue
            for key, size in self._memory(reader, collective):
                if key not in known:
                    known.add(key)
                    yield _Read(key, size, reader)

    def _limit(self, collective: Node, wanted: Sequence[_Read | Node]) -> tuple[int, int]:
        """Bytes that may be prefetched beside a collective, and by how many CTAs.

        How many bytes pages have is known when they are planned. A budget that is chosen counts
        none of them for the question whether it pays, and then leaves room for them.
        """
        flying = sum(read.bytes for read in self.flying)
        if not isinstance(self.budget, SafeBudget):
            return self.budget - flying, self.sms
        size = sum(one.bytes for one in wanted if isinstance(one, _Read))
        what = Collective(name_of(collective), moved_bytes(collective, self.module))
        most, sms = self.budget.best(size, what, flying)
        if most and any(isinstance(one, Node) for one in wanted):
            return self.budget.best(size + self.budget.overlap.kept, what, flying)
        return most, sms

    def _memory(self, reader: Node, collective: Node) -> Iterator[tuple[Node | str, int]]:
        """Memory that a node reads and that was there before the graph ran, and its bytes.

        It is on the collective's device, where that is known.
        """
        layer = self._linear(reader)
        if layer is not None:
            size = dense_size(layer.weight)
            if size is not None:
                yield f"{reader.target}.weight", size
            return
        made = tensor_of(collective, self.module)
        for node in reader.all_input_nodes:
            source = source_of(node)
            device = None if made is None else made.device
            size = size_of(source, self.module, device) if is_stored(source) else None
            if size is not None:
                yield str(source.target) if source.op == "get_attr" else source, size

    def _insert(self, collective: Node, beside: _Beside) -> None:
        """Put the operators where they run beside the collective.

        One that launches its work elsewhere has them behind it; one that computes on the current
        stream has them before it, on the side stream.
        """
        aside = not is_launch(collective)
        after = collective.all_input_nodes[0] if aside else collective
        runs = sum(isinstance(step, Node) for step in beside.steps)
        with self.graph.inserting_before(collective if aside else collective.next):
            for step in beside.steps:
                if isinstance(step, Node):
                    most = beside.left // runs
                    self._prefetch_pages(after, step, most, beside.sms, aside)
                else:
                    tensors = [self._lifted(read.key) for read in step]
                    most = sum(read.bytes for read in step)
                    arguments = after, tensors, most, beside.sms, aside, self.keep
                    self._call(prefetch_op, arguments)
        if aside:
            with self.graph.inserting_after(collective):
                self._call(join_prefetch_op, (collective,))

    def _prefetch_pages(self, after: Node, run: Node, most: int, sms: int, aside: bool) -> None:
        given = _arguments(run)
        k, v = (self._lifted(given[name]) for name in ("k", "v"))
        self._call(prefetch_pages_op, (after, k, v, given["handle"], most, sms, aside))

    def _call(self, operator: Any, arguments: tuple[Any, ...]) -> None:
        node = self.graph.call_function(operator._opoverload, arguments)
        node.meta["val"] = None

    def _lifted(self, key: Node | str) -> Node:
        """The memory as a node that comes before where it is needed."""
        if isinstance(key, str) or key.op == "get_attr":
            return self.graph.get_attr(key if isinstance(key, str) else str(key.target))
        if key.op == "placeholder":
            return key
        return self.graph.node_copy(key, self._lifted)


def _has_several(collective: Node) -> bool:
    """Whether it makes a list of tensors, of which none stands for the whole."""
    return "coalesced" in name_of(collective)


def _arguments(run: Node) -> dict[str, Any]:
    """Arguments of an operator's node by their names."""
    target = run.target
    assert isinstance(target, torch._ops.OpOverload)
    names = [argument.name for argument in target._schema.arguments]
    return {**dict(zip(names, run.args, strict=False)), **run.kwargs}


def _names(argument: str, given: Iterable[str]) -> frozenset[str]:
    """Names of operators; raises ArgumentError for what is none."""
    several = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    for name in several:
        if not isinstance(name, str) or "::" not in name:
            reason = f"{name!r} names no operator; expected names as ['vllm::all_reduce']"
            raise ArgumentError(name=argument, reason=reason)
    return frozenset(several)


def _tell_absent(graph: Graph, collectives: frozenset[str]) -> None:
    """Log names that no node has, since a misspelt one would insert nothing and say nothing."""
    found = {name_of(node) for node in graph.nodes} - {""}
    for name in sorted(collectives - found - _told):
        _told.add(name)
        log.warning("no node calls the collective %s; found: %s", name, ", ".join(sorted(found)))


def prefetch_pass(
    graph: Graph | GraphModule,
    max_bytes: int | SafeBudget,
    *,
    sms: int | None = None,
    keep: bool | None = None,
    collectives: Iterable[str] = (),
    readers: Iterable[str] = (),
) -> list[Insertion]:
    """Insert prefetches into a graph, beside each collective those of what is read behind it.

    For inference: results never change, since a prefetch has none, but torch counts a write to what
    the collective makes, and a backward pass would refuse that. Collectives of torch
    (`_c10d_functional`) have them between launch and wait. A model that has none stays as it is,
    and so does a graph that the pass has seen. Weights are placeholders and attributes that
    products and attention read, whole or in views; sizes come from what a compiler has noted
    (`meta["val"]`), or from the module. Runs of a wrapper (`warploom::run`) have the pages of their
    plan prefetched, with what weights leave.

    Args:
        graph: an FX graph, or a module of one, which is compiled again.
        max_bytes: most that is on its way at any time; or what chooses it for each collective, and
            so leaves out prefetches that might lose.
        sms: CTAs of a prefetch. None: 8, or those that are chosen with the bytes.
        keep: of `prefetch`; None lets it see, when it runs, what L2 the device has.
        collectives: operators that communicate on the current stream, as "vllm::all_reduce": their
            prefetches run on the side stream.
        readers: further operators that read weights.

    Returns:
        What was inserted, in the order of the graph.

    Raises:
        BadBudget, BudgetTooSmall: `max_bytes` is no number of bytes, or below a line of 128.
        ArgumentError: no FX graph, a name without "::", or a duration that is none.

    Logs:
        a warning, once for a name, where the graph has none of `collectives`.
    """
    budget: int | SafeBudget
    if isinstance(max_bytes, SafeBudget):
        budget = max_bytes.with_sms(sms)
    else:
        budget = checked_budget(max_bytes)
        if budget < LINE:
            raise BudgetTooSmall(got=budget, what="a line of L2", needed=LINE)
    if not isinstance(graph, (Graph, GraphModule)):
        found_class = type(graph).__name__
        reason = f"is a {found_class}; give an FX graph: torch.fx.symbolic_trace(module)"
        raise ArgumentError(name="graph", reason=reason)
    names = _names("collectives", collectives), _names("readers", readers)
    module = graph if isinstance(graph, GraphModule) else graph.owning_module
    inner = graph.graph if isinstance(graph, GraphModule) else graph
    _tell_absent(inner, names[0])
    how = SMS if sms is None else sms, checked_keep(keep)
    found = _Pass(inner, module, budget, *how, *names).run()
    if found:
        inner.lint()
        if isinstance(graph, GraphModule):
            graph.recompile()
    log.debug("prefetches beside %d collectives: %s", len(found), found)
    return found


def inductor_pass(
    max_bytes: int | SafeBudget,
    *,
    sms: int | None = None,
    keep: bool | None = None,
    collectives: Iterable[str] = (),
    readers: Iterable[str] = (),
) -> Any:
    """`prefetch_pass` for Inductor, after its own passes:

        torch._inductor.config.post_grad_custom_post_pass = inductor_pass(16_000_000)

    Arguments are those of `prefetch_pass`. Inductor's cache knows them, and keeps nothing where a
    SafeBudget's durations are a function other than a Ring. Its attribute `inserted` has what was
    inserted into each graph.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass

    options: dict[str, Any] = {
        "sms": sms,
        "keep": checked_keep(keep),
        "collectives": tuple(collectives),
        "readers": tuple(readers),
    }

    class InductorPass(CustomGraphPass):
        def __init__(self) -> None:
            self.inserted: list[list[Insertion]] = []

        def __call__(self, graph: Graph) -> None:
            self.inserted.append(prefetch_pass(graph, max_bytes, **options))

        def uuid(self) -> str | None:
            if isinstance(max_bytes, SafeBudget) and not max_bytes.is_known:
                return None
            text = f"warploom.prefetch {max_bytes} {sorted(options.items())}"
            return hashlib.sha256(text.encode()).hexdigest()

    return InductorPass()
