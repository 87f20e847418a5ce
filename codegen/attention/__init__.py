"""The attention kernel: its templates, with what was measured of their tiles."""
