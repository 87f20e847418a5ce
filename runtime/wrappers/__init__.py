"""What users hold: wrappers that plan once and run many times, and their declarations."""
