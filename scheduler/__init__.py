"""Batch sizes in, plan out; NumPy only."""
