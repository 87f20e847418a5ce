"""Attention whose keys, or keys and queries, lie on several ranks of a process group."""
