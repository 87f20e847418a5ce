"""What torch and NumPy call a function, as users write it."""

from __future__ import annotations

from typing import Any

_SPACES = ("special", "linalg", "fft")  # of torch, whose functions are named torch.special_i0


def torch_name(function: Any) -> str:
    """Such as torch.special.i0."""
    space, _, name = function.__name__.partition("_")
    return f"torch.{space}.{name}" if space in _SPACES and name else f"torch.{function.__name__}"


def numpy_name(function: Any) -> str:
    """Such as np.linalg.norm."""
    spaces = (getattr(function, "__module__", None) or "numpy").split(".")[1:]
    return ".".join(["np", *(x for x in spaces if x in _SPACES), function.__name__])
