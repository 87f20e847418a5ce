"""Partitions of work among CTAs: Stream-K lines, longest first, or cuts at fixed multiples."""
