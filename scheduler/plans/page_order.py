"""The pages of a plan in the order in which its CTAs will read them, for prefetching."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from warploom.scheduler.model.layout import Ints
from warploom.scheduler.plans.plan import Plan


def page_order(plan: Plan, page_size: int) -> npt.NDArray[np.int32]:
    """Every page that the plan reads, once, at the place of its first read.

    All CTAs begin together, so the first items of all CTAs come before the second items; of items
    in the same turn, the first pages of all items come before the second pages. Items read keys in
    ascending order. A page holds all heads, so items of other heads do not list it again.

    Args:
        plan: a plan of a paged cache; its block list is the pages.
        page_size: tokens of a page.

    Returns:
        int32 [pages].
    """
    turn, cta = _turns(plan)
    items = {name: plan.items[name].astype(np.int64) for name in ("segment", "kv_begin", "kv_end")}
    first = items["kv_begin"] // page_size
    counts = np.where(
        items["kv_end"] > items["kv_begin"], (items["kv_end"] - 1) // page_size + 1 - first, 0
    )
    item = np.repeat(np.arange(len(counts)), counts)
    depth = np.arange(len(item)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = plan.segments["index_begin"].astype(np.int64)[items["segment"]] + first
    pages = plan.indices[begin[item] + depth]
    pages = pages[np.lexsort((cta[item], depth, turn[item]))]
    _, at = np.unique(pages, return_index=True)
    ordered: npt.NDArray[np.int32] = pages[np.sort(at)]
    return ordered


def _turns(plan: Plan) -> tuple[Ints, Ints]:
    """For each item: how many items its CTA computes before it, and that CTA.

    With two roles a CTA decodes before it prefills. CTAs claim shared lists when they are done with
    their own, so shared lists come last, each as if it had its own CTA.
    """
    counts = np.diff(plan.cta_indptr).astype(np.int64)
    of_list = np.repeat(np.arange(len(counts)), counts)
    turn = np.arange(len(plan.items)) - plan.cta_indptr[:-1].astype(np.int64)[of_list]
    if len(plan.problem.roles) == 1:
        return turn, of_list
    ctas = plan.problem.num_ctas
    decodes = counts[ctas : 2 * ctas]
    before = np.concatenate(
        [decodes, np.zeros(ctas, np.int64), np.full(len(counts) - 2 * ctas, len(plan.items))]
    )
    return turn + before[of_list], np.where(of_list < 2 * ctas, of_list % ctas, of_list)
