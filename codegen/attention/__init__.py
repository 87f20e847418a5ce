"""The attention kernel: its templates, their tiles, what those cost, and which a batch gets."""
