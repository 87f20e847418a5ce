"""Graphs made from graphs: typed construction, folding, intervals and extents."""
