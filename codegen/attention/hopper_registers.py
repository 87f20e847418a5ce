"""How the warp groups of the Hopper template share the registers of an SM (`setmaxnreg`).

Groups redistribute the registers that the CTA was launched with. A consumer that requests more than
the other groups release would wait for ever. So groups that copy or transform get few registers,
and consumers get the rest.

The numbers were found by compiling: `benchmarks/spills.py` builds all prefill kernels for Hopper.
Where a group used local memory, it was given more registers, until none of 621 kernels did
(2026-11-24; docs/experiments/prefill-transforms.md describes the steps).
NVRTC 13.0; `tests/codegen/test_hopper_spills.py` checks the tightest kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

WARPGROUP_ROWS = 64  # fused query rows of one consumer group of four warps
_STEP = 8  # `setmaxnreg` takes multiples of 8
_MOST = 240
LAUNCHED = {3: 168, 4: 128}  # warp groups of a CTA -> registers of a thread; an SM has 65,536

# Registers of a thread (producer, transformer), by the copies or transforms that need the most.
SHARES = {
    # A producer keeps addresses of gathered or padded rows in registers: with 56, RoPE with
    # soft-cap and window spilled at 72 and 80 lanes.
    "transforms gathered or padded rows of small heads": (64, 96),
    # Consumers of up to 96 lanes leave enough for RoPE over that many lanes.
    "transforms small heads": (56, 104),
    "transforms": (56, 72),
    # Outputs of more than 128 lanes fill 224 of a consumer's registers; a producer that only issues
    # bulk copies needs few.
    "copies wide values in bulk": (56, 0),
    "copies more than four panels": (88, 0),  # swizzled blocks of lanes, each with its address
    "copies": (72, 0),
}
_THREE_GROUPS = (80, 0)
# A producer gets more registers for column states, which pass through them, but at most 88: one
# with 88 for its addresses has room. With 104, consumers of 160 lanes had 200 left, and two masks
# spilled.
_FOR_COLUMN_STATES, _ENOUGH_FOR_BOTH = 16, 88


@dataclass(frozen=True)
class Registers:
    """Registers of a thread in each group; all 0 if two groups keep what they were launched with.

    In that case a thread has as many registers as it can address.
    """

    producer: int = 0
    transformer: int = 0
    consumer: int = 0


def split(consumers: int, hardest: str, column_states: bool) -> Registers:
    """The registers of each group.

    Args:
        consumers: number of consumer groups.
        hardest: a key of `SHARES`.
        column_states: whether the producer computes column states.
    """
    producer, transformer = SHARES[hardest] if consumers < 3 else _THREE_GROUPS
    if consumers < 3 and column_states:
        producer = max(producer, min(producer + _FOR_COLUMN_STATES, _ENOUGH_FOR_BOTH))
    groups = consumers + 1 + (transformer > 0)
    if groups not in LAUNCHED:
        return Registers()
    left = groups * LAUNCHED[groups] - producer - transformer
    return Registers(producer, transformer, min(left // consumers // _STEP * _STEP, _MOST))
