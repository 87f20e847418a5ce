"""Weights and keys into L2 while a collective runs (PRESERVE), by hand, by a pass, and modelled."""
