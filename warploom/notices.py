"""Warnings about what works, but costs more than it need; errors are in `warploom.errors`."""

from __future__ import annotations


class CopyWarning(UserWarning):
    """A tensor is copied at each call, since kernels cannot reach it where it lies."""
