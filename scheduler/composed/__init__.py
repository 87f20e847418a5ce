"""Plans of the composed format: shared prefixes, the parts that are read of them, and checks."""
