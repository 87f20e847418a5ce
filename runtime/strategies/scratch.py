"""Bytes of the memory that compiled planners work in: `templates/common/warploom/planner/`."""

from __future__ import annotations

from warploom.scheduler.model.constants import DECODE_SLICES, OPTIONS, PREFILL_SLICES


def scratch_bytes(max_tiles: int, max_requests: int, slices: int) -> int:
    """Size of `Scratch` of scratch.hpp, for plans of one role; a test compares them."""
    return _scratch_bytes(max_tiles, max_requests, slices, OPTIONS * (slices + 1))


def role_scratch_bytes(max_tiles: int, max_requests: int, active_ctas: int) -> int:
    """The same of two roles: prefills, and decodes behind them.

    Args:
        max_tiles, max_requests: of batches.
        active_ctas: CTAs that may get work.
    """
    of_prefills, of_decodes = PREFILL_SLICES * active_ctas, DECODE_SLICES * active_ctas
    prefills = _scratch_bytes(max_tiles, max_requests, of_prefills, of_prefills + 1)
    options = OPTIONS * (active_ctas + 1)
    decodes = _scratch_bytes(max_requests, max_requests, of_decodes, options)
    return -(-prefills // 8) * 8 + decodes


def _scratch_bytes(max_tiles: int, max_requests: int, slices: int, marks: int) -> int:
    wide = 8 * (max_tiles + 1) + 16 * min(max_tiles, max_requests)
    boundaries = 8 * marks + (8 + 4) * (slices + 1)
    return wide + boundaries + (8 + 3 * 4) * max_tiles + 4 * (max_requests + 1)


def list_scratch_bytes(
    max_tiles: int, max_requests: int, slices: int, num_kv_heads: int, num_ctas: int
) -> int:
    """The same of longest_first_planner.hpp."""
    tiles = -(-scratch_bytes(max_tiles, max_requests, slices) // 8) * 8
    return tiles + deal_scratch_bytes(max_tiles, max_requests, num_kv_heads, num_ctas)


def deal_scratch_bytes(max_tiles: int, max_requests: int, num_kv_heads: int, num_ctas: int) -> int:
    """Of `Dealing` in dealing.hpp, with what its order and levelling take."""
    items = (16 + 12) * max_tiles * num_kv_heads
    ctas = (8 + 32 + 4 + 4 + 4 + 8 + 8) * num_ctas + 8 + 4
    levelling = (2 * 8 + 3 * 4 + 2 * 16) * num_ctas
    return -(-(items + 8 * max_requests + ctas + 4 + levelling) // 8) * 8
