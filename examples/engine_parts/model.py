"""A small decoder of random weights whose rows do not depend on how many others there are.

Greedy tokens of a batch equal those of a request alone only if logits are equal to the last bit,
but matrix products of libraries sum in an order that depends on the number of rows. Here no order
matters, since no sum rounds: weights are multiples of 2^-10 below 2, activations are rounded to
multiples of 2^-12 up to 1024, and float64 holds any sum of a million of their products exactly.
The rest is multiplication, division and square roots, which IEEE 754 rounds in one way only; there
is no exponential, hence ReLU instead of SiLU. Integer products of quantised models are exact for
the same reason. Attention is left to the caller, and must have the same property.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

# (layer, q, k, v), each [rows, heads, head_dim] -> output [rows, heads, head_dim]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder with grouped-query attention."""

    vocabulary: int = 128
    hidden: int = 64
    layers: int = 3
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32


def fixed(x: torch.Tensor) -> torch.Tensor:
    """The nearest numbers with 12 binary places, at most 1024 in size."""
    return (x.double() * 2**12).round().clamp(-(2**22), 2**22) / 2**12


def norm(x: torch.Tensor) -> torch.Tensor:
    """RMSNorm; squares have 44 bits, so 64 of them add up exactly."""
    return fixed(x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt())


class Decoder:
    """Layers of attention and gated ReLU, between an embedding and a head.

    Later layers add less than the first one, so that this one is a fair draft of all.
    """

    def __init__(self, shape: Shape, device: str, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weights(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
            drawn = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
            steps = (drawn * scale * columns**-0.5 * 2**10).round()
            return (steps.clamp(-(2**11), 2**11) / 2**10).to(device)

        self.shape, hidden = shape, shape.hidden
        self.embedding = weights(shape.vocabulary, hidden) * hidden**0.5
        self.head = weights(shape.vocabulary, hidden)
        qkv = (shape.q_heads + 2 * shape.kv_heads) * shape.head_dim
        self.layers = []
        for scale in [1.0] + [0.25] * (shape.layers - 1):
            layer = {
                "qkv": weights(qkv, hidden),
                "out": weights(hidden, shape.q_heads * shape.head_dim, 2 * scale),
                "up": weights(2 * hidden, hidden),
                "gate": weights(2 * hidden, hidden),
                "down": weights(hidden, 2 * hidden, scale),
            }
            self.layers.append(layer)

    def __call__(self, tokens: torch.Tensor, attend: Attend, layers: int | None) -> torch.Tensor:
        """Logits [rows, vocabulary] float64 of tokens [rows], after the first layers or all."""
        shape, x = self.shape, self.embedding[tokens]
        heads = [shape.q_heads, shape.kv_heads, shape.kv_heads]
        for number, layer in enumerate(self.layers[:layers]):
            qkv = fixed(norm(x) @ layer["qkv"].T).unflatten(-1, (-1, shape.head_dim))
            attended = attend(number, *qkv.split(heads, dim=1))
            x = fixed(x + fixed(attended.flatten(1)) @ layer["out"].T)
            h = norm(x)
            gated = fixed(h @ layer["up"].T) * fixed(h @ layer["gate"].T).relu()
            x = fixed(x + fixed(gated) @ layer["down"].T)
        return norm(x) @ self.head.T
