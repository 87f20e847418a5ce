"""The constants of planning: one table for NumPy's planners and for compiled ones.

Each name of this module is an integer. Compiled planners are rendered with all of them
(`c_constants`), so that none is written twice, and none is read at run time. What differs between
plans, such as prices and sizes of tiles, is no constant: planners take it as `Params`.
"""

from __future__ import annotations

# Lines (partition/stream_k.py)
PER_IDLE_CTA = 16  # 1/16 of the CTAs may stay idle for the sake of equal lines
FEW = 8  # most items of a slice for which CTAs may stay idle so that slices have equally many items
SNAP = 32  # a boundary moves to the end of an item over up to 1/32 of the mean load
OPTIONS = 4  # candidate sets of boundaries

# Longest first (partition/longest_first.py). The order by cost and the load limit are exact to
# 1/TOLERANCE of the mean load only, so that tiles of like cost may stay in the order of their heads
# and rows: CTAs that run at the same time then read the same keys.
TOLERANCE = 64
# Tiles are cut only if some CTA's load is 1/WORTH_CUTTING above the mean, and if cutting takes
# 1/WORTH_SAVING off the largest load: costs are not known more exactly than that.
WORTH_CUTTING = 16
WORTH_SAVING = 32
TRIED = 64  # load limits tried at a time
# With this many tiles per segment or more, tiles are assigned in the order of their keys. All tiles
# of a segment read the same keys; fewer tiles share too little in the cache to decide the order.
SHARING_TILES = 4
# Bits of a CTA's number where it is packed with the CTA's load. As many count the CTAs that drew a
# number from each end of the grid, in one 32-bit counter (hopper/roles.cuh).
CTA_BITS = 16

# Two roles (partition/role_lists.py)
ROUNDS = 4  # most rounds of whole prefills: CTAs own the lists of the first and claim the others
ENDS = 3  # most lengths of the shared lists at the end of a line, each half of the one before
PREFILL_SLICES = ROUNDS + ENDS  # most slices of prefills per CTA
DECODE_SLICES = 1 + ENDS  # most slices of decodes per CTA: its own, and shared ends
LATE = 8  # an uncut prefill may exceed the mean load by 1/8 of `RolePrices.shortest_cut`
PER_IDLE_PREFILL = 4  # prefills get 1/4 of the CTAs that neither role needs (decision 0043)
PER_IDLE_OF_FEW = 8  # 1/8 of the CTAs may idle so that few prefills are cut into equal parts
PER_SHARED_PREFILL = 8  # 1/8 of the prefills is shared
PER_SHARED_DECODE = 8  # 1/8 of the decodes is shared by the CTAs that decode

# Prefills that are dealt beside decodes (partition/dealt_prefills.py), as measured on an H200
MOST_DEALT_PER_CTA = 6  # most prefills per prefilling CTA
FEWEST_DEALERS = 32  # fewest such CTAs
SMALLEST_GROUP = 4  # fewest query heads of a group, where prefills would lie in rounds


def c_constants() -> str:
    """C text of all constants; that of FEW is `kFew`."""
    table = {name: value for name, value in globals().items() if name.isupper()}
    return "\n".join(f"constexpr int {c_name(name)} = {value};" for name, value in table.items())


def c_name(name: str) -> str:
    """The name of a constant in C text."""
    return "k" + "".join(word.capitalize() for word in name.split("_"))
