"""Random variants and batches against a reference in torch that shares no code with warploom."""
