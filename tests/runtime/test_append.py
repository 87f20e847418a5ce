"""Appending to paged caches on the CPU, against the functors on NumPy."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.side_by_side import in_threads

import warploom as wl
from warploom import errors
from warploom.codegen import build as build_module
from warploom.codegen.compilers.hostcc import host_target
from warploom.dsl.reference import Precision, reference_keys_values
from warploom.dsl.types.rounding import assert_close, rounder
from warploom.dsl.values.arrays import Array32
from warploom.runtime.declaring import structure
from warploom.runtime.devices import loaded
from warploom.runtime.wrappers import append as append_module

MARK = 7.0  # what the cache holds before, and must hold where nothing was appended


class Quantise(wl.Variant):
    """Keys by a scale of their head, values by one of their own largest lane."""

    k_scale = wl.Tensor("float32", ("kv_head",))

    def key_transform(self, k: Any, at: Any) -> Any:
        return k / self.k_scale[at.kv_head]

    def value_transform(self, v: Any, at: Any) -> Any:
        return v / wl.maximum(wl.max(wl.abs(v)), 1e-3) + wl.to_float(at.kv_pos) * 0.01


VARIANTS: dict[str, wl.Variant] = {
    "plain": wl.Causal(),
    "rope": wl.Causal() & wl.Rope(500.0),
    "quantise": Quantise(k_scale=np.array([0.5, 2.0, 3.0], np.float32)),
}


@dataclass(frozen=True)
class Batch:
    """Lengths before and new, and how the cache is made."""

    old: tuple[int, ...]
    new: tuple[int, ...]
    page_size: int
    layout: str
    dtype: str
    dim: int
    dim_v: int
    variant: str
    seed: int


batches = st.integers(1, 5).flatmap(
    lambda requests: st.builds(
        Batch,
        old=st.tuples(*[st.integers(0, 20)] * requests),
        new=st.tuples(*[st.integers(0, 9)] * requests),
        page_size=st.sampled_from([1, 3, 16]),
        layout=st.sampled_from(["NHD", "HND"]),
        dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
        dim=st.sampled_from([8, 64]),
        dim_v=st.sampled_from([32, 64]),
        variant=st.sampled_from(sorted(VARIANTS)),
        seed=st.integers(0, 1000),
    )
)


class Trial:
    """Tensors of a batch, with three key/value heads."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        rng = np.random.default_rng(batch.seed)
        self.dtype = getattr(torch, batch.dtype)
        self.lens = [old + new for old, new in zip(batch.old, batch.new, strict=True)]
        pages = [-(-n // batch.page_size) for n in self.lens]
        total = sum(pages) + 2
        self.indptr = np.cumsum([0, *batch.new]).astype(np.int32)
        self.kv_indptr = np.cumsum([0, *pages]).astype(np.int32)
        self.kv_indices = rng.permutation(total)[: sum(pages)].astype(np.int32)
        self.last = np.array([(n - 1) % batch.page_size + 1 if n else 0 for n in self.lens])
        rows = sum(batch.new) + int(rng.integers(0, 3))  # some past the end
        self.k, self.v = (
            torch.from_numpy(rng.standard_normal((rows, 3, dim))).to(self.dtype)
            for dim in (batch.dim, batch.dim_v)
        )
        shape = (total, batch.page_size, 3)
        self.caches = [
            torch.full((*shape, d), MARK).to(self.dtype) for d in (batch.dim, batch.dim_v)
        ]

    def append(self) -> None:
        nhd = self.batch.layout == "NHD"
        stored = [x if nhd else x.transpose(1, 2).contiguous() for x in self.caches]
        wl.append(
            self.k, self.v, tuple(stored), self.indptr, self.kv_indptr, self.kv_indices, self.last,
            variant=VARIANTS[self.batch.variant], layout=self.batch.layout,  # type: ignore[arg-type]
        )  # fmt: skip
        self.caches = [x if nhd else x.transpose(1, 2) for x in stored]

    def place(self, request: int, position: int) -> tuple[int, int]:
        page = self.kv_indices[self.kv_indptr[request] + position // self.batch.page_size]
        return int(page), position % self.batch.page_size

    def check(self) -> None:
        untouched = torch.ones(self.caches[0].shape[:2], dtype=torch.bool)
        for request, (old, new) in enumerate(zip(self.batch.old, self.batch.new, strict=True)):
            rows = slice(int(self.indptr[request]), int(self.indptr[request + 1]))
            positions = np.arange(old, old + new)
            at = {"kv_pos": positions, "kv_len": old + new, "q_len": new, "batch": request}
            variant = VARIANTS[self.batch.variant]
            given = variant, self.k[rows], self.v[rows]
            round_ = rounder(self.batch.dtype)
            exact = reference_keys_values(*given, **at)
            naive = reference_keys_values(*given, **at, precision=Precision(Array32, round_))
            places = [self.place(request, int(p)) for p in positions]
            for got, wanted, rough in zip(self.caches, exact, naive, strict=True):
                found = torch.stack([got[place] for place in places]) if places else got[:0, 0]
                assert_close(found.double(), wanted, round_(rough), self.batch.dtype)
            for place in places:
                untouched[place] = False
        assert all(bool((cache[untouched] == MARK).all()) for cache in self.caches)


@settings(max_examples=60, deadline=None)
@given(batches)
def test_what_is_appended_is_what_the_functors_say(batch: Batch) -> None:
    trial = Trial(batch)
    trial.append()
    trial.check()


def test_one_cache_tensor_of_keys_and_values() -> None:
    cache = torch.zeros(4, 2, 2, 1, 8)
    k = torch.randn(3, 1, 8)
    wl.append(k, -k, cache, [0, 3], [0, 2], [3, 1], [1])
    assert torch.equal(torch.cat([cache[3, 0, :, 0], cache[1, 0, :1, 0]]), k[:, 0])
    assert torch.equal(cache[:, 1], -cache[:, 0])


def test_appended_keys_are_those_that_attention_reads() -> None:
    """Rotated on the way or when they are read: the same attention."""

    class RotatedKeys(wl.Rope):
        def key_transform(self, k: Any, at: Any) -> Any:
            return k

    torch.manual_seed(0)
    k, v, q = torch.randn(11, 2, 64), torch.randn(11, 2, 64), torch.randn(2, 4, 64)
    table: Any = ([0, 2, 4], [5, 0, 3, 1], [2, 1])
    outs = []
    for on_the_way, reading in ((wl.Rope(), RotatedKeys()), (None, wl.Rope())):
        cache = torch.zeros(2, 6, 4, 2, 64)
        wl.append(k, v, tuple(cache), [0, 6, 11], *table, variant=on_the_way)
        attention = wl.AttentionWrapper(
            wl.Causal() & reading, kv_format=wl.Paged(4), num_q_heads=4, num_kv_heads=2,
            head_dim=64, dtype="float32", device="cpu",
        )  # fmt: skip
        attention.plan([0, 1, 2], *table)
        outs.append(attention.run(q, tuple(cache)))
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("narrow", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_number_is_rounded_to_8_bits_as_torch_does(narrow: torch.dtype) -> None:
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    halves = patterns.view(torch.float16)
    largest = torch.finfo(narrow).max
    x = torch.cat((halves.float(), halves.float() * 2.0**-9, halves.float() * 1.0001))
    x = x.view(-1, 1, 64)
    cache = torch.zeros(2, 1, len(x), 1, 64, dtype=torch.uint8).view(narrow)
    wl.append(x, -x, tuple(cache), [0, len(x)], [0, 1], [0], [len(x)])
    for got, wide in zip(cache, (x, -x), strict=True):
        expected = wide.clamp(-largest, largest).to(narrow).view(got.shape)
        nan = wide.isnan().view(got.shape)
        assert bool(((got.view(torch.uint8) == expected.view(torch.uint8)) | nan).all())
        assert bool(got.float()[nan].isnan().all())


def test_every_number_is_rounded_to_the_nearest_integer_of_8_bits() -> None:
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    steps = torch.arange(-600, 600, dtype=torch.float32) / 4  # with all the ties
    x = torch.nn.functional.pad(torch.cat((halves, steps, halves * 1e30)), (0, 16)).view(-1, 1, 64)
    cache = torch.zeros(2, 1, len(x), 1, 64, dtype=torch.int8)
    wl.append(x, -x, tuple(cache), [0, len(x)], [0, 1], [0], [len(x)])
    for got, wide in zip(cache, (x, -x), strict=True):
        expected = wide.nan_to_num(0.0).round().clamp(-128, 127).to(torch.int8)
        assert torch.equal(got.view(-1), expected.view(-1))


@pytest.mark.parametrize("narrow", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_quantised_on_the_way_and_scaled_when_read(narrow: str) -> None:
    class Divided(wl.Variant):
        scale = wl.Scalar("float32", default=0.25)

        def key_transform(self, k: Any, at: Any) -> Any:
            return k / self.scale

        def value_transform(self, v: Any, at: Any) -> Any:
            return v / self.scale

    torch.manual_seed(0)
    k, v, q = torch.randn(11, 2, 64), torch.randn(11, 2, 64), torch.randn(2, 4, 64)
    table: Any = ([0, 2, 4], [5, 0, 3, 1], [2, 1])
    cache = torch.zeros(2, 6, 4, 2, 64, dtype=torch.uint8).view(getattr(torch, narrow))
    wl.append(k, v, tuple(cache), [0, 6, 11], *table, variant=Divided())
    shape: Any = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "device": "cpu"}
    narrow_kv = wl.AttentionWrapper(
        wl.KVScale(0.25, 0.25) & wl.Causal(), kv_format=wl.Paged(4), kv_dtype=narrow,
        dtype="float32", **shape,
    )  # fmt: skip
    narrow_kv.plan([0, 1, 2], *table)
    scaled = [x / 0.25 for x in (k, v)]
    if narrow == "int8":  # which torch cuts to
        scaled = [x.round() for x in scaled]
    rounded = [x.to(cache.dtype).float() * 0.25 for x in scaled]
    exact = wl.AttentionWrapper(wl.Causal(), dtype="float32", **shape)
    exact.plan([0, 1, 2], [0, 6, 11])
    torch.testing.assert_close(
        narrow_kv.run(q, tuple(cache)), exact.run(q, tuple(rounded)), rtol=1e-4, atol=1e-4
    )


def arguments(**changes: Any) -> tuple[Any, ...]:
    given = {
        "k": torch.zeros(3, 2, 8), "v": torch.zeros(3, 2, 8),
        "kv": (torch.zeros(4, 2, 2, 8), torch.zeros(4, 2, 2, 8)),
        "indptr": [0, 1, 3], "kv_indptr": [0, 1, 3], "kv_indices": [0, 1, 2],
        "last_page_len": [1, 2],
    }  # fmt: skip
    return tuple((given | changes).values())


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"k": torch.zeros(3, 1, 8)}, errors.WrongShape, "k has shape"),
        ({"v": torch.zeros(3, 2, 16)}, errors.WrongShape, "v has shape"),
        ({"k": torch.zeros(2, 2, 8), "v": torch.zeros(2, 2, 8)}, errors.WrongShape, "3 or more"),
        ({"k": torch.zeros(3, 2, 8).half()}, errors.WrongDType, "k has dtype"),
        ({"indptr": [0, 2, 1]}, errors.BadIndptr, "^indptr decreases"),
        ({"kv_indptr": [0, 1]}, errors.BadIndptr, "kv_indptr"),
        ({"kv_indices": [0, 1]}, errors.WrongShape, "kv_indices"),
        ({"kv_indices": [0, 1, 4]}, errors.IndexOutOfRange, "4"),
        ({"kv_indices": [0, -1, 2]}, errors.IndexOutOfRange, "-1"),
        ({"last_page_len": [1, 3]}, errors.BadLength, "1 to 2"),
        ({"indptr": [0, 2, 3]}, errors.BadLength, r"new tokens\[0\] is 2; expected at most 1"),
    ],
)
def test_wrong_arguments(changes: Any, error: type[Exception], text: str) -> None:
    appender = wl.Appender(
        kv_format=wl.Paged(2), num_kv_heads=2, head_dim=8, dtype="float32", device="cpu"
    )
    with pytest.raises(error, match=text):
        appender(*arguments(**changes))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"head_dim": 12}, errors.BadHeadDim),
        ({"kv_format": wl.Ragged()}, errors.ArgumentError),
        ({"dtype": "int32"}, errors.ArgumentError),
        ({"num_q_heads": 3}, errors.ArgumentError),
    ],
)
def test_wrong_declarations(changes: Any, error: type[Exception]) -> None:
    declared = {"kv_format": wl.Paged(2), "num_kv_heads": 2, "head_dim": 8, "device": "cpu"}
    with pytest.raises(error):
        wl.Appender(**{**declared, **changes})


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"kv_format": wl.Rolling(4)}, errors.ArgumentError, "no paged cache; write new tokens to"),
        ({"kv_format": wl.Paged(2)}, errors.WrongCall, "no 'kv_format': page size, heads, types"),
        ({"dtype": "float16"}, errors.WrongCall, "Declare them to warploom.Appender"),
    ],
)
def test_what_appenders_are_declared_with_is_no_input(
    given: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        wl.append(*arguments(), **given)


def test_a_field_may_be_called_like_a_declaration() -> None:
    class Scaled(wl.Variant):
        dtype = wl.Scalar("float32")

        def key_transform(self, k: Any, at: wl.Position) -> Any:
            return k * self.dtype

    given = arguments(k=torch.ones(3, 2, 8))
    wl.append(*given, variant=Scaled, dtype=3.0)
    assert given[2][0].max() == 3


def test_inputs_are_checked() -> None:
    appender = wl.Appender(
        Quantise(), kv_format=wl.Paged(2), num_kv_heads=2, head_dim=8, dtype="float32",
        device="cpu",
    )  # fmt: skip
    with pytest.raises(errors.MissingInput, match="k_scale"):
        appender(*arguments())
    with pytest.raises(errors.WrongShape, match="kv_head=2"):
        appender(*arguments(), k_scale=torch.ones(3))
    appender(*arguments(), k_scale=torch.ones(2))


def test_kernels_are_known_by_source_and_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []

    def build(source: Any, target: Any) -> Any:
        built.append(target)
        return build_module.build(source, target)

    monkeypatch.setattr(loaded, "build", build)
    monkeypatch.setattr(loaded, "_loaded", {})
    for flags in ((), (), ("-DOTHER",)):
        target = host_target()
        target = replace(target, flags=(*target.flags, *flags))
        monkeypatch.setattr(append_module, "host_target", lambda found=target: found)
        wl.Appender(kv_format=wl.Paged(2), num_kv_heads=1, head_dim=8, device="cpu")
    assert len(built) == 2


class Scaled(wl.Variant):
    """Values by one number and a table."""

    scale = wl.Scalar("float32", default=1.0)
    table = wl.Tensor("float32", ("kv_head",))

    def value_transform(self, v: Any, at: Any) -> Any:
        return v * self.scale * self.table[at.kv_head]


def appended(variant: wl.Variant | None = None, number: float = 1.0) -> float:
    cache = torch.zeros(2, 1, 2, 1, 8)
    new = torch.full((2, 1, 8), number)
    wl.append(new, new, tuple(cache), [0, 2], [0, 1], [0], [2], variant=variant)
    (found,) = set(cache[1].flatten().tolist())
    return float(found)


def test_a_kept_appender_has_no_values_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    append_module._appender.cache_clear()
    monkeypatch.setattr(structure, "_traced", OrderedDict())
    table = torch.full((1,), 2.0)
    alive = weakref.ref(table)
    assert appended(Scaled(scale=3.0, table=table)) == 6.0
    assert appended(Scaled(table=torch.full((1,), 5.0))) == 5.0
    with pytest.raises(errors.MissingInput, match="table"):
        appended(Scaled(scale=3.0))
    del table
    structure._traced.clear()  # it keeps what its keys name
    gc.collect()
    assert alive() is None


def test_threads_have_their_own_appenders() -> None:
    def work(number: float) -> None:
        assert {appended(number=number) for _ in range(200)} == {number}

    in_threads(work, (1.0, 2.0, 3.0))


def test_the_cache_decides_who_is_wrong() -> None:
    cache, table = torch.zeros(2, 2, 4, 2, 64), ([0, 2], [0, 1], [0], [3])
    new = torch.zeros(2, 2, 64)
    with pytest.raises(errors.WrongDType, match=r"^k has dtype torch.float16"):
        wl.append(new.half(), new, cache, *table)
    with pytest.raises(errors.WrongShape, match=r"^k has shape \(2, 4, 64\); .*head=2"):
        wl.append(torch.zeros(2, 4, 64), new, cache, *table)
