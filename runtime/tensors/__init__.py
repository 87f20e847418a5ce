"""Tensors of any kind: how they are taken, told apart and copied."""
