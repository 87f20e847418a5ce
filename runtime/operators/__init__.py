"""Torch's custom operators, and what its compiler calls while it traces."""
