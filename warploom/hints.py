"""What an unknown name may have meant: the nearest known one, or what other libraries call it."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

_SCALE = "The factor of q.k is called sm_scale."
_CAUSAL = "Causality is a variant: warploom.Causal()."
_MASK = "A mask is a variant: warploom.PackedMask, or a class of your own with logits_mask."
_BIAS = "A bias is a variant: a class of your own with a Tensor field and logits_transform."
_CAP = "A cap of the logits is a variant: warploom.SoftCap(cap)."
_WINDOW = "A window is a variant: warploom.SlidingWindow(left, right)."
_LAYOUT = "The layout belongs to the format: kv_format=warploom.Paged(16, layout='HND')."
_PAGE = "The page size belongs to the format: kv_format=warploom.Paged(page_size)."
_FLEX = "Wrap it: variant=warploom.flex(score_mod, mask_mod)."
_BLOCK_MASK = f"The blocks that a mask shows are derived from it. {_FLEX}"
_TABLE = "A page table is planned as kv_indptr, kv_indices and last_page_len of warploom.Paged."
_OUT = (
    "A planned wrapper writes into your tensors: AttentionWrapper.run(q, (k, v), out=..., lse=...)."
)
_DECODE = (
    "It belongs to the tile: tile=warploom.TileConfig(rows, keys, decode=warploom.TileConfig(...))."
)
_KEYS = "It is an option of the wrapper: AttentionWrapper(..., key_transform=...)."
_LENS = "Lengths are kv_lens in attention(), kv_indptr (paged: and last_page_len) in plan()."

_ROTATED = "Encodings are variants: warploom.Rope(...) and warploom.Alibi(slopes)."
_SINKS = (
    "Learned sinks are a variant: warploom.AttentionSink(sink), whose field is sink. A window that "
    "leaves the first keys visible is made with a number of them: warploom.SlidingWindow(left, "
    "sinks=0) takes others at run time."
)
_NO_WORKSPACE = "Leave it out: wrappers allocate what they need, or take workspace=... of yours."
_NO_BUFFERS = (
    "Leave it out: with cuda_graph=True and bounds=warploom.Bounds(...) a wrapper has such memory."
)
_NO_JIT = "A variant is a class with functors in Python: warploom.Variant."
_NO_LENGTH = (
    "Leave it out: lengths follow from the index arrays, and max_kv_len of warploom.Bounds is the "
    "most that they may be."
)
_SCALES = "Scales of 8-bit keys and values are a variant: warploom.KVScale(k, v)."
_DIVIDED = (
    "What is stored is divided by its scale in key_transform and value_transform of a variant of "
    "your own."
)
_ROWS = "Rows of request i are indptr[i] to indptr[i + 1], the last tokens of its pages."

# names in the calls of torch, FlashAttention and FlashInfer -> what stands for them here
_ELSEWHERE = {
    "scale": _SCALE,
    "softmax_scale": _SCALE,
    "causal": _CAUSAL,
    "is_causal": _CAUSAL,
    "attn_mask": _MASK,
    "custom_mask": _MASK,
    "mask": _MASK,
    "packed_custom_mask": _MASK,
    "attn_bias": _BIAS,
    "logits_soft_cap": _CAP,
    "softcap": _CAP,
    "window_left": _WINDOW,
    "window_size": _WINDOW,
    "alibi_slopes": "ALiBi is a variant: warploom.Alibi.",
    "score_mod": _FLEX,
    "mask_mod": _FLEX,
    "block_mask": _BLOCK_MASK,
    "kernel_options": "Leave it out: tiles are chosen for the batch, and AttentionWrapper(..., "
    "tile=...) fixes one.",
    "return_aux": "Runs take it, and attention().",
    "return_max_scores": "Ask by return_aux=warploom.AuxRequest(max_scores=True).",
    "paged_kv_indptr": "It is called kv_indptr.",
    "append_key": "It is called k.",
    "append_value": "It is called v.",
    "paged_kv_cache": "It is called kv.",
    "paged_kv_last_page_len": "It is called last_page_len.",
    "kv_last_page_len": "It is called last_page_len.",
    "batch_indices": _ROWS,
    "positions": _ROWS,
    "block_tables": _TABLE,
    "seq_lens": _LENS,
    "cache_seqlens": _LENS,
    "enable_gqa": "Leave it out: grouped queries follow from the number of heads.",
    "dropout_p": "Leave it out: warploom serves inference, which drops nothing.",
    "k_scale": _SCALES,
    "v_scale": _SCALES,
    "q_scale": "Queries of 8 bits are not taken; a factor of q.k is sm_scale of the wrapper.",
    "sinks": _SINKS,
    "slopes": "Slopes that each run gives are warploom.Alibi('input').",
    **dict.fromkeys(("pos_encoding_mode", "rope_scale", "rope_theta"), _ROTATED),
    "out": _OUT,
    "lse": _OUT,
    "max_scores": _OUT,
    "key_transform": _KEYS,
    "decode": _DECODE,
    "layout": _LAYOUT,
    "kv_layout": _LAYOUT,
    "page_size": _PAGE,
    "q_data_type": "The type of q is called dtype.",
    "kv_data_type": "The type of k and v is called kv_dtype.",
    "o_data_type": "The output has the type of q, which is called dtype.",
    "use_tensor_cores": "Leave it out: tiles, on tensor cores or not, are chosen for the batch.",
    "enable_pdl": "Leave it out: launches overlap where the GPU can do it.",
    "non_blocking": "Leave it out: plan waits for nothing but index arrays that lie on a GPU.",
    "fixed_split_size": "The same bits in any batch are had by AttentionWrapper(..., "
    "batch_invariant=True).",
    **dict.fromkeys(("max_sequence_kv", "max_token_per_sequence"), _NO_LENGTH),
    **dict.fromkeys(("jit_args", "jit_kwargs"), _NO_JIT),
    **dict.fromkeys(
        ("workspace_buffer", "float_workspace_buffer", "int_workspace_buffer"), _NO_WORKSPACE
    ),
    **dict.fromkeys(
        (
            "qo_indptr_buf",
            "paged_kv_indptr_buf",
            "paged_kv_indices_buf",
            "paged_kv_last_page_len_buf",
            "paged_kv_indptr_buffer",
            "paged_kv_indices_buffer",
            "paged_kv_last_page_len_buffer",
            "custom_mask_buf",
            "mask_indptr_buf",
        ),
        _NO_BUFFERS,
    ),
}

# What goes to `attention` in place of `flex_attention`, whose arguments are torch's.
_ATTENTION = (
    "It is an argument of warploom.attention(q, k, v, variant=warploom.flex(score_mod, mask_mod), "
    "layout='HND')"
)
_FLEX_MASK = "give torch's create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN) as block_mask"
_FLEX_TENSOR = (
    f"A tensor of bools is read by mask_mod=lambda b, h, q_idx, kv_idx: mask[b, q_idx, kv_idx]; "
    f"{_FLEX_MASK}. What is added to scores is read by a score_mod."
)
_FLEX_BIAS = "It is a score_mod: lambda score, b, h, q_idx, kv_idx: score + bias[h, q_idx, kv_idx]."
_FLEX_CAP = "It is a score_mod: lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap)."
_FLEX_WINDOW = (
    "It is mask_mod=lambda b, h, q_idx, kv_idx: (q_idx - kv_idx <= left) & (kv_idx - q_idx <= "
    f"right); {_FLEX_MASK}."
)
_FLEX_CAUSAL = f"It is mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx; {_FLEX_MASK}."
_FLEX_ALIBI = (
    "It is a score_mod: lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)."
)
_FLEX_SINKS = "They are of warploom.attention(..., variant=warploom.flex(...) & "
_FLEX_SINKS += "warploom.AttentionSink(sink), layout='HND')."
_FLEX_TOKENS = (
    "Tensors are [batch, heads, tokens, dim] here; of [batch, tokens, heads, dim] give "
    "x.transpose(1, 2), or call warploom.attention, which takes a layout."
)
_FLEX_LENGTHS = f"Rows have one length here. {_ATTENTION}, as kv_lens, or plan a wrapper."
_FLEX_TILES = "Leave it out: tiles are chosen for the batch, and blocks are of the block_mask."
_OF_FLEX_ATTENTION = {
    **dict.fromkeys(("softmax_scale", "sm_scale"), "The factor of q.k is called scale."),
    **dict.fromkeys(("layout", "kv_layout"), _FLEX_TOKENS),
    **dict.fromkeys(("is_causal", "causal"), _FLEX_CAUSAL),
    **dict.fromkeys(("attn_mask", "mask", "custom_mask", "key_padding_mask"), _FLEX_TENSOR),
    **dict.fromkeys(("attn_bias", "bias"), _FLEX_BIAS),
    **dict.fromkeys(("softcap", "logits_soft_cap", "soft_cap"), _FLEX_CAP),
    **dict.fromkeys(("window_size", "window_left", "sliding_window"), _FLEX_WINDOW),
    **dict.fromkeys(("mask_mod", "mask_fn"), f"{_FLEX_MASK[0].upper()}{_FLEX_MASK[1:]}."),
    **dict.fromkeys(("variant", "inputs", "backend", "lse_base"), f"{_ATTENTION}."),
    **dict.fromkeys(
        ("kv_lens", "seq_lens", "cache_seqlens", "cu_seqlens_q", "cu_seqlens_k"), _FLEX_LENGTHS
    ),
    **dict.fromkeys(("sinks", "s_aux"), _FLEX_SINKS),
    **dict.fromkeys(("block_size", "BLOCK_SIZE", "BLOCK_M", "BLOCK_N", "tile"), _FLEX_TILES),
    **dict.fromkeys(("training", "deterministic"), "Leave it out: warploom serves inference."),
    "q": "It is called query.",
    "k": "It is called key.",
    "v": "It is called value.",
    "return_softmax_lse": "It is called return_lse.",
    "alibi_slopes": _FLEX_ALIBI,
    "q_idx": "It counts rows from 0 here, as in torch; warploom.flex(..., q_idx='position') counts "
    "them among the keys, for warploom.attention.",
}


# the same names, given to a call to which they mean something else
_OF_CALL = {
    "flex_attention": _OF_FLEX_ATTENTION,
    "flex": {
        **dict.fromkeys(
            ("layout", "kv_layout"),
            "It belongs to the call: warploom.attention(..., variant=..., layout='HND').",
        ),
        **dict.fromkeys(
            ("scale", "softmax_scale", "sm_scale"),
            "It belongs to the call: warploom.attention(..., variant=..., sm_scale=...).",
        ),
    },
    "append": dict.fromkeys(("k_scale", "v_scale"), _DIVIDED),
    "run": dict.fromkeys(
        ("k", "v", "key", "value", "keys", "values", "k_cache", "v_cache", "key_cache",
         "value_cache"),
        "Keys and values are one argument: run(q, (k, v)).",
    )
    | {"query": "It is called q."},
}  # fmt: skip
_UNLIKE = ("q_scale",)  # of those, what resembles an input and is another thing
_HEAD_DIMS = {"head_dim_qk": "head_dim", "head_dim_vo": "head_dim_v"}

# what an argument of one class or function is called elsewhere -> here
_CALLED = {
    **dict.fromkeys(("AttentionWrapper", "PageSelectionWrapper", "Appender"), _HEAD_DIMS),
    "append": {"kv_layout": "layout"},
    "AttentionSink": {"sinks": "sink"},
    "Bounds": dict.fromkeys(
        ("max_batch", "max_batch_size", "batch_size", "max_seqs", "max_num_seqs"), "max_requests"
    )
    | dict.fromkeys(("max_tokens", "max_num_tokens", "max_num_batched_tokens"), "max_q_rows")
    | dict.fromkeys(("max_seq_len", "max_seqlen", "max_model_len"), "max_kv_len")
    | dict.fromkeys(("max_pages", "max_num_pages", "num_pages"), "max_blocks"),
    "SlidingWindow": dict.fromkeys(("window", "window_size", "window_left", "size"), "left")
    | {"window_right": "right", "num_sinks": "sinks"},
    "Rope": dict.fromkeys(("base", "rope_theta"), "theta")
    | {"rotary_dim": "dim", "scale": "scaling", "rope_scaling": "scaling"},
    "Paged": {"block_size": "page_size"},
    "Composed": {"block_size": "page_size"},
    "SoftCap": dict.fromkeys(("softcap", "logits_soft_cap", "soft_cap"), "cap"),
}

_SHORT = {"k_scale": "k", "v_scale": "v"}
# fields that the constructor of a shipped variant takes by another name
_CONSTRUCTED = {
    "KVScale": _SHORT,
    "HeadKVScale": _SHORT,
    "TokenKVScale": _SHORT,
    "QKNorm": {"norm_eps": "eps"},
}


_ATTEND = "Prefill and decode are one: warploom.AttentionWrapper(variant, kv_format=warploom."
_ONE_CALL = "It is warploom.attention(q, k, v, variant=...), of tensors with a batch axis."
_NO_BLOCK_MASK = (
    "Take torch's for warploom.flex_attention, or leave it out: warploom.flex(mask_mod=...) "
    "derives the blocks that a mask shows."
)

# names of modules of FlashInfer, torch and FlashAttention -> what stands for them here
_FOREIGN = {
    **dict.fromkeys(
        (
            "BatchPrefillWithPagedKVCacheWrapper",
            "BatchDecodeWithPagedKVCacheWrapper",
            "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
            "BatchAttention",
            "PODWithPagedKVCacheWrapper",
            "BatchPODWithPagedKVCacheWrapper",
        ),
        f"{_ATTEND}Paged(page_size), ...).",
    ),
    "BatchPrefillWithRaggedKVCacheWrapper": f"{_ATTEND}Ragged(), ...).",
    "BatchMLAPagedAttentionWrapper": "MLA is not there yet.",
    "VariableBlockSparseAttentionWrapper": "The nearest is kv_format=warploom.BlockSparse("
    "block=(R, C)), whose blocks have one size; what varies within a block a "
    "logits_mask says.",
    "BlockSparseAttentionWrapper": "It is warploom.AttentionWrapper(variant, kv_format="
    "warploom.BlockSparse(block=(R, C)), ...).",
    **dict.fromkeys(
        (
            "MultiLevelCascadeAttentionWrapper",
            "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
            "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
        ),
        "It is warploom.AttentionWrapper(variant, kv_format=warploom.Composed(page_size), ...), "
        "which finds levels in the page table.",
    ),
    **dict.fromkeys(
        ("append_paged_kv_cache", "append_paged_kv_cache_by_lens"),
        "It is warploom.append, or warploom.Appender for every layer of a step.",
    ),
    **dict.fromkeys(
        (
            "single_prefill_with_kv_cache",
            "single_decode_with_kv_cache",
            "flash_attn_func",
            "scaled_dot_product_attention",
        ),
        _ONE_CALL,
    ),
    **dict.fromkeys(
        ("flash_attn_varlen_func", "flash_attn_with_kvcache"),
        f"{_ATTEND}Ragged() or warploom.Paged(page_size), ...).",
    ),
    **dict.fromkeys(("create_block_mask", "create_mask", "BlockMask"), _NO_BLOCK_MASK),
    "get_batch_indices_positions": f"Leave it out. {_ROWS}",
    "get_seq_lens": f"Leave it out. {_TABLE}",
    "merge_state_in_place": "It is warploom.merge_state, which returns a new state.",
    **dict.fromkeys(
        ("apply_rope", "apply_rope_inplace", "apply_llama31_rope"),
        "Encodings are variants: warploom.Rope(...).",
    ),
    **dict.fromkeys(
        ("packbits", "segment_packbits"),
        "Masks of bits are made by warploom.pack_masks, for warploom.PackedMask.",
    ),
    "and_masks": "Variants are chained by &; masks of warploom.flex are joined by & in one "
    "mask_mod.",
    "or_masks": "Conditions are joined by | in one mask_mod of warploom.flex, or one logits_mask.",
    "noop_mask": "Leave it out: without a mask all keys are visible.",
    "softmax": "Kernels normalise by themselves; a variant with softmax = False does without.",
    "explain": "It is a method of wrappers: attention.explain().",
}


# names that engines/flashinfer has, with FlashInfer's own arguments
_CALLED_AS_THERE = frozenset(
    (
        "BatchAttention",
        "BatchAttentionWithAttentionSinkWrapper",
        "BatchDecodeWithPagedKVCacheWrapper",
        "BatchPODWithPagedKVCacheWrapper",
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
        "BlockSparseAttentionWrapper",
        "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
        "MultiLevelCascadeAttentionWrapper",
        "append_paged_kv_cache",
        "fast_decode_plan",
        "get_batch_indices_positions",
        "get_seq_lens",
        "merge_state_in_place",
        "packbits",
        "segment_packbits",
        "single_decode_with_kv_cache",
        "single_decode_with_kv_cache_return_lse",
        "single_prefill_with_kv_cache",
        "single_prefill_with_kv_cache_return_lse",
    )
)
_AS_THERE = " Called as there, it is in warploom.engines.flashinfer."


def elsewhere(name: str) -> str:
    """A sentence or two about what stands for a name of another library; empty if nothing does."""
    here = f" {_FOREIGN[name]}" if name in _FOREIGN else ""
    return here + (_AS_THERE if name in _CALLED_AS_THERE else "")


def meant(call: str, name: str) -> str:
    """A sentence about what other libraries call an argument of this class; empty if it is none."""
    if found := _CONSTRUCTED.get(call, {}).get(name):
        return f" It is called {found} here ({name} in plan and run)."
    found = _CALLED.get(call, {}).get(name)
    return f" It is called {found}." if found else ""


_OF_TOKENS = ", as wl.HeadKVScale and wl.TokenKVScale do"
_SEVERAL = {  # by the names of fields that ship
    "k_scale": _OF_TOKENS,
    "v_scale": _OF_TOKENS,
    "sinks": ", as wl.AttentionSink does for learned sinks",
}


def for_several(name: str, dtype: str) -> str:
    """What to do with several numbers where a field is declared as one, without a full stop."""
    return f"for several, declare the field as Tensor({dtype!r}, axes){_SEVERAL.get(name, '')}"


def hint(name: str, known: Sequence[str], arguments: Sequence[str] = (), call: str = "") -> str:
    """A sentence about an unknown name, with a space before it; empty if there is nothing to say.

    Args:
        name: what was given.
        known: names of the variant's inputs; the nearest comes first.
        arguments: names of the call's own arguments.
        call: its name, if a name of another library may mean something else to it.
    """
    near = [] if name in _UNLIKE else get_close_matches(name, known, n=1)
    fields = (own.get(name) for own in _CALLED.values()) if not near else ()
    for field in fields:
        if field in known:  # the variant is there already
            return f" It is called {field}."
    stands = {**_ELSEWHERE, **_OF_CALL.get(call, {})}.get(name)
    if not near and stands:
        return f" {stands}"
    near = near or get_close_matches(name, arguments, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
