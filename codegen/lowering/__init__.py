"""Traced functors in, C++ text out."""
