"""One random batch, computed by a wrapper and by the oracle: the body of property tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from warploom.dsl.reference import naive_attention, reference_attention
from warploom.dsl.types.rounding import ATOL, SPACING, rounder, tolerance
from warploom.dsl.variants.variant import Variant
from warploom.runtime.formats import format_of
from warploom.runtime.formats.base import Drawn, OracleSegment
from warploom.runtime.formats.lists import as_indptr
from warploom.runtime.inputs.aux_outputs import AuxRequest
from warploom.runtime.inputs.outputs import recorded_by
from warploom.runtime.trials.case import Case
from warploom.runtime.trials.random_inputs import random_inputs
from warploom.runtime.wrappers.wrapper import AttentionWrapper

_Floats = np.ndarray[Any, Any]
_UNOWNED = 127.0
MakeInputs = Callable[["Case", np.random.Generator], Mapping[str, Any]]


@dataclass(frozen=True)
class Expected:
    """The oracle's output, log-sum-exp and largest scores of one request, and its naive twin's."""

    o: _Floats
    lse: _Floats
    top: _Floats
    naive_o: _Floats
    naive_lse: _Floats
    naive_top: _Floats


class Trial:
    """The tensors of a case. What no request owns is NaN, so that a stray read shows."""

    def __init__(self, variant: Variant, case: Case, make_inputs: MakeInputs | None = None) -> None:
        self.variant, self.case = variant, case
        self.rng = np.random.default_rng(case.seed)
        self.dtype: torch.dtype = getattr(torch, case.setup.dtype)
        self.kv_dtype: torch.dtype = getattr(torch, case.setup.kv_dtype or case.setup.dtype)
        self._round = rounder(case.setup.dtype)
        setup = case.setup
        self.q = [
            self._random(n, case.num_q_heads, setup.head_dim, scale=case.scale) for n in case.q_lens
        ]
        self.k = [self._random_kv(n, case.num_kv_heads, setup.head_dim) for n in case.kv_lens]
        self.v = [self._random_kv(n, case.num_kv_heads, setup.head_dim_v) for n in case.kv_lens]
        given = {} if make_inputs is None else dict(make_inputs(case, self.rng))
        self.inputs = {**random_inputs(variant, case, self.rng, set(given)), **given}
        self.recorded = {name: self.inputs[name] for name in recorded_by(variant)}
        self._naive_recorded = {name: x.clone() for name, x in self.recorded.items()}
        self.qo_indptr = as_indptr(case.q_lens)
        self._format = format_of(case.setup.kv_format)
        stored = self._format.store(Drawn(self.rng, case.q_lens, self.k, self.v))
        self.plan = {"qo_indptr": self.qo_indptr, **stored.plan}
        self._segments: list[list[OracleSegment]] = stored.segments
        self.stored = [self._laid_out(x) for x in (stored.k, stored.v)]

    def run(self) -> tuple[list[_Floats], ...]:
        """Output, log-sum-exp and, if the kernel tells them, largest scores of each request."""
        case, setup = self.case, self.case.setup
        wrapper = AttentionWrapper(
            self.variant,
            kv_format=setup.kv_format,
            num_q_heads=case.num_q_heads,
            num_kv_heads=case.num_kv_heads,
            head_dim=setup.head_dim,
            head_dim_v=setup.head_dim_v,
            dtype=setup.dtype,
            kv_dtype=setup.kv_dtype,
            device=setup.device,
            tile=setup.tile,
            key_transform=setup.key_transform,
            sm_limit=case.sm_limit,
            max_scores=setup.max_scores,
        )
        inputs: dict[str, Any] = {
            name: x.to(wrapper.device) if isinstance(x, torch.Tensor) else x
            for name, x in self.inputs.items()
        }
        inputs |= {name: x.to(wrapper.device, copy=True) for name, x in self.recorded.items()}
        wrapper.plan(**self.plan, **inputs)
        q = self._queries().to(wrapper.device)
        k, v = (x.to(wrapper.device) for x in self.stored)
        out, aux = wrapper.run(q, (k, v), return_aux=AuxRequest(True, setup.max_scores))
        self.recorded = {name: inputs[name] for name in self.recorded}
        return tuple(self._split(x) for x in (out, *aux) if x is not None)

    def expected(self) -> list[Expected]:
        """What the user's functors say, request by request; outputs of `inputs` have the rest."""
        return [self._expected(i) for i in range(len(self.q))]

    def recordings(self) -> Iterator[tuple[str, list[_Floats], str]]:
        """Of each output after `run` and `expected`: its name, what the device recorded in it, what
        the functors did and their naive twin, and its dtype.
        """
        for name, recorded in self.recorded.items():
            found = recorded, self.inputs[name], self._naive_recorded[name]
            dtype = str(recorded.dtype).removeprefix("torch.")
            yield name, [x.double().cpu().numpy() for x in found], dtype

    def _expected(self, i: int) -> Expected:
        first_row = 0 if self._format.batched else int(self.qo_indptr[i])
        results = []
        for segment in self._segments[i]:
            request = {
                "batch": i,
                "inputs": self.inputs,
                "first_q_idx": segment.rows.start,
                "first_q_row": segment.rows.start + first_row,
                "q_len": self.case.q_lens[i],
                "kv_len": segment.kv_len,
                "kv_positions": segment.kv_pos,
            }
            tensors = (self.q[i][segment.rows], self.k[i][segment.keys], self.v[i][segment.keys])
            tops = np.zeros((2, *tensors[0].shape[:2]))
            exact = reference_attention(self.variant, *tensors, max_scores=tops[0], **request)
            request["inputs"] = {**self.inputs, **self._naive_recorded}
            naive = naive_attention(
                self.variant,
                *tensors,
                round_to=self.case.setup.dtype,
                max_scores=tops[1],
                **request,
            )
            results.append((*exact, tops[0], *naive, tops[1]))
        return Expected(*(np.concatenate(arrays) for arrays in zip(*results, strict=True)))

    def _random(self, *shape: int, scale: float = 1.0) -> _Floats:
        """float32 numbers that the storage type holds exactly."""
        return self._round(scale * self.rng.standard_normal(shape, dtype=np.float32))

    def _random_kv(self, *shape: int) -> _Floats:
        """Likewise for keys and values; among integers, more than the few that round to zero."""
        scale = 1.0 if self.kv_dtype.is_floating_point else 4.0
        return self._to_torch(self._random(*shape, scale=scale), self.kv_dtype).float().numpy()

    @staticmethod
    def _to_torch(array: _Floats, dtype: torch.dtype) -> torch.Tensor:
        if not dtype.is_floating_point:  # which have no NaN to fill what nobody owns with
            array = np.nan_to_num(array, nan=_UNOWNED)
        return torch.from_numpy(np.ascontiguousarray(array)).to(dtype)

    def _queries(self) -> torch.Tensor:
        if not self._format.batched:
            return self._to_torch(np.concatenate(self.q), self.dtype)
        q = np.stack(self.q)
        return self._to_torch(q if self._is_nhd else q.swapaxes(1, 2), self.dtype)

    def _split(self, result: torch.Tensor) -> list[_Floats]:
        """A result's requests, as float64 [rows, heads, ...]."""
        array = result.double().cpu().numpy()
        if self._format.batched:
            return list(array if self._is_nhd else array.swapaxes(1, 2))
        return np.split(array, self.qo_indptr[1:-1])

    @property
    def _is_nhd(self) -> bool:
        return self.case.setup.kv_format.layout == "NHD"

    def _laid_out(self, stored: _Floats) -> torch.Tensor:
        return self._to_torch(stored if self._is_nhd else stored.swapaxes(-3, -2), self.kv_dtype)


def mismatch(variant: Variant, case: Case, make_inputs: MakeInputs | None = None) -> str | None:
    """Run one case; None if the back end agrees with the oracle, else what differs most."""
    trial = Trial(variant, case, make_inputs)
    for i, (exact, o, lse, *tops) in enumerate(zip(trial.expected(), *trial.run(), strict=True)):
        dtype = case.setup.dtype
        found = _compare(f"output of request {i}", o, exact.o, exact.naive_o, dtype)
        if found is None and variant.softmax:
            what = f"log-sum-exp of request {i}"
            found = _compare(what, lse, exact.lse, exact.naive_lse, dtype)
        for top in tops:
            what = f"largest scores of request {i}"
            found = found or _compare(what, top, exact.top, exact.naive_top, dtype)
        if found is not None:
            return found
    for name, recorded, dtype in trial.recordings():
        found = _compare_recorded(name, recorded, {dtype, case.setup.dtype})
        if found is not None:
            return found
    return None


def _compare_recorded(name: str, recorded: list[_Floats], dtypes: set[str]) -> str | None:
    """Compare what is written at all, and then the values."""
    got, exact, naive = recorded
    is_written = ~np.isnan(exact)
    if np.any(is_written == np.isnan(got)):
        wrong = tuple(map(int, np.argwhere(is_written == np.isnan(got))[0]))
        does = "writes nothing" if is_written[wrong] else f"writes {got[wrong]:.7g}"
        return f"{name} at {wrong}: {does}, the functors say {exact[wrong]:.7g}"
    coarser = max(dtypes, key=ATOL.__getitem__)
    got, exact, naive = (x[is_written] for x in recorded)
    # a sum that rounds to the next number of 16 bits is right
    return _compare(f"what {name} holds", got, exact, naive, coarser, SPACING[coarser])


def _compare(
    what: str, got: _Floats, exact: _Floats, naive: _Floats, dtype: str, relative: float = 0.0
) -> str | None:
    if got.size == 0:
        return None
    finite = np.isfinite(exact)
    allowed = tolerance(exact, naive, dtype)
    allowed += relative * float(np.max(np.abs(exact[finite]), initial=0.0))
    with np.errstate(invalid="ignore"):
        error = np.where(got == exact, 0.0, np.abs(got - exact))
    error = np.where(np.isnan(error), np.inf, error)
    if error.max() <= allowed:
        return None
    worst = tuple(map(int, np.unravel_index(int(error.argmax()), error.shape)))
    where = ", ".join(
        f"{name} {i}" for name, i in zip(("row", "head", "lane"), worst, strict=False)
    )
    if np.isnan(exact[worst]):
        return f"{what}, {where}: the functors themselves give nan here; got {got[worst]:.7g}"
    return (
        f"{what}, {where}: got {got[worst]:.7g}, the functors say {exact[worst]:.7g}; "
        f"the error {error[worst]:.3g} exceeds {allowed:.3g}, at {int((error > allowed).sum())} of "
        f"{error.size} places"
    )
