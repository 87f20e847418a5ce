"""Results of `run` and `attention` beside the output, requested as in FlexAttention."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from warploom.dsl.types.spec import AttentionSpec
from warploom.errors import ArgumentError, UnsupportedSpec

_KNOWN = ("lse", "max_scores")


class AuxRequest(NamedTuple):
    """What to return beside the output; FlexAttention's own `AuxRequest` is accepted, too.

    Attributes:
        lse: the log-sum-exp of each row.
        max_scores: the largest score of each row.
    """

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """The requested results; those not requested are None.

    Attributes:
        lse: float32, shaped like q without head_dim: the log-sum-exp, in the base of `lse_base`.
        max_scores: float32, shaped like `lse`: the largest score that a row sees, after
            `logits_transform` and in natural units for any `lse_base`; -inf if the row sees no key,
            NaN if it sees NaN.
    """

    lse: torch.Tensor | None = None
    max_scores: torch.Tensor | None = None


class Requested(Protocol):
    """An `AuxRequest`, warploom's or torch's."""

    @property
    def lse(self) -> bool: ...

    @property
    def max_scores(self) -> bool: ...


class MaxScores:
    """Where a run writes the largest scores.

    Attributes:
        tensor: the caller's tensor, or None until the run allocates one.
    """

    def __init__(self, tensor: torch.Tensor | None = None) -> None:
        self.tensor = tensor

    def put(self, made: torch.Tensor) -> None:
        """Store scores that were computed elsewhere."""
        self.tensor = made if self.tensor is None else self.tensor.copy_(made)


def with_aux(
    result: torch.Tensor | tuple[torch.Tensor, torch.Tensor], max_scores: MaxScores | None
) -> tuple[torch.Tensor, AuxOutput]:
    """The result of a run, with or without log-sum-exp, in the form of a call with `return_aux`."""
    out, sums = result if isinstance(result, tuple) else (result, None)
    return out, AuxOutput(sums, None if max_scores is None else max_scores.tensor)


def checked_request(return_aux: Any, return_lse: Any) -> AuxRequest:
    """A request as warploom's own `AuxRequest`.

    Raises:
        ArgumentError: `return_aux` is no request, or requests an unknown result, or `return_lse` is
            set, too.
    """
    names = getattr(type(return_aux), "_fields", ())
    if "lse" not in names:
        reason = f"is {return_aux!r}; expected warploom.AuxRequest(lse=..., max_scores=...)"
        raise ArgumentError(name="return_aux", reason=reason)
    for name in names:
        flag = getattr(return_aux, name)
        if not isinstance(flag, bool):
            reason = f"is {flag!r}; expected True or False"
            raise ArgumentError(name=f"return_aux.{name}", reason=reason)
        if flag and name not in _KNOWN:
            reason = f"asks for {name}; there are {' and '.join(_KNOWN)}"
            raise ArgumentError(name="return_aux", reason=reason)
    if return_lse:
        reason = "is part of return_aux; give AuxRequest(lse=True) alone"
        raise ArgumentError(name="return_lse", reason=reason)
    return AuxRequest(return_aux.lse, getattr(return_aux, "max_scores", False))


def check_has_scores(spec: AttentionSpec) -> None:
    """Refuse largest scores for a variant that has none.

    Raises:
        UnsupportedSpec: the variant has no softmax.
    """
    if not spec.variant.softmax:
        raise UnsupportedSpec(
            what=f"max_scores of {spec.variant.name}",
            reason="it has softmax = False, and no kernel looks for the maxima of what it sums",
            remedy="Leave max_scores out.",
        )


def check_is_declared(spec: AttentionSpec) -> None:
    """Refuse runs that request largest scores from kernels that do not write them.

    Raises:
        ArgumentError: `max_scores` was not declared.
    """
    if not spec.max_scores:
        reason = (
            "the wrapper's kernels do not tell them; declare AttentionWrapper(..., max_scores=True)"
        )
        raise ArgumentError(name="max_scores", reason=reason)
