"""Decoder models as what one device of a tensor-parallel cluster reads and computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Operation(NamedTuple):
    """A product or attention on one device.

    Attributes:
        bytes: of weights or keys that it reads; activations are small beside them in decoding.
        work: operations, two for each multiply-add.
    """

    name: str
    bytes: float
    work: float


@dataclass(frozen=True)
class ModelShape:
    """A decoder.

    Attributes:
        name: of the model.
        layers: decoder layers.
        hidden, ffn: widths of activations and of the MLP.
        heads, kv_heads, head_dim: of attention.
        experts, active: MLPs of a layer, and those that a token takes.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    head_dim: int = 128
    experts: int = 1
    active: int = 1

    def attention(
        self, devices: int, rows: float, kv_bytes: float, pairs: float, size: int
    ) -> list[Operation]:
        """What comes between the collective of an MLP and that of attention, in order.

        A device has at least one key/value head.

        Args:
            devices: of the cluster.
            rows: query rows of all requests.
            kv_bytes: of one key/value head's keys and values, of all requests.
            pairs: query rows times the keys that each sees.
            size: bytes of a number.
        """
        heads = self.heads / devices
        kv_heads = max(1.0, self.kv_heads / devices)
        project = self.hidden * self.head_dim * (heads + 2 * kv_heads)
        out = heads * self.head_dim * self.hidden
        return [
            Operation("qkv", project * size, 2 * rows * project),
            Operation("attention", kv_heads * kv_bytes, 4 * pairs * heads * self.head_dim),
            Operation("out", out * size, 2 * rows * out),
        ]

    def mlp(self, devices: int, rows: float, size: int) -> list[Operation]:
        """What comes between the collective of attention and that of the MLP; all experts are read.

        Args:
            devices, rows, size: of `attention`.
        """
        weight = self.hidden * self.ffn / devices
        return [
            Operation(name, n * self.experts * weight * size, 2 * rows * n * self.active * weight)
            for name, n in (("gate and up", 2), ("down", 1))
        ]


LLAMA3_8B = ModelShape("Llama3-8B", 32, 4096, 32, 8, 14336)
LLAMA3_70B = ModelShape("Llama3-70B", 80, 8192, 64, 8, 28672)
LLAMA3_405B = ModelShape("Llama3-405B", 126, 16384, 128, 8, 53248)

# those of the design space exploration (PRESERVE, section 5), as their configurations say
MODELS = (
    LLAMA3_8B,
    LLAMA3_70B,
    LLAMA3_405B,
    ModelShape("Qwen2-7B", 28, 3584, 28, 4, 18944),
    ModelShape("Qwen2-72B", 80, 8192, 64, 8, 29568),
    ModelShape("Qwen1.5-110B", 80, 8192, 64, 8, 49152),
    ModelShape("Phi3-small", 32, 4096, 32, 8, 14336),
    ModelShape("Phi3-medium", 40, 5120, 40, 10, 17920),
    ModelShape("Phi3.5-MoE", 32, 4096, 32, 8, 6400, experts=16, active=2),
    ModelShape("Mistral-7B", 32, 4096, 32, 8, 14336),
    ModelShape("Mixtral-8x7B", 32, 4096, 32, 8, 14336, experts=8, active=2),
    ModelShape("Mixtral-8x22B", 56, 6144, 48, 8, 16384, experts=8, active=2),
)
