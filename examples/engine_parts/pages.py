"""Pages of a cache, and a radix tree of the tokens whose keys and values they hold.

A page is free, or belongs to one request, or to a node of the tree. A node stands for a full page
and for all tokens up to its end, so requests that begin alike hold references to the same nodes.
Nothing is ever copied: a page that becomes full moves into the tree, and if the tree has another
one of the same tokens, that one is used from then on. Nodes without references stay until their
pages are needed (RadixAttention, Zheng et al. 2024, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class Node:
    """A full page.

    Attributes:
        parent: the page before; None for the root, which has no page.
        tokens: of this page.
        page: its number.
        references: requests that read it.
        children: pages that continue it, by their tokens.
    """

    parent: Node | None
    tokens: tuple[int, ...]
    page: int
    references: int = 0
    children: dict[tuple[int, ...], Node] = field(default_factory=dict, repr=False)


class PageTree:
    """All pages of a cache.

    Attributes:
        num_pages, page_size: pages, and tokens of each.
        idle: nodes without references, least recently used first. A request that reads a node reads
            all nodes above it and lets go of them last, so a child always comes before its parent,
            and the first idle node is a leaf.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.root = Node(None, (), -1)
        self.idle: dict[Node, None] = {}
        self._free = list(range(num_pages - 1, -1, -1))

    def pages_for(self, tokens: int) -> int:
        """Pages that so many tokens lie in, the last one perhaps not full."""
        return -(-tokens // self.page_size)

    @property
    def free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Pages that are kept for requests to come."""
        return len(self.idle)

    @property
    def available(self) -> int:
        """Pages that `take` can give."""
        return self.free + self.cached

    @property
    def used(self) -> int:
        """Pages of requests."""
        return self.num_pages - self.available

    def match(self, tokens: list[int]) -> list[Node]:
        """References to the longest path of full pages that holds the first of these tokens."""
        node, path, size = self.root, [], self.page_size
        for end in range(size, len(tokens) + 1, size):
            found = node.children.get(tuple(tokens[end - size : end]))
            if found is None:
                break
            self._refer(node := found)
            path.append(node)
        return path

    def take(self) -> int | None:
        """A page to write to: a free one or the least recently used; None if all are in use."""
        if self._free:
            return self._free.pop()
        if not self.idle:
            return None
        node = next(iter(self.idle))
        del self.idle[node]
        assert node.parent is not None and not node.children and not node.references
        del node.parent.children[node.tokens]
        return node.page

    def add(self, parent: Node, tokens: tuple[int, ...], page: int) -> Node:
        """A reference to the node for a page that has become full; its page may be another."""
        node = parent.children.get(tokens)
        if node is None:
            node = parent.children[tokens] = Node(parent, tokens, page)
        else:
            self._free.append(page)
        self._refer(node)
        return node

    def release(self, path: list[Node], pages: list[int]) -> None:
        """Give back what a request holds: its references from the root on, and its own pages."""
        self._free += pages
        for node in reversed(path):
            node.references -= 1
            if not node.references:
                self.idle[node] = None

    def _refer(self, node: Node) -> None:
        node.references += 1
        self.idle.pop(node, None)
