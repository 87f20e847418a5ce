"""Seeds that `make test` runs: by what they have, by what meets in them, and those of faults."""

CHOSEN = (4, 8, 14, 49, 287, 911, 927, 1378, 1701, 1713, 1735, 1867, 2065, 2209, 3149, 3757)
# Of 38 that follow each other those by which pairs of surroundings meet (`coverage.pairs`).
MEETING = (100, 107, 109, 112, 113, 115, 117, 121, 122, 125, 126, 127, 128, 129, 136)
FAULTS = (76964855, 76964869, 76964871)  # signed overflow in exponentials and logarithms
COMPILERS = (322676666,)  # a planner that GCC 13 made wrong
DIGITS = (69495009,)  # erf near 0
EMPTY = (241421048,)  # a tensor of no positions in the NumPy reading
RECORDED = (*CHOSEN, *MEETING, *FAULTS, *COMPILERS, *DIGITS, *EMPTY)
