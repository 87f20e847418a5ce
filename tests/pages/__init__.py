"""Random operations on what virtual caches stand on: the ledger of pages, and the mapper."""
