"""Compiled kernels on disk: entries, keys, trust and upkeep."""
