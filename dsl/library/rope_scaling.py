"""How RoPE's frequencies are stretched for contexts longer than those of training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from warploom.dsl.library.numbers import check_positive
from warploom.dsl.values.functions import ceil, clamp, floor, log, maximum, minimum, where
from warploom.dsl.values.symbols import Value
from warploom.errors import ArgumentError


class RopeScaling(Protocol):
    """A rule for frequencies; its numbers travel as fields of `Rope`, so they never recompile."""

    def values(self) -> dict[str, float]:
        """Values of Rope's fields, by name."""
        ...

    def frequency(self, base: Value, index: Value, width: Value, rope: Value) -> Value:
        """The scaled frequency of pair `index` of `width / 2`; `base` is the unscaled one.

        Numbers are read from `rope`, the `Rope` that the rule belongs to.
        """
        ...


@dataclass(frozen=True)
class LinearScaling:
    """All frequencies divided by one factor (position interpolation, Chen et al. 2023).

    Raises:
        ArgumentError: a factor that is not above 0 and finite.
    """

    factor: float

    def __post_init__(self) -> None:
        check_positive(factor=self.factor)

    def values(self) -> dict[str, float]:
        return {"rope_factor": self.factor}

    def frequency(self, base: Value, index: Value, width: Value, rope: Value) -> Value:
        return base / rope.rope_factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's rule: low frequencies are divided, high ones kept, those between blended.

    Attributes:
        factor: divisor of low frequencies.
        low_freq_factor: wavelengths above original_length / low_freq_factor count as low
            frequencies.
        high_freq_factor: wavelengths below original_length / high_freq_factor count as high ones.
        original_length: context length of training, in tokens.

    Raises:
        ArgumentError: a number that is not above 0 and finite, or high below low frequencies.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self) -> None:
        check_positive(**vars(self))
        if self.high_freq_factor <= self.low_freq_factor:
            reason = f"{self.high_freq_factor} is not above low_freq_factor={self.low_freq_factor}"
            raise ArgumentError(name="high_freq_factor", reason=reason)

    def values(self) -> dict[str, float]:
        return {
            "rope_factor": self.factor,
            "rope_low": self.low_freq_factor,
            "rope_high": self.high_freq_factor,
            "rope_original_length": self.original_length,
        }

    def frequency(self, base: Value, index: Value, width: Value, rope: Value) -> Value:
        turns = rope.rope_original_length * base / (2 * math.pi)  # in the original context
        keep = clamp((turns - rope.rope_low) / (rope.rope_high - rope.rope_low), 0.0, 1.0)
        return base * ((1.0 - keep) / rope.rope_factor + keep)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): a ramp over pairs between kept and divided frequencies.

    Attributes:
        factor: divisor of low frequencies.
        original_length: context length of training, in tokens.
        beta_fast: pairs that turn more often than this in the original context are kept.
        beta_slow: pairs that turn less often are divided.
        magnitude: factor of rotated vectors; 0.1 ln(factor) + 1 by default.

    Raises:
        ArgumentError: a number that is not above 0 and finite, or a fast beta not above the slow.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    magnitude: float | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        check_positive(**given)
        if self.beta_fast <= self.beta_slow:
            reason = f"{self.beta_fast} is not above beta_slow={self.beta_slow}"
            raise ArgumentError(name="beta_fast", reason=reason)

    def values(self) -> dict[str, float]:
        by_paper = 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0
        return {
            "rope_factor": self.factor,
            "rope_low": self.beta_slow,
            "rope_high": self.beta_fast,
            "rope_original_length": self.original_length,
            "rope_magnitude": by_paper if self.magnitude is None else self.magnitude,
        }

    def frequency(self, base: Value, index: Value, width: Value, rope: Value) -> Value:
        first = maximum(floor(_pair_of(rope.rope_high, width, rope)), 0.0)
        last = minimum(ceil(_pair_of(rope.rope_low, width, rope)), width - 1)
        span = where(first == last, 0.001, last - first)
        divided = clamp((index - first) / span, 0.0, 1.0)
        return base * (divided / rope.rope_factor + (1.0 - divided))


def _pair_of(turns: Value, width: Value, rope: Value) -> Value:
    """The (fractional) pair that turns that often in the original context."""
    length = rope.rope_original_length / (turns * (2 * math.pi))
    return width * log(length, precise=True) / (2.0 * log(rope.rope_theta, precise=True))
