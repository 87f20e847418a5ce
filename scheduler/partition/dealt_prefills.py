"""Plans of two roles whose prefills are dealt longest first, instead of cut by Stream-K.

Where each CTA has few prefills, equal parts of a line cut most prefills. The CTAs that compute the
tiles of one head are then at different places of its keys, and each reads the keys from memory.
Whole prefills of a head begin with its first keys and move on together (decision 0062).

A line is as good where CTAs have many prefills. With small groups of heads, or none, a line is
better if most prefills lie whole on it, in rounds of which none is left out.

Beside decodes some work must be left to be claimed, since the planner does not know when decodes
are done. Without decodes all prefills are dealt.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from warploom.scheduler.model.constants import (
    FEWEST_DEALERS,
    MOST_DEALT_PER_CTA,
    SMALLEST_GROUP,
)
from warploom.scheduler.model.layout import Ints
from warploom.scheduler.model.problem import Problem, tiles_share_keys
from warploom.scheduler.partition import longest_first
from warploom.scheduler.partition.pieces import Pieces


def are_dealt(
    items: int, ctas: int, group_size: int, are_short: bool, has_all_rounds: bool
) -> bool:
    """Whether `items` prefills beside decodes are dealt to `ctas` CTAs.

    Args:
        items: prefill query tiles of all heads.
        ctas: CTAs that prefill.
        group_size: query heads of a key/value head.
        are_short: no prefill is worth cutting.
        has_all_rounds: on a line the prefills would lie in rounds, of which none is left out.
    """
    is_better = group_size >= SMALLEST_GROUP or not has_all_rounds
    is_measured = ctas >= FEWEST_DEALERS and items <= MOST_DEALT_PER_CTA * ctas
    return is_measured and is_better and not are_short


def deal(prefill: Problem, ctas: int, is_alone: bool) -> tuple[Pieces, int]:
    """Deals whole prefills to `ctas` CTAs, and cuts pieces off them to level the loads.

    Prefills that share keys are dealt section by section, as in plans of one role. Beside decodes
    each piece is a shared list that any CTA claims, the longest first; if whole prefills are even
    and nothing is cut, the last prefill of each CTA that has several is a shared list instead.
    Without decodes the CTAs with the least load own the pieces.

    Args:
        prefill: the prefill part of the problem.
        ctas: CTAs that prefill.
        is_alone: there are no decodes.

    Returns:
        Pieces, of which owners from `ctas` on are shared lists; and the number of shared lists.
    """
    found = longest_first.assign(
        replace(
            prefill, stream_k=False, section_keys=_section_keys(prefill), num_ctas=ctas,
            active_ctas=ctas,
        )
    )  # fmt: skip
    owner, shared = found.cta.copy(), np.zeros(0, np.int64)
    if not is_alone:
        shared = np.arange(len(owner))[len(owner) - found.pieces :]
        shared = shared if found.pieces else _last_of_several(owner, ctas)
        falling = shared[np.argsort(-found.visible[shared], kind="stable")]
        owner[falling] = ctas + np.arange(len(shared))
    cost = prefill.cost_model.of_chunks(found.visible)  # in the units that the price is for
    return Pieces(found.items, found.merges, owner, cost), len(shared)


def _last_of_several(cta: Ints, ctas: int) -> Ints:
    """The last item of each CTA that has more than one, in the order of CTAs."""
    last = np.zeros(ctas, np.int64)
    np.maximum.at(last, cta, np.arange(len(cta)))
    found: Ints = last[np.bincount(cta, minlength=ctas) > 1]
    return found


def _section_keys(prefill: Problem) -> int | None:
    """Keys that the cache holds, if several tiles read the same keys on average; else None."""
    assert prefill.prices is not None
    fused = int(prefill.segments["num_q"].sum(dtype=np.int64)) * prefill.group_size
    shares = tiles_share_keys(fused, prefill.rows, len(prefill.segments))
    return prefill.prices.cached_keys if shares else None
