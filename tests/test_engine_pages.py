"""The pages of the example engine against a reading of what they mean, step by step at random."""

from __future__ import annotations

import sys
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from engine_parts.pages import Node, PageTree

PAGES, SIZE = 6, 2
TOKENS = st.lists(st.integers(0, 1), min_size=SIZE, max_size=4 * SIZE)
Prefix = tuple[int, ...]


class Reader:
    """A request as the tree sees it: a path of shared pages, and pages of its own behind it."""

    def __init__(self, tokens: list[int], path: list[Node]) -> None:
        self.tokens, self.path, self.own = tokens, path, list[int]()

    def prefix(self, pages: int) -> Prefix:
        return tuple(self.tokens[: pages * SIZE])

    @property
    def prefixes(self) -> list[Prefix]:
        return [self.prefix(number + 1) for number in range(len(self.path))]


class Pages(RuleBasedStateMachine):
    """The reading: which prefix lies in which page, and when its last reader left it."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = PageTree(PAGES, SIZE)
        self.readers: list[Reader] = []
        self.page_of: dict[Prefix, int] = {}
        self.left_at: dict[Prefix, tuple[int, int]] = {}  # the deeper of one path left first
        self.time = 0

    def is_read(self, prefix: Prefix) -> bool:
        return any(prefix in reader.prefixes for reader in self.readers)

    @rule(tokens=TOKENS)
    def match(self, tokens: list[int]) -> None:
        reader = Reader(tokens, self.tree.match(tokens))
        known = 0
        while (known + 1) * SIZE <= len(tokens) and reader.prefix(known + 1) in self.page_of:
            known += 1
        expected = [self.page_of[reader.prefix(number + 1)] for number in range(known)]
        assert [node.page for node in reader.path] == expected
        self.readers.append(reader)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from(self.readers))
        free = self.tree.free
        unread = [prefix for prefix in self.page_of if not self.is_read(prefix)]
        page = self.tree.take()
        if page is None:
            assert not free and not unread
            return
        if not free:  # the one that was left first, and nothing that continues it is kept
            first = min(unread, key=lambda prefix: self.left_at[prefix])
            assert page == self.page_of.pop(first)
            assert not [other for other in self.page_of if other[: len(first)] == first]
        reader.own.append(page)

    @precondition(lambda self: any(self.can_fill(reader) for reader in self.readers))
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from([r for r in self.readers if self.can_fill(r)]))
        parent = reader.path[-1] if reader.path else self.tree.root
        begin = len(reader.path) * SIZE
        page = reader.own.pop(0)
        node = self.tree.add(parent, tuple(reader.tokens[begin : begin + SIZE]), page)
        assert node.page == self.page_of.setdefault(reader.prefix(len(reader.path) + 1), page)
        reader.path.append(node)

    def can_fill(self, reader: Reader) -> bool:
        return bool(reader.own) and (len(reader.path) + 1) * SIZE <= len(reader.tokens)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from(self.readers))
        self.readers.remove(reader)
        self.tree.release(reader.path, reader.own)
        self.time += 1
        for prefix in reader.prefixes:
            self.left_at[prefix] = (self.time, -len(prefix))

    @invariant()
    def every_page_has_one_place(self) -> None:
        own = [page for reader in self.readers for page in reader.own]
        places = self.tree._free + list(self.page_of.values()) + own
        assert sorted(places) == list(range(PAGES))
        unread = sum(not self.is_read(prefix) for prefix in self.page_of)
        assert (self.tree.cached, self.tree.used) == (unread, PAGES - self.tree.free - unread)

    @invariant()
    def references_are_readers(self) -> None:
        found = {}
        nodes = [(child, (), self.tree.root) for child in self.tree.root.children.values()]
        while nodes:
            node, before, parent = nodes.pop()
            prefix = before + node.tokens
            assert node.parent is parent
            assert node.references == sum(prefix in r.prefixes for r in self.readers)
            found[prefix] = node.page
            nodes += [(child, prefix, node) for child in node.children.values()]
        assert found == self.page_of

    def teardown(self) -> None:
        for reader in self.readers:
            self.tree.release(reader.path, reader.own)
        assert self.tree.available == PAGES


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
