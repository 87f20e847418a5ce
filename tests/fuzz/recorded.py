"""Seeds that `make test` runs: chosen ones, a range, and those that once found a fault."""

CHOSEN = (25, 82, 159, 262, 700, 1030, 1526, 1570, 1660, 1699, 2051, 2353, 3671)  # coverage.choose
NEXT = tuple(range(100, 140))
RECORDED = (*CHOSEN, *NEXT)
