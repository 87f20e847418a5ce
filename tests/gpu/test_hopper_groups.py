"""The Hopper kernel on a GPU with one, two and three groups that compute, whatever is chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.hopper_jobs import JOBS

import warploom as wl
from warploom.runtime.trials.case import Case
from warploom.runtime.trials.trials import mismatch
from warploom.testing import warm_up

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def kernels() -> Any:
    return warm_up([(variant, replace(setup, device="cuda")) for variant, setup in JOBS])


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "sm_limit"),
    [
        ((70, 1, 0, 33), (130, 257, 40, 33), 2),
        ((3, 500, 1), (0, 600, 1200), None),
        ((100,), (5000,), None),
        ((300, 2, 0, 400, 1), (30, 0, 40, 70, 300), 1),  # many items for one CTA, and empty ones
        ((900,) * 4, (500, 0, 900, 1300), 3),
    ],
)
def test_any_number_of_groups_agrees_with_the_oracle(
    q_lens: tuple[int, ...], kv_lens: tuple[int, ...], sm_limit: int | None, kernels: Any
) -> None:
    for variant, setup in kernels:
        equal = isinstance(setup.kv_format, wl.Dense)
        q_lens = (q_lens[0],) * len(q_lens) if equal else q_lens
        kv_lens = (kv_lens[0],) * len(kv_lens) if equal else kv_lens
        case = Case(setup, q_lens, kv_lens, num_kv_heads=2, group_size=2, seed=3, sm_limit=sm_limit)
        found = mismatch(variant, case)
        assert found is None, f"{variant!r} {case}: {found}"
