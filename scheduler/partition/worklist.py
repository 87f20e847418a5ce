"""Work lists: picks the partition that a problem asks for."""

from __future__ import annotations

from warploom.scheduler.model.problem import Problem, WorkList
from warploom.scheduler.partition import fixed, longest_first, role_chunks, role_lists, stream_k


def build(problem: Problem) -> WorkList:
    """Plans one batch."""
    if problem.smaller:
        if problem.split_size is not None:
            return role_chunks.build(problem)
        return role_lists.build(problem)
    if problem.stream_k:
        return stream_k.build(problem)
    if problem.split_size is not None:
        return fixed.build(problem)
    return longest_first.build(problem)
