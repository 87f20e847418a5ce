"""Batches that ranks compute together: every shipped variant, chains of all, formats.

Every process makes the same batch from a seed and keeps its own part of the keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import warploom as wl
from warploom import distributed as wld
from warploom.codegen.source import TileConfig
from warploom.runtime.formats import format_of
from warploom.runtime.formats.base import Drawn, Stored
from warploom.runtime.formats.lists import as_indptr
from warploom.serving.distributed.peers import Exchange

Q_HEADS, KV_HEADS, DIM = 4, 2, 16
# lengths that no world divides, fewer keys than ranks, no row, and more rows than keys
Q_LENS, KV_LENS = (1, 3, 0, 2, 12, 3), (37, 5, 9, 1, 21, 2)
FEW = {"q_lens": (1, 7, 3), "kv_lens": (13, 7, 2)}  # where each variant takes its time
TILE = TileConfig(16, 64, 1)  # one for all, so that few kernels are built


class Batch:
    """Tensors of whole sequences, and values for the fields of all variants."""

    def __init__(
        self, q_lens: tuple[int, ...] = Q_LENS, kv_lens: tuple[int, ...] = KV_LENS
    ) -> None:
        rng = self.rng = np.random.default_rng(3)
        self.q_lens, self.kv_lens = np.array(q_lens), np.array(kv_lens)
        self.q, self.k, self.v = (
            rng.standard_normal((int(np.sum(lens)), heads, DIM), dtype=np.float32)
            for lens, heads in ((q_lens, Q_HEADS), (kv_lens, KV_HEADS), (kv_lens, KV_HEADS))
        )
        self.qo_indptr, self.kv_indptr = as_indptr(q_lens), as_indptr(kv_lens)

    def per_request(self, x: Any, lens: Any) -> list[Any]:
        return np.split(x, np.cumsum(lens)[:-1])

    def floats(self, *shape: int) -> Any:
        return self.rng.standard_normal(shape, dtype=np.float32)

    def prefixes(self) -> Any:
        return np.array([9, 2, 0, 1, 15, 0], np.int32)[: len(self.q_lens)]

    def documents(self) -> Any:
        longest = int(self.kv_lens.max())
        return np.sort(self.rng.integers(0, 3, (len(self.kv_lens), longest)), 1).astype(np.int32)

    def masks(self, columns: Any) -> Any:
        pairs = zip(self.q_lens, columns, strict=True)
        return wl.pack_masks([self.rng.random((q, n)) < 0.6 for q, n in pairs])


def _scales(batch: Batch) -> Any:
    return np.abs(batch.floats(len(batch.kv_lens), int(batch.kv_lens.max()), KV_HEADS))


def _flex(batch: Batch) -> wl.Variant:
    bias = torch.from_numpy(batch.floats(Q_HEADS, 64))
    return wl.flex(
        lambda score, b, h, i, j: score + bias[h, j],
        lambda b, h, i, j: i >= j - 3,
        q_idx="position",
    )


def _positions(batch: Batch) -> wl.Variant:
    variant = wl.Rope(positions="sequence", scaling=wl.LinearScaling(2.0))
    variant.rope_positions = batch.documents() * 7
    return variant


class Rows(wl.Variant):
    """Reads what shipped variants do not: rows, lengths, and the state in the output transform."""

    table = wl.Tensor("float32", ("q_row", "q_head"))

    def query_transform(self, q: Any, at: wl.Position) -> Any:
        return q * self.table[at.q_row, at.q_head]

    def logits_transform(self, logits: Any, at: wl.Position) -> Any:
        return logits + wl.to_float(at.q_idx - at.kv_pos) / wl.to_float(at.kv_len + at.q_len)

    def output_transform(self, o: Any, at: wl.Position) -> Any:
        return o * wl.sigmoid(at.lse) + self.table[at.q_row, at.q_head] * wl.to_float(at.q_pos)


VARIANTS: dict[str, Callable[[Batch], wl.Variant]] = {
    "none": lambda batch: wl.Variant(),
    "Causal": lambda batch: wl.Causal(),
    "SlidingWindow": lambda batch: wl.SlidingWindow(6, 1, sinks=2),
    "SoftCap": lambda batch: wl.SoftCap(1.5),
    "Alibi": lambda batch: wl.Alibi(),
    "Rope": lambda batch: wl.Rope(interleaved=True, dim=8) & wl.Causal(),
    "Rope, positions": _positions,
    "QKNorm": lambda batch: wl.QKNorm(batch.floats(DIM), batch.floats(DIM)),
    "AttentionSink": lambda batch: wl.AttentionSink(batch.floats(Q_HEADS)) & wl.Causal(),
    "FlashSigmoid": lambda batch: wl.FlashSigmoid(bias=-2.0) & wl.Causal(),
    "PrefixLM": lambda batch: wl.PrefixLM(
        np.array([9, 2, 0, 1, 15, 0], np.int32)[: len(batch.q_lens)]
    ),
    "DocumentMask": lambda batch: wl.DocumentMask(batch.documents()),
    "PackedMask": lambda batch: wl.PackedMask(*batch.masks(batch.kv_lens)),
    "TreeMask": lambda batch: wl.TreeMask(*batch.masks(batch.q_lens)),
    "KVScale": lambda batch: wl.KVScale(0.5, 2.0),
    "HeadKVScale": lambda batch: wl.HeadKVScale(batch.floats(KV_HEADS), batch.floats(KV_HEADS)),
    "TokenKVScale": lambda batch: wl.TokenKVScale(_scales(batch), _scales(batch)),
    "flex": _flex,
    "rows": lambda batch: Rows(table=batch.floats(len(batch.q), Q_HEADS)),
}
# many at once, as compiled kernels; the first has an output transform, which is a kernel of its own
CHAINS = {
    "chain": ("Rope", "TokenKVScale", "SoftCap", "Alibi", "SlidingWindow", "DocumentMask",
              "AttentionSink"),
    "masks": ("QKNorm", "Rope", "Alibi", "PrefixLM", "PackedMask"),
}  # fmt: skip


def variant_of(name: str, batch: Batch) -> wl.Variant:
    """One of `VARIANTS` or of `CHAINS`."""
    first, *rest = (VARIANTS[each](batch) for each in CHAINS.get(name, (name,)))
    for link in rest:
        first = first & link
    return first


def options(backend: str | None) -> dict[str, Any]:
    sizes = {"num_q_heads": Q_HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM}
    tile = {"tile": TILE} if backend is None else {}
    return {**sizes, **tile, "dtype": "float32", "device": "cpu", "backend": backend}


def batch_for(name: str) -> Batch:
    return Batch() if name in CHAINS else Batch(**FEW)


def oracle(name: str) -> tuple[Any, Any]:
    """The same by the functors on float64 arrays."""
    batch = batch_for(name)
    variant = variant_of(name, batch)
    parts = (batch.per_request(x, lens) for x, lens in (
        (batch.q, batch.q_lens), (batch.k, batch.kv_lens), (batch.v, batch.kv_lens)))  # fmt: skip
    out, lse = wl.reference_batch(variant, *parts)
    return np.concatenate(out), np.concatenate(lse)


def decoded(names: list[str], backend: str | None, interleave: int, heads: Any) -> list[Any]:
    """Of each variant: output and log-sum-exp of this rank; the rows are the same on all."""
    return [_decode(name, backend, interleave, heads, wl.Ragged()) for name in names]


def _decode(
    name: str, backend: str | None, interleave: int, heads: Any, kv_format: Any, **more: Any
) -> tuple[Any, Any]:
    batch = Batch(**more) if more else batch_for(name)
    wrapper = wld.DecodeWrapper(
        variant_of(name, batch), interleave=interleave, heads=heads, kv_format=kv_format,
        **options(backend),
    )  # fmt: skip
    own = [wrapper.layout.positions(int(n), wrapper.rank) for n in batch.kv_lens]
    parts = [batch.per_request(x, batch.kv_lens) for x in (batch.k, batch.v)]
    k, v = ([x[at].copy() for x, at in zip(each, own, strict=True)] for each in parts)
    stored = _stored(kv_format, batch, k, v)
    wrapper.plan(batch.qo_indptr, **stored.plan, total_kv_lens=batch.kv_lens)
    q = torch.from_numpy(batch.q)
    if format_of(kv_format).batched:
        q = q.unflatten(0, (len(batch.q_lens), -1))
    is_hnd = kv_format.layout == "HND"
    kv = [torch.from_numpy(x.swapaxes(-3, -2) if is_hnd else x) for x in (stored.k, stored.v)]
    axis = 2 if format_of(kv_format).batched else 1
    if heads == "own":
        q = q.chunk(wrapper.world, axis)[wrapper.rank]
    swap = is_hnd and format_of(kv_format).batched
    out, lse = wrapper.run(q.transpose(1, 2) if swap else q, kv, return_lse=True)
    out, lse = (x.transpose(1, 2) if swap else x for x in (out, lse))
    rows = (0, 1) if axis == 2 else (0, 0)
    return out.flatten(*rows).numpy(), lse.flatten(*rows).numpy()


def _stored(kv_format: Any, batch: Batch, k: list[Any], v: list[Any]) -> Stored:
    """This rank's keys in a format; of block-sparse rows all blocks are listed."""
    if not isinstance(kv_format, wl.BlockSparse):
        return format_of(kv_format).store(Drawn(batch.rng, batch.q_lens.tolist(), k, v))
    lengths = [len(x) for x in k]
    blocks = [-(-n // kv_format.block[1]) for n in lengths]
    counts = np.repeat(blocks, -(-batch.q_lens // kv_format.block[0]))
    listed = np.concatenate([np.arange(n) for n in counts]).astype(np.int32)
    plan = {"kv_indptr": as_indptr(counts), "kv_indices": listed, "kv_lens": lengths}
    return Stored(np.concatenate(k), np.concatenate(v), plan, [])


def in_a_subgroup() -> Any:
    """The last rank and the first but one decode; what they find, None of others."""
    members = [1, dist.get_world_size() - 1]
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return None
    batch = batch_for("Alibi")
    wrapper = wld.DecodeWrapper(wl.Alibi(), group=group, **options("reference"))
    keys = wrapper.layout.indices(batch.kv_lens, wrapper.rank)
    own = as_indptr(wrapper.layout.local_len(batch.kv_lens, wrapper.rank))
    wrapper.plan(batch.qo_indptr, own, total_kv_lens=batch.kv_lens)
    q, k, v = (torch.from_numpy(x) for x in (batch.q, batch.k[keys], batch.v[keys]))
    out, lse = wrapper.run(q, (k, v), return_lse=True)
    return out.numpy(), lse.numpy()


def of_a_ring(kv_format: wl.Rolling, more: dict[str, Any]) -> tuple[Any, Any]:
    """Output and log-sum-exp by one wrapper over rolling caches."""
    batch = Batch(**more)
    k, v = (batch.per_request(x, batch.kv_lens) for x in (batch.k, batch.v))
    stored = _stored(kv_format, batch, k, v)
    wrapper = wl.AttentionWrapper(wl.Alibi(), kv_format=kv_format, **options("reference"))
    wrapper.plan(batch.qo_indptr, **stored.plan)
    kv = (torch.from_numpy(stored.k), torch.from_numpy(stored.v))
    out, lse = wrapper.run(torch.from_numpy(batch.q), kv, return_lse=True)
    return out.numpy(), lse.numpy()


def decoded_format(kv_format: Any, more: dict[str, Any]) -> tuple[Any, Any]:
    return _decode("Alibi", "reference", 1, "all", kv_format, **more)


def prefilled(names: list[str], backend: str | None, method: Any, block: int) -> list[Any]:
    """Of each variant: rows of this rank, their output and log-sum-exp. Block 0 is zig-zag."""
    found = []
    for name in names:
        batch = batch_for(name)
        wrapper = wld.PrefillWrapper(
            variant_of(name, batch),
            method=method,
            layout=(lambda world: wld.Interleaved(world, block)) if block else None,
            **options(backend),
        )
        rows = wrapper.layout.indices(batch.q_lens, wrapper.rank)
        keys = wrapper.layout.indices(batch.kv_lens, wrapper.rank)
        wrapper.plan(batch.q_lens, batch.kv_lens)
        q, k, v = (torch.from_numpy(x) for x in (batch.q[rows], batch.k[keys], batch.v[keys]))
        out, lse = wrapper.run(q, (k, v), return_lse=True)
        found.append((rows, out.numpy(), lse.numpy()))
    return found


def sent(tokens: int) -> dict[str, float]:
    """Bytes that this rank sends for one sequence, by wrapper."""
    found = {}
    plain = {**options("reference"), "dtype": "bfloat16"}
    q, k, v = torch.randn(3, tokens, Q_HEADS, DIM, dtype=torch.bfloat16)
    k, v = k[:, :KV_HEADS], v[:, :KV_HEADS]
    for heads in ("all", "own"):
        decode = wld.DecodeWrapper(heads=heads, **plain)
        own = tokens // decode.world
        decode.plan([0, 3], [0, own], total_kv_lens=[tokens])
        given = q[:3] if heads == "all" else q[:3, :: decode.world]
        decode.run(given, (k[:own], v[:own]))
        found[heads] = decode.bytes_sent
    for method in ("ring", "all_gather"):
        prefill = wld.PrefillWrapper(method=method, **plain)
        own = tokens // prefill.world
        prefill.plan([tokens])
        prefill.run(q[:own], (k[:own], v[:own]))
        found[method] = prefill.bytes_sent
    return found


def order_of_a_ring() -> list[str]:
    """What a ring's prefill does, in order."""
    done: list[str] = []

    def noted(owner: Any, name: str) -> None:
        before = getattr(owner, name)

        def call(*args: Any, **named: Any) -> Any:
            done.append(name)
            return before(*args, **named)

        setattr(owner, name, call)

    wrapper = wld.PrefillWrapper(**options("reference"))
    wrapper.plan([16])
    noted(wrapper._peers, "start")
    for part in wrapper._parts:
        noted(part, "run")
    wait = Exchange.wait
    try:
        noted(Exchange, "wait")
        own = int(wrapper.layout.local_len(16, wrapper.rank))
        q, k = torch.randn(own, Q_HEADS, DIM), torch.randn(own, KV_HEADS, DIM)
        wrapper.run(q, (k, k))
    finally:
        Exchange.wait = wait  # type: ignore[method-assign]
    return done


def replanned(names: list[str]) -> list[list[Any]]:
    """Decodes under `cuda_graph`, which lets nothing move: two plans of one wrapper."""
    found = []
    for name in names:
        batch = batch_for(name)
        bounds = wl.Bounds(8, 32, 128)
        wrapper = wld.DecodeWrapper(
            variant_of(name, batch), interleave=3, bounds=bounds, cuda_graph=True, **options(None)
        )
        results = []
        for lengths in (batch.kv_lens // 2, batch.kv_lens):
            own = wrapper.layout.local_len(lengths, wrapper.rank)
            inputs = _shortened(batch, lengths)
            wrapper.plan(batch.qo_indptr, as_indptr(own), total_kv_lens=lengths, **inputs)
            parts = (batch.per_request(x, batch.kv_lens) for x in (batch.k, batch.v))
            kv = [
                torch.from_numpy(np.concatenate(
                    [x[wrapper.layout.positions(int(n), wrapper.rank)]
                     for x, n in zip(each, lengths, strict=True)]
                ))
                for each in parts
            ]  # fmt: skip
            out, lse = wrapper.run(torch.from_numpy(batch.q), kv, return_lse=True)
            results.append((out.numpy(), lse.numpy()))
        found.append(results)
    return found


def _shortened(batch: Batch, lengths: Any) -> dict[str, Any]:
    """A mask of the pairs of a shorter batch, of bits that a seed gives."""
    rng = np.random.default_rng(11)
    masks = [rng.random((q, n)) < 0.6 for q, n in zip(batch.q_lens, lengths, strict=True)]
    bits, indptr = wl.pack_masks(masks)
    return {"packed_mask": bits, "mask_indptr": indptr}


def replanned_oracle(name: str) -> list[tuple[Any, Any]]:
    """What `replanned` must give."""
    batch, found = batch_for(name), []
    variant = variant_of(name, batch)
    for lengths in (batch.kv_lens // 2, batch.kv_lens):
        pairs = [batch.per_request(x, batch.kv_lens) for x in (batch.k, batch.v)]
        k, v = ([x[:n] for x, n in zip(each, lengths, strict=True)] for each in pairs)
        q, inputs = batch.per_request(batch.q, batch.q_lens), _shortened(batch, lengths)
        out, lse = wl.reference_batch(variant, q, k, v, inputs=inputs)
        found.append((np.concatenate(out), np.concatenate(lse)))
    return found
