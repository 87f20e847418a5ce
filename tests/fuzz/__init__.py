"""Random variants, batches and formats against a reference in torch that shares no code with warploom."""
