"""What a trial is of: a kernel, and a batch for it."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.codegen.source import TileConfig
from warploom.dsl.types.formats import KVFormat
from warploom.runtime.launching.pretransformed_keys import Way


@dataclass(frozen=True)
class Setup:
    """What a kernel is compiled for.

    Attributes:
        kv_format: storage of keys and values.
        dtype: of q, k, v and the output.
        head_dim, head_dim_v: lengths of vectors.
        device: "cpu" or "cuda".
        tile: tile to use; None leaves the choice to warploom.
        kv_dtype: of k and v, if another than `dtype`.
        max_scores: whether the kernel tells each row's largest score.
        key_transform: where keys are transformed.
    """

    kv_format: KVFormat
    dtype: str = "float32"
    head_dim: int = 64
    head_dim_v: int = 64
    device: str = "cpu"
    tile: TileConfig | None = None
    kv_dtype: str | None = None
    max_scores: bool = False
    key_transform: Way = "auto"

    def __str__(self) -> str:
        dims = f"{self.head_dim}/{self.head_dim_v}"
        dtypes = self.dtype + (f" with {self.kv_dtype} keys and values" if self.kv_dtype else "")
        return f"{self.kv_format}, {dtypes}, head_dim {dims}, {self.device}"


@dataclass(frozen=True)
class Case:
    """One batch.

    Attributes:
        setup: what the kernel is compiled for.
        q_lens, kv_lens: lengths of each request.
        num_kv_heads: key/value heads.
        group_size: query heads of each.
        scale: standard deviation of q; large ones make the softmax sharp.
        seed: of all values, and of page tables.
        sm_limit: CTAs that may get work; few have many items each. None: all.
    """

    setup: Setup
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_kv_heads: int = 1
    group_size: int = 1
    scale: float = 1.0
    seed: int = 0
    sm_limit: int | None = None

    @property
    def num_q_heads(self) -> int:
        return self.num_kv_heads * self.group_size

    def __str__(self) -> str:
        heads = f"{self.num_q_heads} query heads, {self.num_kv_heads} key/value heads"
        lengths = f"q_lens {list(self.q_lens)}, kv_lens {list(self.kv_lens)}"
        rest = f"scale of q {self.scale}, seed {self.seed}, sm_limit {self.sm_limit}"
        return f"{self.setup}\n  {lengths}\n  {heads}, {rest}"
