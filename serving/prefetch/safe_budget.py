"""Budgets that are chosen for each collective, by what prefetches were seen to save on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from warploom.errors import ArgumentError
from warploom.serving.prefetch.accelerators import Accelerator
from warploom.serving.prefetch.checks import checked_count, checked_kind, checked_seconds
from warploom.serving.prefetch.overlap import CTAS, Overlap
from warploom.serving.prefetch.performance import collective_seconds


class Collective(NamedTuple):
    """What a duration is asked for.

    Attributes:
        name: its operator, as "_c10d_functional::all_reduce".
        bytes: of the largest tensor that it takes or makes; 0 where that is not known before it
            runs, as with a batch that varies.
    """

    name: str = ""
    bytes: int = 0


@dataclass(frozen=True)
class Ring:
    """Durations of collectives as the paper's model has them (PRESERVE, section 5).

    A constant, and what each device sends over its link: twice its share of an all-reduce, once
    that of all others.

    Attributes:
        chip: whose links, and whose constant (`link_latency`).
        devices: of the ring, from 1 on; one has no collective, which takes 0 s.
    """

    chip: Accelerator
    devices: int

    def __post_init__(self) -> None:
        checked_kind("chip", self.chip, Accelerator, "an Accelerator, such as H200")
        checked_count("devices", self.devices)

    def __call__(self, collective: Collective) -> float:
        times = 1.0 if "all_reduce" in collective.name else 0.5
        return collective_seconds(self.chip, self.devices, times * collective.bytes)


@dataclass(frozen=True)
class SafeBudget:
    """In place of a number of bytes: what is safe beside a collective that takes so long.

    It is `Overlap.best`: no prefetch where nothing is saved, or where the saving is not sure.

    Attributes:
        overlap: constants of the GPU, such as `H200_OVERLAP`.
        seconds: of each collective, or a function that tells them, as `Ring` does. Below what it
            takes is safe, above is not: a reader waits for bytes that come late.
        sms: numbers of CTAs to choose from.
    """

    overlap: Overlap
    seconds: float | Callable[[Collective], float]
    sms: tuple[int, ...] = CTAS

    def __post_init__(self) -> None:
        if not isinstance(self.overlap, Overlap):
            reason = f"is {self.overlap!r}; expected an Overlap, such as H200_OVERLAP"
            raise ArgumentError(name="overlap", reason=reason)
        if not callable(self.seconds):
            checked_seconds("seconds", self.seconds)
        self.overlap.best(0.0, 0.0, self.sms)  # refuses CTAs that cannot be

    def best(
        self, size: float, collective: Collective | None = None, flying: float = 0.0
    ) -> tuple[int, int]:
        """Bytes to ask for, and CTAs that ask; no bytes: do not prefetch.

        Args:
            size: bytes that are read behind the collective.
            collective: what it is, where `seconds` is a function.
            flying: bytes that were prefetched before and are not read yet.

        Raises:
            ArgumentError: the duration is no number of seconds up to 0.1, or a function without a
                collective.
        """
        kept = self.overlap.kept - flying
        if kept <= 0:
            return 0, self.sms[0]
        seconds = self.seconds
        if callable(seconds):
            if collective is None:
                reason = "is a function of the collective, which is not known here; give a number"
                raise ArgumentError(name="seconds", reason=reason)
            seconds = seconds(collective)
        most = replace(self.overlap, kept=kept)
        return most.best(checked_seconds("seconds", seconds), size, self.sms)

    def with_sms(self, sms: int | None) -> SafeBudget:
        """One that chooses from these CTAs alone, if they are given."""
        return self if sms is None else replace(self, sms=(sms,))

    @property
    def is_known(self) -> bool:
        """Whether its text says all of it, so that two with the same text choose the same."""
        return isinstance(self.seconds, Ring) or not callable(self.seconds)
