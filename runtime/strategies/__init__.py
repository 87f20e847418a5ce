"""The ways to plan, and where their plans lie: on the device, on the host natively, by NumPy."""
