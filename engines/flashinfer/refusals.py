"""What FlashInfer's calls take and these do not serve: refused by name, with what to do instead."""

from __future__ import annotations

from typing import Any, NoReturn

from warploom.engine_errors import UnsupportedByEngine
from warploom.errors import ArgumentError

_CALLS = "FlashInfer's calls"
_BACKENDS = (
    *("auto", "fa2", "fa3", "cute-dsl", "cutlass", "fmha_v2", "trtllm-gen"),
    *("vsa_sm100_blk128", "vsa_sm100_blk64", "vsa_sm120_blk64"),
)
_ENCODINGS = ("NONE", "ROPE_LLAMA", "ALIBI")

_ITEMS = (
    "no mask is made of lengths of items",
    "Give custom_mask=..., or serve a warploom.Variant with a logits_mask by AttentionWrapper.",
)
_CODE = (
    "CUDA text of FlashInfer's templates is not compiled",
    "Write a class of warploom.Variant, whose functors are Python, for warploom.AttentionWrapper.",
)
_APART = (
    "keys, values and rows of a request begin at the same places in all tensors",
    "Leave it out, and give tensors that lie so.",
)
_NARROW = (
    "queries have no scales for each head, as 8-bit queries would",
    "Give q, k and v in 16 bits, or 8-bit k and v with the numbers k_scale and v_scale.",
)
_WHY = {
    "jit_args": _CODE,
    "jit_kwargs": _CODE,
    "kv_cache_sf": (
        "4-bit keys and values have no kernel",
        "Keep them in 16 bits, or in 8 with k_scale and v_scale.",
    ),
    **dict.fromkeys(
        ("prefix_len_ptr", "token_pos_in_items_ptr", "token_pos_in_items_len", "max_item_len_ptr"),
        _ITEMS,
    ),
    **dict.fromkeys(("v_indptr", "o_indptr"), _APART),
    **dict.fromkeys(("scale_q", "scale_k", "scale_v"), _NARROW),
    "o_scale": ("outputs of 8 bits have no kernel", "Leave it out, and scale the output."),
    "skip_softmax_threshold_scale_factor": (
        "no key is skipped for its weight, so that results would differ",
        "Leave it out: attention is exact then.",
    ),
    "uses_spcompress": ("compressed caches have no kernel", "Leave it out."),
    "window_right": (
        "decodes see no key after their own",
        "Use warploom.SlidingWindow(left, right) with AttentionWrapper.",
    ),
    "block_mask": (
        "blocks are those of all heads",
        "Give indptr and indices, and plan heads that differ by wrappers of their own.",
    ),
    "profiler_buffer": ("kernels write no such profile", "Use warploom.trace instead."),
    "use_profiler": ("kernels write no such profile", "Use warploom.trace instead."),
}


def refuse(what: str, reason: str, remedy: str) -> NoReturn:
    """Raises UnsupportedByEngine."""
    raise UnsupportedByEngine(engine=_CALLS, what=what, reason=reason, remedy=remedy)


def refuse_given(**given: Any) -> None:
    """Refuse arguments that change results and have no counterpart, unless they are left out.

    Raises:
        UnsupportedByEngine: one is neither None, False nor 0.
    """
    for name, value in given.items():
        if value is not None and not (isinstance(value, (bool, int)) and not value):
            refuse(name, *_WHY[name])


def refuse_more(more: tuple[Any, ...]) -> None:
    """Refuse arguments behind the named ones, which FlashInfer hands to kernels of the user's."""
    if more:
        reason, remedy = _CODE
        given = f"{len(more)} arguments of run without a name"
        refuse(given, f"they are those of jit_args, and {reason}", f"Name k_scale=... . {remedy}")


def checked_backend(backend: str) -> None:
    """A back end is a hint of speed, but for cuDNN's, whose calls mean something else.

    Raises:
        UnsupportedByEngine: cuDNN's, or an unknown one.
    """
    if backend not in _BACKENDS:
        reason = "its index arrays count elements, or it is not known"
        refuse(f"backend={backend!r}", reason, "Leave it out, and count rows and pages.")


def checked_layout(kv_layout: Any) -> Any:
    """ "NHD" or "HND"; raises ArgumentError for others."""
    if kv_layout not in ("NHD", "HND"):
        reason = f"is {kv_layout!r}; expected 'NHD' or 'HND'"
        raise ArgumentError(name="kv_layout", reason=reason)
    return kv_layout


def checked_encoding(mode: str) -> str:
    """One of FlashInfer's encodings; raises ArgumentError for others."""
    if mode not in _ENCODINGS:
        reason = f"is {mode!r}; expected one of {', '.join(_ENCODINGS)}"
        raise ArgumentError(name="pos_encoding_mode", reason=reason)
    return mode
