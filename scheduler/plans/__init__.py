"""Plans as arrays and as memory: sizes, reading back, and what every plan must satisfy."""
