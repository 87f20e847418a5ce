"""What a pass over an FX graph has found to prefetch beside a collective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch.fx import Node


@dataclass(frozen=True)
class Read:
    """Memory that a node reads.

    Attributes:
        key: its node, or the path of an attribute.
        bytes: that are prefetched.
        reader: the node.
        columns: it reads rows side by side, so that their first columns are read first.
    """

    key: Node | str
    bytes: int
    reader: Node
    columns: bool


Step: TypeAlias = "list[Read] | Node"  # tensors of one prefetch, or a run whose pages are


@dataclass(frozen=True)
class Beside:
    """What is prefetched beside a collective.

    Attributes:
        steps: in the order of use.
        left: bytes that weights leave for pages.
        sms: CTAs that ask.
    """

    steps: list[Step]
    left: int
    sms: int
