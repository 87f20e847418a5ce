"""Seeds that `make test` runs: chosen by `coverage.choose`, a range, and those of faults."""

CHOSEN = (4, 8, 14, 49, 287, 911, 927, 1378, 1701, 1713, 1735, 1867, 2065, 2209, 3149, 3757)
NEXT = tuple(range(100, 138))
FAULTS = (76964855, 76964869, 76964871)  # signed overflow in exponentials and logarithms
RECORDED = (*CHOSEN, *NEXT, *FAULTS)
