"""Variants that ship with warploom."""
