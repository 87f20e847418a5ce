"""How the groups of the Hopper template share the registers of an SM (`setmaxnreg`).

Groups exchange what the CTA was launched with: one that computes would wait for ever for more than
the others give. So copies and transforms have few, and consumers the rest.

The numbers were found by compiling: `benchmarks/spills.py` builds all that prefill on Hopper can be
given, and where a group kept something in local memory, the split was moved towards it, until none
of 621 kernels did (2026-11-24; docs/experiments.md tells of the steps).
NVRTC 13.0; `tests/codegen/test_hopper_spills.py` watches the tightest.
"""

from __future__ import annotations

from dataclasses import dataclass

WARPGROUP_ROWS = 64  # fused query rows of one consumer group of four warps
_STEP = 8  # registers change hands in eights
_MOST = 240
LAUNCHED = {3: 168, 4: 128}  # of a thread, by the groups of a CTA: an SM has 65,536

# (producer, transformer), by the hardest of the copies and transforms.
SHARES = {
    # Rows that are gathered or padded keep addresses in a producer's registers: RoPE with soft-cap
    # and window spilled at 72 and 80 lanes beside 56.
    "transforms gathered or padded rows of small heads": (64, 96),
    # Consumers of up to 96 lanes leave what RoPE over so many needs.
    "transforms small heads": (56, 104),
    "transforms": (56, 72),
    # Outputs of more than 128 lanes fill 224 of a consumer; who only issues copies needs few.
    "copies wide values in bulk": (56, 0),
    "copies more than four panels": (88, 0),  # swizzled blocks of lanes, each with its address
    "copies": (72, 0),
}
_THREE_GROUPS = (80, 0)
# States of columns pass through a producer's registers, and it has more for them; one that has 88
# for its addresses has room. With 104, consumers of 160 lanes had 200 left, and two masks spilled.
_FOR_COLUMN_STATES, _ENOUGH_FOR_BOTH = 16, 88


@dataclass(frozen=True)
class Registers:
    """Of a thread of each group; all 0 where two groups keep what they were launched with.

    That is as many as a thread can name.
    """

    producer: int = 0
    transformer: int = 0
    consumer: int = 0


def split(consumers: int, hardest: str, column_states: bool) -> Registers:
    """How the groups share.

    Args:
        consumers: groups that compute.
        hardest: a key of `SHARES`.
        column_states: whether the producer works them out.
    """
    producer, transformer = SHARES[hardest] if consumers < 3 else _THREE_GROUPS
    if consumers < 3 and column_states:
        producer = max(producer, min(producer + _FOR_COLUMN_STATES, _ENOUGH_FOR_BOTH))
    groups = consumers + 1 + (transformer > 0)
    if groups not in LAUNCHED:
        return Registers()
    left = groups * LAUNCHED[groups] - producer - transformer
    return Registers(producer, transformer, min(left // consumers // _STEP * _STEP, _MOST))
