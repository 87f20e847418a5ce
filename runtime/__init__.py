"""Devices, tensors, launches and the wrappers that users hold."""
