"""The largest sizes, chosen so that sums and products of positions fit the integers of kernels."""

MAX_LENGTH = 2**28  # keys of a request, and query rows of a batch: sums of a few fit 32 bits
MAX_HEADS = 2**16
