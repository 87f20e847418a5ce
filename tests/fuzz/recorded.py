"""Seeds that `make test` runs: chosen by `coverage.choose`, a range, and those of faults."""

CHOSEN = (75, 150, 312, 439, 541, 640, 1079, 1539, 1713, 1735, 1758, 1766, 2869, 3096, 3149)
NEXT = tuple(range(100, 138))
FAULTS = (76964855, 76964869, 76964871)  # signed overflow in exponentials and logarithms
RECORDED = (*CHOSEN, *NEXT, *FAULTS)
