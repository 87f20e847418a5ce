"""Declarations that no kernel serves: formats, stored types, bounds and devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom import errors
from warploom.dsl.types.formats import BlockSparse, Dense, Paged
from warploom.runtime.wrappers.wrapper import AttentionWrapper

SHAPE: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "device": "cpu"}
Q, K = torch.zeros(3, 4, 64), torch.zeros(5, 2, 64)
E4M3, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


def declared(**changes: Any) -> AttentionWrapper:
    return AttentionWrapper(**{**SHAPE, "dtype": "float32", "backend": "reference", **changes})


@pytest.mark.parametrize(
    ("kind", "given", "text"),
    [
        (Paged, {"layout": "hnd"}, r"layout='hnd'.*expected layout='NHD' or layout='HND'"),
        (Dense, {"layout": None}, "layout='NHD'"),
        (Paged, {"page_size": 16.0}, r"page_size=16.0.*integer from 1 on"),
        (Paged, {"page_size": 0}, "page_size=0.*integer from 1 on"),
        (Paged, {"page_size": -4}, "page_size=-4"),
        (BlockSparse, {"block": 16}, r"block=16.*block=\(query rows, keys\)"),
        (BlockSparse, {"block": (16, 0)}, "two integers from 1 on"),
        (BlockSparse, {"block": (16,)}, "two integers from 1 on"),
        (Paged, {"page_size": 2**40}, "page_size=1099511627776.*to 268435456 at most"),
        (BlockSparse, {"block": (1, 2**40)}, "to 268435456 at most"),
        (Paged, {"page_size": True}, "page_size=True.*integer from 1 on"),
    ],
)
def test_formats_are_checked_when_they_are_made(kind: Any, given: Any, text: str) -> None:
    with pytest.raises(errors.BadFormat, match=text):
        kind(**given)


@pytest.mark.parametrize(
    ("kind", "given", "text"),
    [
        (Paged, (16, "HND"), r"Paged\(16, 'HND'\) .* the layout by name: layout='NHD'"),
        (Dense, ("HND",), r"Dense\('HND'\) .* the layout by name"),
        (BlockSparse, (8, 16), r"BlockSparse\(8, 16\) .* one pair, such as block=\(8, 16\)"),
    ],
)
def test_layouts_go_by_name_and_blocks_are_pairs(kind: Any, given: Any, text: str) -> None:
    with pytest.raises(errors.BadFormat, match=text):
        kind(*given)


def test_what_is_composed_are_parts() -> None:
    pages: Any = [([0], [1])]
    with pytest.raises(errors.ArgumentError, match=r"holds \(\[0\], \[1\]\); expected Part\("):
        wl.compose(pages, page_size=16)


def test_sizes_may_be_any_integers() -> None:
    size: Any = np.int64(4)
    assert Paged(size) == Paged(4)
    assert BlockSparse((size, 2)) == BlockSparse((4, 2))


@pytest.mark.parametrize(
    ("kv_format", "text"),
    [("paged", "kv_format='paged'"), (Paged, "kv_format=Paged"), (16, "kv_format=16")],
)
def test_what_is_no_format(kv_format: Any, text: str) -> None:
    with pytest.raises(errors.BadFormat, match=f"{text} .*an instance, such as warploom.Paged"):
        declared(kv_format=kv_format)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"bounds": {"max_requests": 3}}, errors.ArgumentError, "bounds: .* give warploom.Bounds"),
        ({"device": "mars"}, errors.UnsupportedSpec, "device 'mars'.*cuda and cpu. Use 'cuda'"),
        ({"device": ["cpu"]}, errors.UnsupportedSpec, r"device \['cpu'\] is not supported"),
        ({"kv_dtype": torch.uint8}, errors.UnsupportedSpec, r"\.view\(torch.float8_e4m3fn\)"),
        ({"kv_dtype": FNUZ}, errors.UnsupportedSpec, "fnuz .*Convert the cache"),
    ],
)
def test_wrong_declarations(changes: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        declared(**changes)


@pytest.mark.parametrize(
    ("kv_dtype", "k", "remedy"),
    [
        (E4M3, K.to(torch.uint8), r"pass it as \.view\(torch.float8_e4m3fn\)\.$"),
        (None, K.to(torch.uint8), r"\.view\(torch.float8_e4m3fn\) and declare kv_dtype=torch.fl"),
        (E4M3, K.to(FNUZ), r"Convert it with \.to\(torch.float8_e4m3fn\)\.$"),
        (None, K.to(FNUZ), r"Convert it with \.to\(torch.float32\)\.$"),
        (None, K.to(torch.int8), "Declare kv_dtype='int8', .*: KVScale, HeadKVScale or Token"),
        (None, K.to(E4M3), r"or declare kv_dtype=torch.float8_e4m3fn\.$"),
        (
            E4M3,
            K,
            r"\(k / scale\)\.to\(torch.float8_e4m3fn\), or declare kv_dtype=torch.float32\.$",
        ),
        (
            torch.int8,
            K,
            r"its scale, .* \(KVScale, .*: \(k / scale\)\.round\(\)\.to\(torch.int8\), or",
        ),
        (torch.int8, K.double(), r"\(k / scale\)\.round\(\)\.to\(torch.int8\)\.$"),
        (None, K.half(), r"Convert it with \.to\(torch.float32\)\.$"),  # q has the declared type
        (None, K.double(), r"Convert it with \.to\(torch.float32\)\.$"),
    ],
)
def test_remedies_for_stored_types_work(kv_dtype: Any, k: torch.Tensor, remedy: str) -> None:
    """No message proposes a declaration that is refused, or a conversion that changes the bits."""
    wrapper = AttentionWrapper(**SHAPE, dtype="float32", kv_dtype=kv_dtype)
    wrapper.plan([0, 3], [0, 5])
    with pytest.raises(errors.WrongDType, match=remedy):
        wrapper.run(Q, (k, k))


@pytest.mark.parametrize("kv_dtype", [None, E4M3])
def test_values_of_another_type_than_keys_are_converted(kv_dtype: Any) -> None:
    k, v = (K, K.to(E4M3)) if kv_dtype is None else (K.to(E4M3), K)
    wrapper = AttentionWrapper(**SHAPE, dtype="float32", kv_dtype=kv_dtype)
    wrapper.plan([0, 3], [0, 5])
    with pytest.raises(errors.WrongDType, match=r"^v .*: k has this type, and both"):
        wrapper.run(Q, (k, v))


@pytest.mark.parametrize(
    ("kv_format", "formula"),
    [
        (wl.Paged(16), r"max_requests \* ceil\(max_kv_len / 16\) = 21"),
        (wl.Composed(16), r"max_requests \* ceil\(max_kv_len / 16\) = 21"),
        (wl.BlockSparse((4, 32)), r"max_segments \* ceil\(max_kv_len / 32\) = 20"),
    ],
)
@pytest.mark.parametrize("backend", [None, "reference"])
def test_bounds_of_indexed_formats_need_blocks(kv_format: Any, formula: str, backend: Any) -> None:
    shape: Any = {"num_q_heads": 4, "head_dim": 64, "dtype": "float32", "device": "cpu"}
    bounds = wl.Bounds(3, 3, 100, max_segments=5)
    with pytest.raises(errors.ArgumentError, match=rf"Bounds.max_blocks: is 0, .* {formula}"):
        wl.AttentionWrapper(
            wl.Causal(), kv_format=kv_format, bounds=bounds, backend=backend, **shape
        )


def test_bounds_of_selections_need_no_blocks() -> None:
    wl.PageSelectionWrapper(
        kv_format=wl.Paged(16), bounds=wl.Bounds(3, 3, 100), num_q_heads=4, head_dim=64,
        dtype="float32", device="cpu",
    )  # fmt: skip


class _TurnedValues(wl.Variant):
    def value_transform(self, v: Any, at: wl.Position) -> Any:
        return wl.rotate_half(v, 48)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_no_more_lanes_are_rotated_than_heads_have(backend: Any, interleaved: bool) -> None:
    variant = wl.Causal() & wl.Rope(dim=96, interleaved=interleaved)
    text = "Causal_Rope: query_transform rotates 96 lanes, but head_dim is 64; give dim=64 or less"
    with pytest.raises(errors.ArgumentError, match=text):
        declared(variant=variant, backend=backend)
    with pytest.raises(errors.ArgumentError, match=text):
        wl.attention(Q[None], K[None], K[None], variant=variant, backend=backend)
    declared(variant=wl.Rope(dim=64, interleaved=interleaved), backend=backend)


def test_rotations_of_values_are_compared_with_their_length() -> None:
    text = "_TurnedValues: value_transform rotates 48 lanes, but head_dim_v is 32"
    with pytest.raises(errors.ArgumentError, match=text):
        declared(variant=_TurnedValues, head_dim_v=32)


def test_appends_rotate_no_more_lanes_than_heads_have() -> None:
    with pytest.raises(errors.ArgumentError, match="rotates 96 lanes, but head_dim is 64"):
        wl.Appender(
            wl.Rope(dim=96), kv_format=wl.Paged(4), num_kv_heads=2, head_dim=64, device="cpu"
        )


def test_numbers_that_no_float_holds() -> None:
    huge, q = 10**400, torch.zeros(1, 1, 1, 8)
    with pytest.raises(errors.ArgumentError, match=r"sm_scale: .* is no finite float32"):
        declared(sm_scale=huge)
    with pytest.raises(errors.FieldMisuse, match="got an int of 1329 bits; expected float32"):
        wl.SoftCap(huge)
    with pytest.raises(errors.ArgumentError, match=r"cap: .* does not fit into float32"):
        wl.attention(q, q, q, variant=wl.SoftCap(1.0), cap=huge)
