"""The paper's model of performance and its design space, under one name (PRESERVE, section 5)."""

from __future__ import annotations

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
from warploom.serving.prefetch.exploration import speedup_by_l2_bandwidth as speedup_by_l2_bandwidth
from warploom.serving.prefetch.exploration import speedup_by_link as speedup_by_link
from warploom.serving.prefetch.exploration import speedups as speedups
from warploom.serving.prefetch.exploration import with_l2 as with_l2
from warploom.serving.prefetch.performance import Prediction as Prediction
from warploom.serving.prefetch.performance import Serving as Serving
from warploom.serving.prefetch.performance import best_bytes as best_bytes
from warploom.serving.prefetch.performance import collective_seconds as collective_seconds
from warploom.serving.prefetch.performance import decode_seconds as decode_seconds
from warploom.serving.prefetch.performance import end_to_end_seconds as end_to_end_seconds
from warploom.serving.prefetch.performance import predict as predict
from warploom.serving.prefetch.performance import section_seconds as section_seconds
from warploom.serving.prefetch.predictions import predictions as predictions
