"""Random batches computed by wrappers and by the oracle."""
