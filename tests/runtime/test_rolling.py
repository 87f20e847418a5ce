"""Rolling caches: what a ring has kept is attended as if the sequence had never been cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.emulator import Emulator

import warploom as wl
from warploom import errors
from warploom.codegen.source import TileConfig
from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.runtime.trials.case import Case, Setup
from warploom.runtime.trials.trials import mismatch

HEADS, KV_HEADS, DIM = 4, 2, 16
SHAPE: dict[str, Any] = {
    "num_q_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "dtype": "float32",
    "device": "cpu",
}  # fmt: skip


class Kept(wl.Variant):
    """What a ring of 8 slots and 3 sinks leaves of a whole sequence."""

    def logits_mask(self, at: Position) -> Value:
        return (at.kv_pos < 3) | (at.kv_pos >= at.kv_len - 8)


class Sequences:
    """Sequences that grow, whole and in rolling caches."""

    def __init__(self, kv_format: wl.Rolling, lengths: list[int]) -> None:
        self.format = kv_format
        self.generator = torch.Generator().manual_seed(3)
        self.k, self.v = (self.draw(len(lengths), 64, KV_HEADS) for _ in range(2))
        shape = (len(lengths), kv_format.slots, KV_HEADS, DIM)
        self.caches = [torch.full(shape, torch.nan) for _ in range(2)]
        self.lengths = [0] * len(lengths)
        self.grow(lengths)

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, DIM, generator=self.generator)

    def grow(self, by: list[int]) -> None:
        for request, more in enumerate(by):
            for position in range(self.lengths[request], self.lengths[request] + more):
                slot = self.format.slot_of(position)
                for cache, whole in zip(self.caches, (self.k, self.v), strict=True):
                    cache[request, slot] = whole[request, position]
            self.lengths[request] += more

    def given(self) -> tuple[torch.Tensor, ...]:
        if self.format.layout == "NHD":
            return tuple(self.caches)
        return tuple(x.transpose(1, 2).contiguous() for x in self.caches)


def indptr(lengths: list[int]) -> list[int]:
    return [0, *np.cumsum(lengths).tolist()]


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_growing_sequence_is_what_a_mask_leaves_of_it(layout: Any, backend: str | None) -> None:
    kept = wl.Rolling(8, 3, layout=layout)
    sequences = Sequences(kept, [2, 30, 11])
    variant = wl.Causal() & wl.Alibi()
    rolling = wl.AttentionWrapper(variant, kv_format=kept, backend=backend, **SHAPE)
    whole = wl.AttentionWrapper(variant & Kept(), kv_format=wl.Dense(), **SHAPE)
    for rows in (1, 1, 3, 8, 1):
        sequences.grow([rows, rows, rows])
        q = sequences.draw(3, rows, HEADS)
        lengths = indptr(sequences.lengths)
        rolling.plan(indptr([rows] * 3), lengths)
        whole.plan(indptr([rows] * 3), lengths)
        out, lse = rolling.run(q.flatten(0, 1), sequences.given(), return_lse=True)
        wanted, of_rows = whole.run(q, (sequences.k, sequences.v), return_lse=True)
        torch.testing.assert_close(out, wanted.flatten(0, 1), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse, of_rows.flatten(0, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_positions_in_the_cache_count_what_is_kept(backend: str | None) -> None:
    kept = wl.Rolling(8, 3, positions="cache")
    sequences = Sequences(kept, [40, 5])
    variant = wl.Causal() & wl.Rope()
    rolling = wl.AttentionWrapper(variant, kv_format=kept, backend=backend, **SHAPE)
    rolling.plan([0, 2, 4], indptr(sequences.lengths))
    q = sequences.draw(4, HEADS)
    out = rolling.run(q, sequences.given())
    for request, length in enumerate(sequences.lengths):
        own = torch.tensor([n for n in range(length) if n < 3 or n >= length - 8])
        rows = slice(2 * request, 2 * request + 2)
        k, v = (x[request, own][None] for x in (sequences.k, sequences.v))
        wanted = wl.attention(q[None, rows], k, v, variant=variant)
        torch.testing.assert_close(out[rows], wanted[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("sinks", [0, 3])
def test_rows_that_have_overwritten_what_they_see_are_refused(
    sinks: int, backend: str | None
) -> None:
    """A window of 8 keys by its mask, in rings of as many slots and of more."""
    shown = wl.Causal() & wl.SlidingWindow(7, sinks=sinks)
    whole = wl.AttentionWrapper(shown, kv_format=wl.Dense(), **SHAPE)
    rows = [1, 4]
    for slots in (8, 10, 11):
        sequences = Sequences(wl.Rolling(slots, sinks), [30, 40])
        rolling = wl.AttentionWrapper(shown, kv_format=sequences.format, backend=backend, **SHAPE)
        lengths = indptr(sequences.lengths)
        if slots < 11:
            with pytest.raises(errors.ArgumentError, match=rf"request 1 4 rows.* {sinks}\) has s"):
                rolling.plan(indptr(rows), lengths)
            rolling.plan(indptr(rows), lengths, left=7 - (11 - slots))  # of which none is lost
            rolling.plan(indptr([1, 1]), lengths, left=7)
            continue
        rolling.plan(indptr(rows), lengths)
        q = sequences.draw(2, 4, HEADS)
        whole.plan(indptr([4, 4]), lengths)
        wanted = whole.run(q, (sequences.k, sequences.v))
        out = rolling.run(torch.cat([q[0, 3:], q[1]]), sequences.given())
        torch.testing.assert_close(out, torch.cat([wanted[0, 3:], wanted[1]]), rtol=1e-4, atol=1e-5)


def test_a_refused_step_keeps_no_value() -> None:
    rolling = wl.AttentionWrapper(wl.SlidingWindow(3), kv_format=wl.Rolling(8), **SHAPE)
    with pytest.raises(errors.ArgumentError, match=r"Rolling\(11, 0\) has slots enough"):
        rolling.plan([0, 4], [0, 40], left=7)
    rolling.plan([0, 4], [0, 40])
    rolling.plan([0, 4], [0, 8], left=7)  # not around yet
    rolling.plan([0, 4], [0, 40], left=20)  # the ring decides, for a row alone, too


def test_masks_with_holes_are_asked_key_by_key() -> None:
    class Sparse(wl.Variant):
        """Every fourth of 6 keys."""

        def logits_mask(self, at: Position) -> Value:
            return (at.kv_pos % 4 == at.q_pos % 4) & (at.kv_pos > at.q_pos - 6)

    def plan(slots: int) -> None:
        wl.AttentionWrapper(Sparse(), kv_format=wl.Rolling(slots), **SHAPE).plan([0, 3], [0, 40])

    plan(7)  # row 37 sees 33 and 37 of 32 to 37; 32 is lost
    with pytest.raises(errors.ArgumentError, match="its first row sees"):
        plan(6)


def test_masks_that_nobody_can_tell_of_are_let_alone() -> None:
    class Documents(wl.Variant):
        """A window within the document."""

        of = wl.Tensor("int32", ("batch", "kv_pos"))

        def logits_mask(self, at: Position) -> Value:
            near = (at.kv_pos <= at.q_pos) & (at.q_pos - at.kv_pos < 8)
            return near & (self.of[at.batch, at.kv_pos] == self.of[at.batch, at.q_pos])

    begins_late = (torch.arange(40) >= 34).int()[None]
    sequences = Sequences(wl.Rolling(8), [40])
    rolling = wl.AttentionWrapper(Documents(), kv_format=sequences.format, **SHAPE)
    rolling.plan([0, 3], [0, 40], of=begins_late)
    q = sequences.draw(3, HEADS)
    whole = wl.AttentionWrapper(Documents(), kv_format=wl.Ragged(), **SHAPE)
    whole.plan([0, 3], [0, 40], of=begins_late)
    wanted = whole.run(q, (sequences.k[0, :40], sequences.v[0, :40]))
    torch.testing.assert_close(rolling.run(q, sequences.given()), wanted, rtol=1e-4, atol=1e-5)


def test_slots_of_arrays_are_those_of_numbers() -> None:
    ring = wl.Rolling(5, 2)
    slots = [ring.slot_of(n) for n in range(20)]
    assert slots == [0, 1, *[2 + n % 5 for n in range(18)]]
    assert ring.slot_of(np.arange(20, dtype=np.int32)).tolist() == slots
    found = ring.slot_of(torch.arange(20, dtype=torch.int32))
    assert found.tolist() == slots
    assert found.dtype == torch.int32


def test_caches_may_have_any_strides() -> None:
    """Neither a multiple of the other: a batch entry ends in the middle of a slot."""
    sequences = Sequences(wl.Rolling(8, 3), [40, 5])
    rolling = wl.AttentionWrapper(wl.Causal(), kv_format=sequences.format, **SHAPE)
    rolling.plan([0, 1, 2], indptr(sequences.lengths))
    q = sequences.draw(2, HEADS)
    wanted = rolling.run(q, sequences.given())
    strides = (11 * 3 * 24 + 10, 3 * 24, 24, 1)
    odd = [torch.empty(2000).as_strided(x.shape, strides).copy_(x) for x in sequences.caches]
    more = [torch.cat([x, torch.full_like(x, torch.nan)]) for x in sequences.caches]
    assert torch.equal(rolling.run(q, tuple(odd)), wanted)
    assert torch.equal(rolling.run(q, tuple(more)), wanted)  # entries of no request


def test_bounds_hold_whole_sequences_and_lists_of_what_is_kept() -> None:
    declared = {"kv_format": wl.Rolling(8, 3), **SHAPE}
    with pytest.raises(errors.ArgumentError, match=r"max_requests \* min\(max_kv_len, 11\) = 22"):
        wl.AttentionWrapper(wl.Causal(), bounds=wl.Bounds(2, 4, 64), **declared)
    bounds = wl.Bounds(2, 4, 64, 22)
    rolling = wl.AttentionWrapper(wl.Causal(), bounds=bounds, cuda_graph=True, **declared)
    sequences = Sequences(wl.Rolling(8, 3), [40, 50])
    free = wl.AttentionWrapper(wl.Causal(), **declared)
    for lengths in ([0, 40, 90], [0, 3, 50]):
        q = sequences.draw(3, HEADS)
        for wrapper in (rolling, free):
            wrapper.plan([0, 1, 3], lengths)
        assert torch.equal(*(each.run(q, sequences.given()) for each in (rolling, free)))
    with pytest.raises(errors.BoundsExceeded, match="max_kv_len"):
        rolling.plan([0, 1, 3], [0, 40, 105])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "window=0"),
        ({"window": 0}, "window to be an integer"),
        ({"window": 4, "sinks": -1}, "sinks one from 0 on"),
        ({"window": 4, "sinks": 2.0}, "sinks one from 0 on"),
        ({"window": 2**28, "sinks": 1}, "268435456 at most"),
        ({"window": 4, "positions": "true"}, "positions='cache'"),
    ],
)
def test_wrong_declarations(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(errors.BadFormat, match=text):
        wl.Rolling(**arguments)


def test_wrong_calls() -> None:
    rolling = wl.AttentionWrapper(kv_format=wl.Rolling(8, 3), **SHAPE)
    with pytest.raises(errors.ArgumentError, match="Rolling format does not take it"):
        rolling.plan([0, 1], [0, 5], [0])
    rolling.plan([0, 1, 2], [0, 5, 50])
    q, good = torch.zeros(2, HEADS, DIM), torch.zeros(2, 11, KV_HEADS, DIM)
    with pytest.raises(errors.WrongShape, match=r"batch>=2, token=11, head=2"):
        rolling.run(q, (good[:1], good[:1]))
    with pytest.raises(errors.WrongShape, match=r"token=11"):
        rolling.run(q, (good[:, :8], good[:, :8]))
    with pytest.raises(errors.ArgumentError, match=r"the pair \(k, v\)"):
        rolling.run(q, torch.stack([good, good], 1))


def test_what_takes_other_caches_only() -> None:
    with pytest.raises(errors.ArgumentError, match="write new tokens to slot_of"):
        wl.Appender(wl.Rope(), kv_format=wl.Rolling(8), num_kv_heads=1, head_dim=16)  # type: ignore[arg-type]
    with pytest.raises(errors.ArgumentError, match="selections need Paged, not Rolling"):
        wl.PageSelectionWrapper(kv_format=wl.Rolling(8), **SHAPE)


RING, CACHE = wl.Rolling(70, 5), wl.Rolling(90, 1, positions="cache", layout="HND")
EMULATED = {
    "one row": (wl.Causal() & wl.SoftCap(3.0), RING, TileConfig(1, 64, 2, 1)),
    "one row, cache": (wl.Variant(), CACHE, TileConfig(1, 32, 2, 1)),
    "16 rows": (wl.SlidingWindow(40), RING, TileConfig(16, 32, 2, 2)),
    "16 rows, cache": (wl.Causal() & wl.Alibi(), CACHE, TileConfig(16, 64, 4, 2)),
    "64 rows": (wl.Causal() & wl.Rope(), RING, TileConfig(64, 32, 2, 2)),
    "Hopper": (wl.Causal() & wl.Alibi(), RING, TileConfig(64, 64, 4, 2, "hopper", 2)),
    "Hopper, cache": (wl.Causal() & wl.Rope(), CACHE, TileConfig(64, 64, 4, 2, "hopper", 2)),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("name", EMULATED)
def test_kernels_for_gpus_agree_with_the_oracle(emulator: Emulator, name: str) -> None:
    variant, kv_format, tile = EMULATED[name]
    setup = Setup(kv_format, "bfloat16", 64, 64, tile=tile)
    for emulator.order, q_lens, kv_lens, heads in (
        (0, (1, 1, 1, 1), (130, 1, 257, 0), (2, 1)),
        (1, (1,), (700,), (1, 1)),
        (0, (3, 0, 20), (300, 5, 33), (2, 2)),
    ):
        case = Case(setup, q_lens, kv_lens, *heads, scale=2.0, seed=3)
        found = mismatch(variant, case)
        assert found is None, f"{case}: {found}"
