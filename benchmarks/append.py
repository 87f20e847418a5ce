"""New keys and values into a paged cache, as they are, rotated, in 8 bits: steps and a chunk.

    python benchmarks/append.py [--quick] [--only warploom] [--out FOLDER]

GB/s count what must be moved: new keys and values read once, what the cache stores of them written
once. 8 key/value heads of 128, bf16, pages of 16 scattered over the cache. Steps of few requests
move so little that they take what a kernel takes to start; `ms` in the results is their figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import peers_flashinfer as flashinfer
import torch
from batches import Shape, label, lengths, page_table, starts
from harness import Case, Check, Implementation, Thunk
from prefill_variants import rope_truth
from tables import Setting, Table, Trial, main

import warploom as wl

PAGE, DIM = 16, 128
THETA = 10000.0
TOLERANCE = 1e-2  # relative; bf16 rounds to 4e-3, and copies are exact


class Quantised(wl.Variant):
    """Divides by a scale for each head, which `wl.HeadKVScale` multiplies with again."""

    k_scale = wl.Tensor("float32", ("kv_head",))
    v_scale = wl.Tensor("float32", ("kv_head",))

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.k_scale, self.v_scale = k, v

    def key_transform(self, k: Any, at: Any) -> Any:
        return k / self.k_scale[at.kv_head]

    def value_transform(self, v: Any, at: Any) -> Any:
        return v / self.v_scale[at.kv_head]


def scales(heads: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Powers of two, so that a division is exact wherever it is done."""
    k = 2.0 ** (torch.arange(heads, device=device) % 4 - 5).float()
    return k, 2 * k


@dataclass(frozen=True)
class Way:
    """What happens to keys and values on the way, and what the cache stores."""

    narrow: bool = False
    rotated: bool = False

    @property
    def stored(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.narrow else torch.bfloat16

    def variant(self, heads: int, device: torch.device) -> wl.Variant | None:
        rope = wl.Rope(THETA) if self.rotated else None
        if not self.narrow:
            return rope
        quantised = Quantised(*scales(heads, device))
        return quantised if rope is None else rope & quantised


WAYS = {
    "bf16": Way(),
    "bf16, RoPE": Way(rotated=True),
    "e4m3": Way(narrow=True),
    "e4m3, RoPE": Way(narrow=True, rotated=True),
}


@dataclass(frozen=True)
class Batch:
    """What one layer appends.

    Attributes:
        shape: `q_lens` are the new tokens of each request, `kv_lens` all of its tokens.
        k, v: [rows, kv heads, dim], new.
        cache: [2, pages, page size, kv heads, dim].
        tables: indptr, kv_indptr, kv_indices, last_page_len, int32 on the device.
    """

    way: Way
    shape: Shape
    k: torch.Tensor
    v: torch.Tensor
    cache: torch.Tensor
    tables: tuple[torch.Tensor, ...]

    @property
    def unchanged(self) -> bool:
        """Whether the cache stores keys and values as they come."""
        return self.way == Way()

    def places(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Request, position in it and token of the cache, int64 [rows]."""
        device = self.k.device
        new, total = (
            torch.tensor(x, device=device) for x in (self.shape.q_lens, self.shape.kv_lens)
        )
        request = torch.arange(len(new), device=device).repeat_interleave(new)
        indptr, kv_indptr, pages, _ = (table.long() for table in self.tables)
        position = torch.arange(len(request), device=device) + (total - new - indptr[:-1])[request]
        page = pages[kv_indptr[request] + position // PAGE]
        return request, position, page * PAGE + position % PAGE


def make_batch(way: Way, shape: Shape, device: torch.device) -> Batch:
    k, v = torch.randn(2, sum(shape.q_lens), shape.kv_heads, shape.dim, device=device).bfloat16()
    kv_indptr, indices, last_page_len = page_table(shape.kv_lens, PAGE)
    sizes = (2, len(indices), PAGE, shape.kv_heads, shape.dim)
    cache = torch.zeros(*sizes, dtype=torch.uint8, device=device).to(way.stored)
    tables = (starts(shape.q_lens), kv_indptr, indices, last_page_len)
    return Batch(way, shape, k, v, cache, tuple(table.to(device) for table in tables))


def check_append(batch: Batch) -> Check:
    """Compares the whole cache: new tokens, and that nothing else is written."""
    way, (_, position, token) = batch.way, batch.places()
    k, v = batch.k.double(), batch.v.double()
    if way.rotated:  # [rows, heads, dim]: heads before rows for the positions
        k = rope_truth(k.transpose(0, 1), position).transpose(0, 1)
    if way.narrow:
        k, v = (x / s[:, None] for x, s in zip((k, v), scales(k.shape[1], k.device), strict=True))
    expected = torch.zeros(batch.cache.shape, dtype=torch.bfloat16, device=k.device)
    for part, new in zip(expected, (k, v), strict=True):
        part.view(-1, *new.shape[1:])[token] = new.to(way.stored).to(torch.bfloat16)
    size = float(expected.float().norm())

    def relative_error(output: torch.Tensor) -> float:
        return float((output.to(torch.bfloat16) - expected).float().norm()) / size

    return Check(relative_error, TOLERANCE)


def into_blank(
    prepare: Callable[[Sequence[Any]], Callable[[Any], object]], batches: Sequence[Batch]
) -> list[Thunk]:
    """Calls that return the cache; what another contestant wrote is removed first."""
    append = prepare(batches)
    for batch in batches:
        batch.cache.view(torch.uint8).zero_()

    def call(batch: Batch) -> torch.Tensor:
        append(batch)
        return batch.cache

    return [partial(call, batch) for batch in batches]


def warploom(batches: Sequence[Batch]) -> Callable[[Batch], object]:
    first = batches[0]
    device, heads = first.k.device, first.shape.kv_heads
    appender = wl.Appender(
        first.way.variant(heads, device), kv_format=wl.Paged(PAGE), num_kv_heads=heads,
        head_dim=DIM, dtype=first.k.dtype, kv_dtype=first.cache.dtype, device=device,
    )  # fmt: skip
    return lambda one: appender(one.k, one.v, tuple(one.cache), *one.tables)


CONTESTANTS = tuple(
    Implementation(name, partial(into_blank, prepare))
    for name, prepare in (("warploom", warploom), ("FlashInfer", flashinfer.append))
)


def append_trials(setting: Setting) -> Iterator[Trial]:
    heads = 8 if setting.on_gpu else 2
    old = lengths("uniform", 1024, 256)
    steps = setting.pick((16, 128, 1024), 4)
    batches = {f"{n} x 1": ((1,) * n, tuple(1 + have for have in old[:n])) for n in steps}
    chunk = 8192 if setting.on_gpu else 100
    batches[f"1 x {label(chunk)}"] = (chunk,), (2 * chunk + 3,)
    for name, way in WAYS.items():
        for size, (new, total) in batches.items():
            shape = Shape(new, total, heads, heads, DIM, torch.bfloat16, PAGE)
            moved = 2 * sum(new) * heads * DIM * (2 + way.stored.itemsize)
            params = {
                "new": sum(new), "requests": len(new), "tokens": sum(total), "kv_heads": heads,
                "head_dim": DIM, "page_size": PAGE, "dtype": "bfloat16",
                "stored": str(way.stored).removeprefix("torch."), "rope": way.rotated,
                "bytes": moved,
            }  # fmt: skip
            case = Case(f"{size}, {name}", moved / 1e9, "GB/s", moved, params)
            yield Trial(case, partial(make_batch, way, shape), check_append, CONTESTANTS)


TABLES = (Table("append", append_trials, ("copy", "matmul")),)

if __name__ == "__main__":
    main(TABLES, __doc__ or "")
