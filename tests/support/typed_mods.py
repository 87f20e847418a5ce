"""Functions of captured tensors of small types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

ROWS = 24  # and keys
Mod = Callable[..., Any]


def extremes(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random numbers of a type, its ends and the numbers around 0 among them."""
    limits = torch.iinfo(dtype)
    rng = torch.Generator().manual_seed(seed)
    x = torch.randint(limits.min, limits.max + 1, (ROWS,), generator=rng, dtype=torch.int64)
    ends = [limits.min, limits.max, 0, 1, max(limits.min, -1), limits.min + 1, limits.max - 1]
    x[torch.randperm(ROWS, generator=rng)[: len(ends)]] = torch.tensor(ends)
    return x.to(dtype)


u, u2 = extremes(torch.uint8, 0), extremes(torch.uint8, 1)
c, c2 = extremes(torch.int8, 2), extremes(torch.int8, 3)
s, s2 = extremes(torch.int16, 4), extremes(torch.int16, 5)
n = extremes(torch.int32, 6)
flags, flags2 = u > 100, c > 0
byte, char = torch.tensor(200, dtype=torch.uint8), torch.tensor(-100, dtype=torch.int8)
where = torch.where
rows = torch.Generator().manual_seed(9)
left, right = (torch.randn(ROWS, 6, generator=rows) for _ in range(2))
weights = torch.randn(6, generator=rows)
bytes_ = torch.randint(0, 256, (ROWS, 3), generator=rows, dtype=torch.uint8)

# What is captured is read as x[i] by rows and x[j] by keys.
MODS: dict[str, Mod] = {
    "difference": lambda i, j: u[i] - u2[j],
    "complement": lambda i, j: ~u[j] + ~c[i] * 2 + ~s[i],
    "negation": lambda i, j: -u[j] - (-c[i]) + (-s[i]),
    "sum of shorts": lambda i, j: s[i] + s2[j],
    "product of shorts": lambda i, j: s[i] * s2[j],
    "product of bytes": lambda i, j: u[i] * u2[j],
    "uint8 and int8": lambda i, j: u[i] * c[j] + (u[j] - c[i]),
    "uint8 and int16": lambda i, j: u[i] * s[j],
    "int8 and int16": lambda i, j: (c[i] - s[j]) * 3,
    "with int32": lambda i, j: u[i] - n[j] // 3000 + (c[j] + n[i]) % 5000,
    "with positions": lambda i, j: (u[i] - j) * 2 + (c[j] + i),
    "Python ints": lambda i, j: (u[i] + 300) - (200 - c[j]) + s[i] * 70000,
    "Python ints that are negative": lambda i, j: (u[i] - 300) * -1 + (-129 + c[j]),
    "Python floats": lambda i, j: u[i] * 1.5 - c[j] / 2 + s[i] / u[i].clamp(min=1),
    "comparisons with what wraps": lambda i, j: (
        where(u[i] == -1, 1, 0) + where(u[j] > -1, 2, 0) + where(u[j] < 300, 4, 0)
        + where(c[i] < 200, 8, 0) + where(c[j] == 200, 16, 0) + where(s[j] >= -70000, 32, 0)
    ),
    "comparisons of types": lambda i, j: (
        where(u[i] > c[j], 1, 0) + where(c[i] <= s[j], 2, 0) + where(s[i] != u[j], 4, 0)
        + where(c[i] < n[j], 8, 0) + where(u[i] < 100.5, 16, 0)
    ),
    "shifts to the left": lambda i, j: (u[i] << 3) + (c[j] << 1) * 5 + (s[i] << (j % 9)),
    "shifts by small ints": lambda i, j: (u[i] << u2[j]) + (1 << u[i]) + (c[i] << c2[j]),
    "shifts to the right": lambda i, j: (u[i] >> (j % 12)) + (c[j] >> 9) + (s[i] >> c[j]),
    "shifts by too much": lambda i, j: (u[i] >> -1) + (u[j] << 300) + (c[i] << 8),
    "floor division": lambda i, j: c[i] // 3 + c[j] // -1 + u[i] // 300 + s[i] // -7,
    "division of each other": lambda i, j: c[i] // where(c2[j] == 0, 1, c2[j]) + s[j] // (i + 1),
    "remainders": lambda i, j: c[i] % -5 + u[j] % -3 + s[i] % 300 + c[j] % 200 + u[i] % (j + 1),
    "trunc and floor": lambda i, j: (
        torch.div(c[i], 3, rounding_mode="trunc") + torch.div(s[j], -7, rounding_mode="trunc")
        + torch.div(c[i], -3, rounding_mode="floor") + torch.div(u[j], 7, rounding_mode="trunc")
    ),
    "absolute values": lambda i, j: abs(c[i]) + torch.abs(s[j]) - abs(u[i]),
    "bits": lambda i, j: (u[i] & -2) + (c[j] | 65) - (s[i] ^ u[j]) + (u[i] & c[j]) + (u[j] ^ -1),
    "powers": lambda i, j: u[i] ** 2 + c[j] ** 3 + s[i] ** 2 + u[j] ** 9 + c[i] ** 0,
    "squares and signs": lambda i, j: (
        torch.square(c[i]) + torch.sign(c[j]) - torch.sign(u[i]) + torch.relu(s[j])
    ),
    "least and greatest": lambda i, j: (
        torch.maximum(c[i], u[j]) - torch.minimum(u[i], u2[j]) + s[i].clamp(-1000, 1000)
    ),
    "clamped": lambda i, j: u[i].clamp(min=-5) + c[j].clamp(max=100) + torch.clamp(u[j], 3, 200),
    "where": lambda i, j: (
        where(u[i] > 3, u[i], -1) + where(j > 5, c[i], u[j]) * 2 + where(i > j, c[i], 1) * 100
    ),
    "where of floats": lambda i, j: where(u[i] > 3, u[i], 1.5) + where(i > 5, c[j], 0.5),
    "numbers of no dimensions": lambda i, j: byte + u[i] - char * c[j] + (byte - char),
    "torch numbers": lambda i, j: u[i] + torch.tensor(300) - torch.tensor(3, dtype=torch.int32),
    "torch numbers of a type": lambda i, j: (
        u[i] * torch.tensor(3, dtype=torch.uint8) + (torch.tensor(300) + u[j]) * 2
        + c[i] * torch.tensor(7, dtype=torch.int16) - torch.maximum(u[i], torch.tensor(300))
        + torch.add(c[j], torch.tensor(100, dtype=torch.int8)) * 3
    ),
    "widened": lambda i, j: u[i].int() - u2[j].int() + c[i].long() * 200 + s[j].float() * 2,
    "functions": lambda i, j: torch.sqrt(u[i]) + torch.tanh(c[j]) + torch.exp(c[i] / 99.0),
    "truths": lambda i, j: (u[i].bool() & c[j].bool()).int() + u[i] * flags[j] + flags[i] * c[j],
    "of a step": lambda i, j: ((u[i] + 10) - (u2[j] + 10)) // 2 * 2 % 100 - ((c[i] * 2) >> 1),
    "chains that wrap twice": lambda i, j: (s[i] * s2[j] * 3 + s[j]) // 7 + (u[i] * 7 + u2[j]) % 11,
    "indices": lambda i, j: s[(u[j] % 24).int()] - s2[(abs(s[i] // 2) % 24).long()],
    "truths as numbers": lambda i, j: (
        (flags[i] + flags2[j]) * 3 + (flags[i] * flags2[j]) + flags[j] * 2.5 - flags2[i] * c[j]
        + torch.maximum(flags[i], flags2[j]) * 7 + torch.minimum(flags[i], flags2[j]).int() * 11
        + (flags[i] + 2) + where(flags[i] == flags2[j], 1, 0)
        + torch.minimum(c[i] * c[j], torch.square(flags2[j])) ** 3 % 1000
        + (torch.sign(flags[i]) + torch.sign(flags2[j])) * 5
    ),
    "bits of truths": lambda i, j: (
        (u[i] & flags[j]) + (flags[i] | s[j]) * 3 + (c[i] ^ flags2[j]) * 5 + (flags[i] & 3)
        + (4 | flags2[j]) + (n[i] & True) + (i ^ (j > 3)) * 7 + ((i > j) | j) + (False ^ u[j])
        + torch.bitwise_and(flags[i], s[j]) + torch.bitwise_or(u[i], True)
    ),
    "quotients and functions of truths": lambda i, j: (
        (flags[i] + 1) / (flags2[j] + 1) + flags[i] / (j + 1.5) + torch.exp(flags[j]) * 2
        + torch.sqrt(flags2[i]) + torch.true_divide(flags[i], flags[i] | True) + flags[i] / True
        + torch.sigmoid(i > j) + torch.sigmoid(u[i]) * 3 + torch.sigmoid(c[j])
        + torch.reciprocal(flags[i] | True)
    ),
    "casts to small types": lambda i, j: (
        (i * 100).to(torch.uint8) + n[j].to(torch.int8) + (n[i] // 7).to(torch.int16) * 2
        + u[i].to(torch.int8) + s[j].byte() + c[i].to(torch.uint8) + n[j].char() - n[i].short()
    ),
    "casts of floats": lambda i, j: (
        (i * 100.7).to(torch.uint8) + (j * -3.7).to(torch.int8) + (j * 999.5 - 9e4).to(torch.int16)
        + (i - 9.5).int() + (j * 0.3).bool()
    ),
    "casts to types of others": lambda i, j: (
        n[j].to(u.dtype) + n[i].to(c[j].dtype) + u[i].to(n[j]) * 300 + n[j].type_as(s[i])
        + u[j].to(torch.float32) / 2 + c[j].type(torch.int16) * s[i] + u[i].to(u.device)
    ),
    "new numbers": lambda i, j: (
        u[i] + u[j].new_full((), 200) + torch.full_like(c[i], 100) * c[j] + s[i].new_ones(()) * 7
        + torch.zeros_like(u[i]) - torch.ones_like(u[i]) + u[i].new_zeros((), dtype=torch.int16)
        + torch.full_like(u[j], 2.5, dtype=torch.float32) + u[i].new_full((), -1)
    ),
    "filled": lambda i, j: (
        u[i].masked_fill(i > j, 7) * 3 + s[i].masked_fill(flags[j], -9)
        + c[i].float().masked_fill(flags[i] & (j > 3), 0.25)
    ),
    "shapes": lambda i, j: u[i] * (len(u[i].shape) + u[i].ndim + u[i].dim() + 2) + i.new_full(
        j.shape, 5
    ),
    "products of rows": lambda i, j: (
        (left[i] * right[j]).sum(-1) + left[i] @ right[j] * 2 + torch.dot(left[j], right[i])
        + torch.sum(left[i] * weights * flags[j], dim=-1) - (left[i] - right[j]).abs().sum()
    ),
    "sums of rows": lambda i, j: (
        left[i].sum() * n[j].to(torch.int8) + bytes_[j].sum(-1) + (bytes_[i] * bytes_[j]).sum(-1)
        + (bytes_[i] > 100).sum(-1) * 3 + left[i].mean(-1) + (right[j] ** 2).mean()
    ),
    "rows of truths": lambda i, j: (
        where((bytes_[i] > bytes_[j]).any(-1), 1, 0) + where((bytes_[i] >= 20).all(-1), 2, 0)
    ),
    "functions of rows": lambda i, j: (
        torch.exp(-left[i]) * torch.maximum(right[j], left[j])
    ).sum(-1) + (2.0 * left[j] + where(i > j, 1.0, 2.0) * right[i]).sum(-1),
}  # fmt: skip


def scored(mod: Mod) -> Mod:
    """A score_mod whose result is far from saturating, and tells all numbers below 2^20 apart."""
    return lambda score, b, h, i, j: score + (mod(i, j) + 0.0) % 97.0 / 16.0
