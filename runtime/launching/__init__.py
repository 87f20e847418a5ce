"""Kernels of a specification, and the launch of one run."""
