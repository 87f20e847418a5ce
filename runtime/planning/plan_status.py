"""What a planner on the device can find wrong with a batch."""

GOOD = 0
# The index of a reason is its value in `warploom::PlanStatus` of
# templates/common/warploom/planner/batch.hpp.
REASONS = (
    "nothing is wrong",
    "qo_indptr does not begin at 0",
    "qo_indptr decreases",
    "kv_indptr does not begin at 0",
    "kv_indptr decreases",
    "dense requests differ in query rows",
    "a page number is negative",
    "last_page_len is not in 1 .. page_size",
    "a request is longer than int32 can count",
    "there are more query rows than q has, or than max_q_rows allows",
    "a request has more keys than max_kv_len allows",
    "there are more pages than max_blocks allows, or than kv_indices lists",
)
