"""The attention kernel: its templates, and measurements of their tiles."""
