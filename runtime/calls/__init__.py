"""Functions that users call directly, without a wrapper, or in place of another library."""
