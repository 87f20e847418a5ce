"""Seeds that `make test` runs: chosen ones, a range, and those that once found a fault."""

CHOSEN = (82, 272, 341, 363, 412, 608, 841, 1543, 1724, 1798, 1921, 2989, 3556)  # coverage.choose
NEXT = tuple(range(100, 140))
FAULTS = (76964855, 76964869, 76964871)  # signed overflow in exponentials and logarithms
RECORDED = (*CHOSEN, *NEXT, *FAULTS)
