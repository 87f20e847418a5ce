"""Tables of prefill with other variants: shipped ones, a user's own, and fused RoPE.

Each is written down once for warploom, once for FlexAttention and once as the truth in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import peers_flashinfer as flashinfer
import torch
from batches import Inputs, Truth, even_batch, label
from harness import Implementation, Thunk
from peers import causal_mod, flex, planned, warploom
from tables import Setting, Trial, attention_trial

import warploom as wl

FP16 = 2e-3  # tolerance; a wrong mask or scale is far above it
SOFT_CAP, WINDOW, ROPE_BASE = 50.0, 1024, 10000.0
LENGTHS = (1024, 8192)
ROPE_LENGTHS = (1024, 2048, 8192)  # between them the better way changes

# --- shipped variants -----------------------------------------------------------------------------


def alibi_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """The paper's slopes, for a power of two of heads."""
    return torch.exp2(-8.0 * torch.arange(1, heads + 1, device=device) / heads)


def soft_cap(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    return SOFT_CAP * torch.tanh(logits / SOFT_CAP)


def soft_cap_mods(device: torch.device) -> Any:
    return lambda score, b, h, i, j: soft_cap(score), causal_mod


def alibi(heads: int, logits: Any, head: int, q_pos: Any, kv_pos: Any) -> Any:
    return logits + alibi_slopes(heads, logits.device)[head] * (kv_pos - q_pos)


def alibi_mods(heads: int, device: torch.device) -> Any:
    slopes = alibi_slopes(heads, device)
    return lambda score, b, h, i, j: score + slopes[h] * (j - i), causal_mod


def windowed(head: int, q_pos: Any, kv_pos: Any) -> Any:
    return (kv_pos <= q_pos) & (q_pos - kv_pos < WINDOW)


def window_mods(device: torch.device) -> Any:
    return None, lambda b, h, i, j: windowed(h, i, j)


def variant_trials(setting: Setting) -> Iterator[Trial]:
    heads = even_batch(0, setting.on_gpu).q_heads
    kinds: dict[str, tuple[Truth, Sequence[Implementation]]] = {
        "soft-cap": (
            Truth(logits=soft_cap, tolerance=FP16),
            (warploom(lambda _: wl.Causal() & wl.SoftCap(SOFT_CAP)), flex(soft_cap_mods),
             flashinfer.ragged("fa3", logits_soft_cap=SOFT_CAP)),
        ),
        "ALiBi": (
            Truth(logits=partial(alibi, heads), tolerance=FP16),
            (warploom(lambda _: wl.Causal() & wl.Alibi()), flex(partial(alibi_mods, heads)),
             flashinfer.head_bias(alibi_slopes)),
        ),
        "window": (
            Truth(mask=windowed, tolerance=FP16),
            (warploom(lambda _: wl.Causal() & wl.SlidingWindow(WINDOW - 1)), flex(window_mods),
             flashinfer.ragged("fa3", window_left=WINDOW - 1)),
        ),
    }  # fmt: skip
    for name, (truth, contestants) in kinds.items():
        for length in setting.pick(LENGTHS, 128):
            shape = even_batch(length, setting.on_gpu)
            flops = shape.flops(WINDOW if name == "window" else None)
            yield attention_trial(
                f"{name} {label(length)}", shape, contestants, unit="TFLOP/s", truth=truth,
                flops=flops,
            )  # fmt: skip


# --- a user's own functors ------------------------------------------------------------------------


class HeadColumnBias(wl.Variant):
    """Causal attention with a logit bias read for each head and each column."""

    strength = wl.Tensor("float32", ("q_head",))
    bias = wl.Tensor("float32", ("kv_pos",))

    def logits_transform(self, logits: Any, at: Any) -> Any:
        return logits + self.strength[at.q_head] * self.bias[at.kv_pos]

    def logits_mask(self, at: Any) -> Any:
        return at.kv_pos <= at.q_pos


class HeadColumnMask(wl.Variant):
    """Causal attention from which a tensor takes single columns, others for each head."""

    kept = wl.Tensor("int32", ("q_head", "kv_pos"))

    def logits_mask(self, at: Any) -> Any:
        return (at.kv_pos <= at.q_pos) & (self.kept[at.q_head, at.kv_pos] != 0)


class OwnData:
    """What those functors read, for warploom, for FlexAttention and for the truth."""

    def __init__(self, heads: int, length: int) -> None:
        self.heads, self.length = heads, length

    def strength(self, device: torch.device) -> torch.Tensor:
        return torch.linspace(-1.0, 1.0, self.heads, device=device)

    def bias(self, device: torch.device) -> torch.Tensor:
        return torch.sin(torch.arange(self.length, device=device) * 0.1)

    def kept(self, device: torch.device) -> torch.Tensor:
        """int32 [heads, length]: one column in eight is taken out, never column 0."""
        head, column = torch.arange(self.heads)[:, None], torch.arange(self.length)[None, :]
        return ((column == 0) | ((column + head) % 8 != 7)).to(device, torch.int32)

    def bias_variant(self, device: torch.device) -> wl.Variant:
        return HeadColumnBias(strength=self.strength(device), bias=self.bias(device))

    def bias_mods(self, device: torch.device) -> Any:
        strength, bias = self.strength(device), self.bias(device)
        return lambda score, b, h, i, j: score + strength[h] * bias[j], causal_mod

    def bias_truth(self, logits: Any, head: int, q_pos: Any, kv_pos: Any) -> Any:
        device = logits.device
        return logits + self.strength(device)[head] * self.bias(device)[kv_pos]

    def mask_variant(self, device: torch.device) -> wl.Variant:
        return HeadColumnMask(kept=self.kept(device))

    def mask_mods(self, device: torch.device) -> Any:
        kept = self.kept(device)
        return None, lambda b, h, i, j: (i >= j) & (kept[h, j] != 0)

    def mask_truth(self, head: int, q_pos: Any, kv_pos: Any) -> Any:
        return (kv_pos <= q_pos) & (self.kept(kv_pos.device)[head][kv_pos] != 0)


def own_trials(setting: Setting) -> Iterator[Trial]:
    for length in setting.pick(LENGTHS, 128):
        shape, name = even_batch(length, setting.on_gpu), label(length)
        own = OwnData(shape.q_heads, length)
        trial = partial(attention_trial, shape=shape, unit="TFLOP/s")
        yield trial(
            f"own transform {name}",
            implementations=(warploom(own.bias_variant), flex(own.bias_mods)),
            truth=Truth(logits=own.bias_truth, tolerance=FP16),
        )
        yield trial(
            f"own mask {name}",
            implementations=(warploom(own.mask_variant), flex(own.mask_mods, by_head=True)),
            truth=Truth(mask=own.mask_truth, tolerance=FP16),
        )
        for row in ("own transform", "own mask"):
            yield trial(
                f"{row} {name}", implementations=(warploom(name="warploom causal"),),
                truth=Truth(tolerance=FP16),
            )  # fmt: skip


# --- RoPE -----------------------------------------------------------------------------------------


def rope_angles(position: torch.Tensor, dim: int) -> torch.Tensor:
    """float64 [positions, dim]: the angle of each lane, pairs half a head apart."""
    lane = torch.arange(dim // 2, device=position.device, dtype=torch.float64)
    return torch.cat([position[:, None] * ROPE_BASE ** (-2.0 / dim * lane)] * 2, -1)


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """RoPE of [..., dim] vectors in at least float32; torch makes one kernel of it."""
    wide = x if x.dtype == torch.float64 else x.float()
    first, second = wide.chunk(2, -1)
    return (wide * cosine + torch.cat((-second, first), -1) * sine).to(x.dtype)


def rope_truth(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    angle = rope_angles(position, x.shape[-1])
    return rotate(x, angle.cos(), angle.sin())


def run_separate_rope(inputs: Sequence[Inputs]) -> list[Thunk]:
    """A RoPE kernel for queries and one for keys, then attention without RoPE."""
    first, shape = inputs[0], inputs[0].shape
    attention = planned(wl.Causal(), first)
    position = torch.cat([torch.arange(n, device=first.q.device) for n in shape.q_lens])
    angle = rope_angles(position, shape.dim)[:, None]
    tables = angle.cos().float(), angle.sin().float()
    compiled: Callable[..., torch.Tensor] = torch.compile(rotate, dynamic=False)

    def call(batch: Inputs) -> torch.Tensor:
        q, k = compiled(batch.q, *tables), compiled(batch.k, *tables)
        return attention.run(q, (k, batch.v))

    return [partial(call, batch) for batch in inputs]


def rope_trials(setting: Setting) -> Iterator[Trial]:
    rope = partial(warploom, lambda _: wl.Causal() & wl.Rope(ROPE_BASE))
    contestants = [rope()]  # which chooses where keys are rotated
    if setting.on_gpu:
        ways = ("fused", "before")
        contestants += [rope(name=f"warploom {way}", key_transform=way) for way in ways]
    contestants.append(Implementation("separate kernel", run_separate_rope))
    for length in setting.pick(ROPE_LENGTHS, 128):
        shape, name = even_batch(length, setting.on_gpu), f"RoPE {label(length)}"
        yield attention_trial(
            name, shape, contestants, unit="TFLOP/s",
            truth=Truth(rotate=rope_truth, tolerance=2 * FP16),  # rotated vectors are rounded
        )  # fmt: skip
        without = (warploom(name="warploom without"),)
        yield attention_trial(name, shape, without, unit="TFLOP/s", truth=Truth(tolerance=FP16))
