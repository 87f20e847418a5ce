"""Kernels carried from one machine to another."""
