"""How the groups of the Hopper template share the registers of an SM (`setmaxnreg`).

Groups exchange what the CTA was launched with: one that computes would wait for ever for more than
the others give. So copies and transforms have few, and consumers the rest.

The numbers were found by compiling: `benchmarks/spills.py` builds all that prefill on Hopper can be
given, and where a group kept something in local memory, the split was moved towards it, until none
of 621 kernels did (2026-11-24, `benchmarks/results/spills.jsonl`; docs/experiments.md tells of the
steps). They hold for NVRTC 13.0; `tests/codegen/test_hopper_spills.py` watches the tightest.
"""

from __future__ import annotations

from dataclasses import dataclass

GROUP_ROWS = 64  # fused query rows of one consumer group of four warps
_STEP = 8  # registers change hands in eights
_MOST = 240
_LAUNCHED = {3: 168, 4: 128}  # of a thread, by the groups of a CTA: an SM has 65,536

# (producer, transformer), by what is the hardest of the copies and transforms.
_SHARES = {
    # Rows that are gathered or padded keep addresses in a producer's registers: RoPE with soft-cap
    # and window spilled at 72 and 80 lanes beside 56.
    "transforms gathered or padded rows of narrow heads": (64, 96),
    # Consumers of up to 96 lanes leave what RoPE over so many needs.
    "transforms narrow heads": (56, 104),
    "transforms": (56, 72),
    # Outputs of more than 128 lanes fill 224 of a consumer; who only issues copies needs few.
    "copies wide values in bulk": (56, 0),
    "copies more than four panels": (88, 0),  # swizzled blocks of lanes, each with its address
    "copies": (72, 0),
}
_ODD_ROWS = "gathered or padded rows of narrow heads"
_THREE_GROUPS = (80, 0)
_FOR_COLUMN_STATES = 16  # more for a producer, through whose registers they pass


@dataclass(frozen=True)
class Registers:
    """Of a thread of each role; all 0 where two groups keep what they were launched with.

    That is as many as a thread can name.
    """

    producer: int = 0
    transformer: int = 0
    consumer: int = 0


@dataclass(frozen=True)
class Load:
    """What decides.

    Attributes:
        consumers: groups that compute.
        transforms: whether a group of its own transforms.
        head_dim_v: lanes of the output.
        bulk: keys come by tensor copies.
        padded: rows of keys are filled up with zeros.
        panels: swizzled blocks of lanes of values.
        column_states: whether the producer works them out.
    """

    consumers: int
    transforms: bool
    head_dim_v: int
    bulk: bool
    padded: bool
    panels: int
    column_states: bool

    @property
    def _kind(self) -> str:
        if self.transforms and self.head_dim_v <= 96:
            rows = "narrow heads" if self.bulk and not self.padded else _ODD_ROWS
            return f"transforms {rows}"
        if self.transforms:
            return "transforms"
        if self.head_dim_v > 128 and self.bulk:
            return "copies wide values in bulk"
        return "copies more than four panels" if self.panels > 4 else "copies"

    def registers(self) -> Registers:
        """How they are shared out."""
        groups = self.consumers + 1 + self.transforms
        if groups not in _LAUNCHED:
            return Registers()
        producer, transformer = _SHARES[self._kind] if self.consumers < 3 else _THREE_GROUPS
        if self.consumers < 3 and self.column_states:
            producer += _FOR_COLUMN_STATES
        left = groups * _LAUNCHED[groups] - producer - transformer
        consumer = min(left // self.consumers // _STEP * _STEP, _MOST)
        return Registers(producer, transformer, consumer)
