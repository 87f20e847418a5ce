"""How far the fast versions of functions may be from exact, on any back end.

Tile analysis widens what it knows by this much (`Box`), and tests of both back ends hold their
functions to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np


class Error(NamedTuple):
    """At most `relative` of the exact value plus `absolute`."""

    relative: float
    absolute: float

    def allows(self, found: Any, exact: Any) -> bool:
        """Whether all numbers found are that near."""
        return bool(np.all(np.abs(found - exact) <= self.relative * np.abs(exact) + self.absolute))


_FLUSHED = 1.2e-38  # results below the smallest normal number become zero
_NONE = Error(0.0, 0.0)

# An instruction of the GPU gives tanh to 2^-10.987 of its value. What is below the smallest normal
# number counts as zero; the square root of that is the absolute error of `sqrt`.
FAST_ERROR: Mapping[str, Error] = {
    "exp": Error(1e-4, _FLUSHED),
    "exp2": Error(1e-4, _FLUSHED),
    "log": Error(1e-5, 1e-5),
    "log2": Error(1e-5, 1e-5),
    "sqrt": Error(1e-5, 1.1e-19),
    "tanh": Error(6e-4, _FLUSHED),
    "sigmoid": Error(1e-5, 1e-5),
    "erf": Error(1e-5, _FLUSHED),
    "log1p": Error(1e-5, _FLUSHED),
    "expm1": Error(1e-5, _FLUSHED),
    "atan": Error(1e-5, _FLUSHED),
    "sinh": Error(1e-5, _FLUSHED),
    "floor": _NONE,
    "ceil": _NONE,
}
