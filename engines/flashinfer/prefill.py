"""FlashInfer's module of this name: prefills."""

from warploom.engines.flashinfer.masks import packbits, segment_packbits
from warploom.engines.flashinfer.page import get_seq_lens
from warploom.engines.flashinfer.paged_prefill import BatchPrefillWithPagedKVCacheWrapper
from warploom.engines.flashinfer.ragged import BatchPrefillWithRaggedKVCacheWrapper
from warploom.engines.flashinfer.single import (
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "get_seq_lens",
    "packbits",
    "segment_packbits",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]
