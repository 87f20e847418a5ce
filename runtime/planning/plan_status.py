"""What a planner on the device can find wrong with a batch."""

from __future__ import annotations

from enum import IntEnum


class PlanStatus(IntEnum):
    """`warploom::PlanStatus` of templates/common/warploom/planner/batch.hpp."""

    GOOD = 0
    QO_START = 1
    QO_FALLS = 2
    KV_START = 3
    KV_FALLS = 4
    UNEVEN = 5
    PAGE = 6
    LAST_PAGE = 7
    TOO_LONG = 8
    MAX_ROWS = 9
    MAX_KV_LEN = 10
    MAX_BLOCKS = 11

    @property
    def reason(self) -> str:
        """In words."""
        return _REASONS[self]


_REASONS = {
    PlanStatus.GOOD: "nothing is wrong",
    PlanStatus.QO_START: "qo_indptr does not begin at 0",
    PlanStatus.QO_FALLS: "qo_indptr decreases",
    PlanStatus.KV_START: "kv_indptr does not begin at 0",
    PlanStatus.KV_FALLS: "kv_indptr decreases",
    PlanStatus.UNEVEN: "dense requests differ in query rows",
    PlanStatus.PAGE: "a page number is negative",
    PlanStatus.LAST_PAGE: "last_page_len is not in 1 .. page_size",
    PlanStatus.TOO_LONG: "a request is longer than int32 can count",
    PlanStatus.MAX_ROWS: "there are more query rows than q has, or than max_q_rows allows",
    PlanStatus.MAX_KV_LEN: "a request has more keys than max_kv_len allows",
    PlanStatus.MAX_BLOCKS: "there are more pages than max_blocks allows, or than kv_indices lists",
}
