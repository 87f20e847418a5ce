"""Shipped variants that generated ones are joined with: their text, and what they do."""

from __future__ import annotations

_LOGITS, _MASK, _OUTPUT = "logits_transform", "logits_mask", "output_transform"
_KEY_HEAD = "fdiv(to_float(add(at['kv_head'], num(1))), num(64.0))"
_TOKEN = (
    "fdiv(to_float(add(remainder(at['kv_pos'], num(3)), add(at['kv_head'], num(1)))), num(64.0))"
)
_TOKENS = "(torch.arange(5000)[None, :, None] % 3 + torch.arange(KEY_HEADS) + 1) / 64"

# text: (hook, what it does as a text of the reference) of each hook
SHIPPED: dict[str, tuple[tuple[str, str], ...]] = {
    "wl.Causal()": ((_MASK, "le(at['kv_pos'], at['q_pos'])"),),
    "wl.SlidingWindow(9)": (
        (_MASK, "ge(at['kv_pos'], sub(maximum(at['q_pos'], num(0)), num(9)))"),
    ),
    "wl.SlidingWindow(70, 0)": (
        (_MASK, "le(at['kv_pos'], at['q_pos']) & ge(at['kv_pos'], sub(at['q_pos'], num(70)))"),
    ),
    "wl.SoftCap(5.0)": ((_LOGITS, "fmul(num(5.0), tanh(fdiv(logits, num(5.0))))"),),
    "wl.Alibi(torch.arange(1, 1 + HEADS) / 64)": (
        (
            _LOGITS,
            "fadd(logits, fmul(fdiv(to_float(add(at['q_head'], num(1))), num(64.0)), "
            "to_float(sub(at['kv_pos'], at['q_pos']))))",
        ),
    ),
    "wl.Rope(500.0)": (
        ("query_transform", "rope(q, at['q_pos'], 500.0)"),
        ("key_transform", "rope(k, at['kv_pos'], 500.0)"),
    ),
}
# Scales of 8-bit keys and values, which stand before all others
SCALES: dict[str, tuple[tuple[str, str], ...]] = {
    "wl.KVScale(0.0625, 0.25)": (
        (_LOGITS, "fmul(logits, num(0.0625))"),
        (_OUTPUT, "fmul(o, num(0.25))"),
    ),
    "wl.HeadKVScale(torch.arange(1, 1 + KEY_HEADS) / 64, torch.arange(1, 1 + KEY_HEADS) / 64)": (
        (_LOGITS, f"fmul(logits, {_KEY_HEAD})"),
        (_OUTPUT, f"fmul(o, {_KEY_HEAD})"),
    ),
    f"wl.TokenKVScale(({_TOKENS}).expand(64, -1, -1), ({_TOKENS}).expand(64, -1, -1))": (
        (_LOGITS, f"fmul(logits, {_TOKEN})"),
        ("value_transform", f"fmul(v, {_TOKEN})"),
    ),
}
KNOWN = {**SHIPPED, **SCALES}
