"""What functors compute with: symbols while they are traced, NumPy arrays in the oracle."""
