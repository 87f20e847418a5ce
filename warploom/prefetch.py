"""Weights and keys into L2 while a collective runs: by hand, by a graph pass, and as a model.

After PRESERVE (Yüzgüler et al., 2025). `docs/prefetch.md` begins with the pass. Keys are prefetched
by the wrapper that will read them, `AttentionWrapper.prefetch`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from warploom.lazy import lazy_names

if TYPE_CHECKING:
    from warploom.serving.prefetch import l2_model as l2_model
    from warploom.serving.prefetch.accelerators import B200 as B200
    from warploom.serving.prefetch.accelerators import H100 as H100
    from warploom.serving.prefetch.accelerators import H200 as H200
    from warploom.serving.prefetch.accelerators import PAPER as PAPER
    from warploom.serving.prefetch.accelerators import Accelerator as Accelerator
    from warploom.serving.prefetch.accelerators import accelerator_named as accelerator_named
    from warploom.serving.prefetch.comparisons import Comparison as Comparison
    from warploom.serving.prefetch.comparisons import comparisons as comparisons
    from warploom.serving.prefetch.exploration import L2_MEGABYTES as L2_MEGABYTES
    from warploom.serving.prefetch.exploration import SERVINGS as SERVINGS
    from warploom.serving.prefetch.exploration import Design as Design
    from warploom.serving.prefetch.exploration import ScaleOut as ScaleOut
    from warploom.serving.prefetch.exploration import densities as densities
    from warploom.serving.prefetch.exploration import explore as explore
    from warploom.serving.prefetch.exploration import latencies as latencies
    from warploom.serving.prefetch.exploration import scale_out as scale_out
    from warploom.serving.prefetch.exploration import (
        speedup_by_l2_bandwidth as speedup_by_l2_bandwidth,
    )
    from warploom.serving.prefetch.exploration import speedup_by_link as speedup_by_link
    from warploom.serving.prefetch.exploration import speedups as speedups
    from warploom.serving.prefetch.exploration import with_l2 as with_l2
    from warploom.serving.prefetch.graph_pass import Insertion as Insertion
    from warploom.serving.prefetch.graph_pass import inductor_pass as inductor_pass
    from warploom.serving.prefetch.graph_pass import prefetch_pass as prefetch_pass
    from warploom.serving.prefetch.model_shapes import MODELS as MODELS
    from warploom.serving.prefetch.model_shapes import ModelShape as ModelShape
    from warploom.serving.prefetch.overlap import Overlap as Overlap
    from warploom.serving.prefetch.overlap import Timed as Timed
    from warploom.serving.prefetch.performance import Prediction as Prediction
    from warploom.serving.prefetch.performance import Serving as Serving
    from warploom.serving.prefetch.performance import best_bytes as best_bytes
    from warploom.serving.prefetch.performance import decode_seconds as decode_seconds
    from warploom.serving.prefetch.performance import end_to_end_seconds as end_to_end_seconds
    from warploom.serving.prefetch.performance import predict as predict
    from warploom.serving.prefetch.predictions import predictions as predictions
    from warploom.serving.prefetch.recorded import H100_NCCL_OVERLAP as H100_NCCL_OVERLAP
    from warploom.serving.prefetch.recorded import H100_OVERLAP as H100_OVERLAP
    from warploom.serving.prefetch.recorded import H200_OVERLAP as H200_OVERLAP
    from warploom.serving.prefetch.safe_budget import Collective as Collective
    from warploom.serving.prefetch.safe_budget import Ring as Ring
    from warploom.serving.prefetch.safe_budget import SafeBudget as SafeBudget
    from warploom.serving.prefetch.tensors import beside as beside
    from warploom.serving.prefetch.tensors import beside_pages as beside_pages
    from warploom.serving.prefetch.tensors import prefetch as prefetch

_HOME = {
    "l2_model": "",  # a module
    "beside": "tensors",
    "beside_pages": "tensors",
    "prefetch": "tensors",
    "Insertion": "graph_pass",
    "inductor_pass": "graph_pass",
    "prefetch_pass": "graph_pass",
    "Accelerator": "accelerators",
    "PAPER": "accelerators",
    "H100": "accelerators",
    "H200": "accelerators",
    "B200": "accelerators",
    "accelerator_named": "accelerators",
    "ModelShape": "model_shapes",
    "MODELS": "model_shapes",
    "Serving": "performance",
    "Prediction": "performance",
    "predict": "performance",
    "best_bytes": "performance",
    "decode_seconds": "performance",
    "end_to_end_seconds": "performance",
    "Overlap": "overlap",
    "Timed": "overlap",
    "H100_NCCL_OVERLAP": "recorded",
    "H100_OVERLAP": "recorded",
    "H200_OVERLAP": "recorded",
    "Collective": "safe_budget",
    "Ring": "safe_budget",
    "SafeBudget": "safe_budget",
    "L2_MEGABYTES": "exploration",
    "Comparison": "comparisons",
    "comparisons": "comparisons",
    "latencies": "exploration",
    "densities": "exploration",
    "SERVINGS": "exploration",
    "Design": "exploration",
    "ScaleOut": "exploration",
    "explore": "exploration",
    "scale_out": "exploration",
    "speedup_by_l2_bandwidth": "exploration",
    "speedup_by_link": "exploration",
    "speedups": "exploration",
    "with_l2": "exploration",
    "predictions": "predictions",
}

if not TYPE_CHECKING:  # there the imports above say it
    __all__ = sorted(_HOME)

__getattr__, __dir__ = lazy_names(__name__, "warploom.serving.prefetch", _HOME)
