"""FlashInfer's calls, served by warploom: for code that calls FlashInfer's.

`from warploom.engines import flashinfer` in place of `import flashinfer`: the classes and functions
of attention have FlashInfer's names, arguments, orders and defaults (those of 0.6.18), and
FlashInfer itself is not needed. The modules that have them there are here, too (`decode`,
`prefill`, ...). Heads, types and page size come with each plan; a wrapper of warploom is made for
each declaration that comes. Log-sum-exps are in base 2.

Arguments that only hint at speed are without effect, and those that would change results and have
no counterpart are refused with `warploom.engine_errors.UnsupportedByEngine`. Workspaces are not
used. `docs/from-flashinfer.md` says what else differs.
"""

import sys as _sys

from warploom.engines.flashinfer import attention as attention
from warploom.engines.flashinfer import cascade as cascade
from warploom.engines.flashinfer import decode as decode
from warploom.engines.flashinfer import page as page
from warploom.engines.flashinfer import pod as pod
from warploom.engines.flashinfer import prefill as prefill
from warploom.engines.flashinfer import quantization as quantization
from warploom.engines.flashinfer import sparse as sparse
from warploom.engines.flashinfer.attention import BatchAttention as BatchAttention
from warploom.engines.flashinfer.attention import (
    BatchAttentionWithAttentionSinkWrapper as BatchAttentionWithAttentionSinkWrapper,
)
from warploom.engines.flashinfer.cascade import (
    MultiLevelCascadeAttentionWrapper as MultiLevelCascadeAttentionWrapper,
)
from warploom.engines.flashinfer.decode import fast_decode_plan as fast_decode_plan
from warploom.engines.flashinfer.masks import packbits as packbits
from warploom.engines.flashinfer.masks import segment_packbits as segment_packbits
from warploom.engines.flashinfer.missing import refuse_others as _refuse_others
from warploom.engines.flashinfer.page import append_paged_kv_cache as append_paged_kv_cache
from warploom.engines.flashinfer.page import (
    get_batch_indices_positions as get_batch_indices_positions,
)
from warploom.engines.flashinfer.page import get_seq_lens as get_seq_lens
from warploom.engines.flashinfer.paged_decode import (
    BatchDecodeWithPagedKVCacheWrapper as BatchDecodeWithPagedKVCacheWrapper,
)
from warploom.engines.flashinfer.paged_decode import (
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper as CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
)
from warploom.engines.flashinfer.paged_prefill import (
    BatchPrefillWithPagedKVCacheWrapper as BatchPrefillWithPagedKVCacheWrapper,
)
from warploom.engines.flashinfer.pod import (
    BatchPODWithPagedKVCacheWrapper as BatchPODWithPagedKVCacheWrapper,
)
from warploom.engines.flashinfer.ragged import (
    BatchPrefillWithRaggedKVCacheWrapper as BatchPrefillWithRaggedKVCacheWrapper,
)
from warploom.engines.flashinfer.single import (
    single_decode_with_kv_cache as single_decode_with_kv_cache,
)
from warploom.engines.flashinfer.single import (
    single_decode_with_kv_cache_return_lse as single_decode_with_kv_cache_return_lse,
)
from warploom.engines.flashinfer.single import (
    single_prefill_with_kv_cache as single_prefill_with_kv_cache,
)
from warploom.engines.flashinfer.single import (
    single_prefill_with_kv_cache_return_lse as single_prefill_with_kv_cache_return_lse,
)
from warploom.engines.flashinfer.sparse import (
    BlockSparseAttentionWrapper as BlockSparseAttentionWrapper,
)
from warploom.engines.flashinfer.states import merge_state as merge_state
from warploom.engines.flashinfer.states import merge_state_in_place as merge_state_in_place
from warploom.engines.flashinfer.states import merge_states as merge_states

_refuse_others(
    _sys.modules[__name__], (attention, cascade, decode, page, pod, prefill, quantization, sparse)
)
