"""Generative recommendation: beams over a shared prefix, whose tokens are those of valid items."""
