"""Queries and keys normalised before they meet, as in Qwen 3 and OLMo 2."""

from __future__ import annotations

import math
from typing import Any

from warploom.dsl.values.functions import mean, rsqrt
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.fields import Scalar, Tensor
from warploom.dsl.variants.variant import Variant


def _check_eps(eps: float) -> str | None:
    return None if 0 <= eps < math.inf else f"{eps} is negative or not finite"


class QKNorm(Variant):
    """x -> x / sqrt(mean(x^2) + eps) * weight, over the head dimension, for query and key vectors.

    Put it before `Rope()`: `QKNorm(...) & Rope()`.

    Args:
        q_weight: [head_dim] float32 for queries; None leaves it to be given at run time.
        k_weight: [head_dim] float32 for keys, likewise.
        eps: added to the mean square.

    Raises:
        ArgumentError: an eps that is negative or not finite, wherever it is given.
    """

    q_weight = Tensor("float32", ("lane",))
    k_weight = Tensor("float32", ("lane",))
    norm_eps = Scalar("float32", check=_check_eps)

    def __init__(self, q_weight: Any = None, k_weight: Any = None, eps: float = 1e-6) -> None:
        self.norm_eps = eps
        if q_weight is not None:
            self.q_weight = q_weight
        if k_weight is not None:
            self.k_weight = k_weight

    def query_transform(self, q: Value, at: Position) -> Value:
        return self._norm(q) * self.q_weight[at.lane]

    def key_transform(self, k: Value, at: Position) -> Value:
        return self._norm(k) * self.k_weight[at.lane]

    def _norm(self, x: Value) -> Value:
        return x * rsqrt(mean(x * x) + self.norm_eps, precise=True)
