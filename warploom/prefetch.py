"""Weights and keys into L2 while a collective runs: by hand, by a graph pass, and as a model.

After PRESERVE (Yüzgüler et al., 2025). `docs/prefetch.md` begins with the pass. Keys are prefetched
by the wrapper that will read them, `AttentionWrapper.prefetch`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from warploom.serving.prefetch.graph_pass import Insertion as Insertion
    from warploom.serving.prefetch.graph_pass import inductor_pass as inductor_pass
    from warploom.serving.prefetch.graph_pass import prefetch_pass as prefetch_pass
    from warploom.serving.prefetch.tensors import beside as beside
    from warploom.serving.prefetch.tensors import prefetch as prefetch

_HOME = {
    "beside": "tensors",
    "prefetch": "tensors",
    "Insertion": "graph_pass",
    "inductor_pass": "graph_pass",
    "prefetch_pass": "graph_pass",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(f"warploom.serving.prefetch.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_HOME)
