"""One device: loading, launching, memory that stays, streams and graphs."""
