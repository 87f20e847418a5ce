"""What generated variants record, and in which tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random

from fuzz.grammar import BOOL, FLOAT, INT, Field, Grammar, Node, number

DTYPES = ("float32", "float32", "float16", "bfloat16")
ROWS = (("batch", "q_idx"), ("batch", "q_pos"), ("batch", "q_row"), ("batch", "q_idx", "q_row"))
OF_COLUMNS = ("batch", "kv_len", "kv_head", "kv_pos", "kv_pos")
OF_ROWS = ("batch", "q_len", "q_pos", "q_idx", "q_head", "q_row")


@dataclass(frozen=True)
class Output:
    """A declared `wl.Output`: the `data` of the node that records in it."""

    name: str
    dtype: str
    roles: tuple[str, ...]


class Recorders:
    """Puts records into the tree of a `logits_transform`.

    Args:
        random: source of all decisions.
        positions: names of `at` that the hook may read.
        fields: inputs that were declared so far; more may be added.
        dense: rows of dense tensors count within their requests, so that "batch" tells them apart.
    """

    def __init__(
        self, random: Random, positions: tuple[str, ...], fields: list[Field], dense: bool
    ) -> None:
        self.random, self.positions, self.fields, self.dense = random, positions, fields, dense

    def put(self, tree: Node) -> Node:
        """The tree with one record or two, of what it is, is given, holds, or of something else."""
        ways = (self._result, self._scores, self._masked, self._inside, self._columns, self._rows)
        for n in range(self.random.choice((1, 1, 2))):
            way: Callable[[Output, Node], Node] = self.random.choice(ways)
            tree = way(self._output(n), tree)
        return tree

    def _output(self, n: int) -> Output:
        rows = self.random.choice(ROWS if self.dense else (*ROWS, ("q_row",), ("q_row",)))
        roles = [*rows, "q_head", "kv_pos"]
        self.random.shuffle(roles)
        return Output(f"seen{n}", self.random.choice(DTYPES), tuple(roles))

    def _result(self, output: Output, tree: Node) -> Node:
        return Node("record", tree.kind, (tree,), output)

    def _scores(self, output: Output, tree: Node) -> Node:
        return apart(output, Node("value", FLOAT, (), "logits"), tree)

    def _masked(self, output: Output, tree: Node) -> Node:
        condition = Grammar(self.random, self.positions, self.fields, None).fluent(BOOL, 2)
        pair = (condition, Node("value", FLOAT, (), "logits"), number(-1.5))
        return apart(output, Node("where", FLOAT, pair), tree)

    def _inside(self, output: Output, tree: Node) -> Node:
        path, found = self.random.choice(list(numbers_in(tree)))
        return replaced(tree, path, Node("record", found.kind, (found,), output))

    def _columns(self, output: Output, tree: Node) -> Node:
        return self._of(OF_COLUMNS, output, tree)

    def _rows(self, output: Output, tree: Node) -> Node:
        return self._of(OF_ROWS, output, tree)

    def _of(self, positions: tuple[str, ...], output: Output, tree: Node) -> Node:
        grammar = Grammar(self.random, positions, self.fields, None)
        return apart(output, grammar.fluent(self.random.choice((INT, FLOAT)), 2), tree)


def apart(output: Output, recorded: Node, tree: Node) -> Node:
    """The tree, with a record of what does not reach its result."""
    record = Node("record", recorded.kind, (recorded,), output)
    return Node("then", tree.kind, (record, tree))


def numbers_in(tree: Node, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Node]]:
    """All nodes that are neither truths nor literals, each with its way from the top."""
    if tree.kind != BOOL and not tree.is_number:
        yield path, tree
    for n, arg in enumerate(tree.args):
        yield from numbers_in(arg, (*path, n))


def replaced(tree: Node, path: tuple[int, ...], by: Node) -> Node:
    if not path:
        return by
    first, *rest = path
    args = list(tree.args)
    args[first] = replaced(args[first], tuple(rest), by)
    return replace(tree, args=tuple(args))
