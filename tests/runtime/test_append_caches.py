"""Which memory new keys, new values and the caches that they go to may have in common."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import warploom as wl
from warploom import errors
from warploom.runtime.inputs.append_args import check_caches_apart


@pytest.mark.parametrize("at", [0, 1])
def test_caches_that_would_be_copied_are_refused(at: int) -> None:
    frozen = np.zeros((2, 4, 1, 64), np.float32)
    frozen.flags.writeable = False
    new = torch.ones(2, 1, 64)
    for wrong, text in (
        (frozen, "read-only"),
        (np.zeros((2, 4, 1, 64), np.float32)[::-1], "runs backwards"),
        (torch._neg_view(torch.zeros(2, 4, 1, 64)), "negative view"),  # pyright: ignore
    ):
        caches: list[Any] = [torch.zeros(2, 4, 1, 64), torch.zeros(2, 4, 1, 64)]
        caches[at] = wrong
        with pytest.raises(errors.ArgumentError, match=f"{'kv'[at]} cache: .*{text}"):
            wl.append(new, new, tuple(caches), [0, 2], [0, 1], [0], [2])


@pytest.mark.parametrize("name", ["k", "v"])
def test_new_keys_and_values_lie_outside_of_the_caches(name: str) -> None:
    """Also where only addresses changed since the call before."""
    cache = torch.zeros(4, 2, 4, 1, 16)
    new, table = {"k": torch.ones(2, 1, 16), "v": torch.ones(2, 1, 16)}, ([0, 2], [0, 1], [0], [2])
    wl.append(new["k"], new["v"], cache, *table)
    new[name] = cache[2, 1, :2]
    with pytest.raises(errors.ArgumentError, match=f"{name}: reaches into the memory of the"):
        wl.append(new["k"], new["v"], cache, *table)
    new[name] = new[name].clone()
    wl.append(new["k"], new["v"], cache, *table)


PAGES = torch.zeros(6, 4, 3, 2, 8)
LAYOUTS = {
    "apart": (PAGES[:3, 0], PAGES[3:, 0]),
    "one behind the other in a page": (PAGES[:, 0], PAGES[:, 1]),
    "token by token": (PAGES[:, :, 0], PAGES[:, :, 1]),
    "head by head": (PAGES[:, :, :, 0], PAGES[:, :, :, 1]),
    "lane by lane": (PAGES[..., :4], PAGES[..., 4:]),
    "of other widths": (PAGES[..., :6], PAGES[..., 6:]),
    "of other lengths": (PAGES[:5, 0], PAGES[:, 1]),
    "of one page": (PAGES[:1, :1], PAGES[1:2, :1]),
}


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_caches_may_lie_in_each_others_gaps(name: str, is_first: bool) -> None:
    check_caches_apart(*LAYOUTS[name][:: 1 if is_first else -1])


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A view of PAGES of four dimensions: slices of it, one of which is an index."""
    axis = draw(st.integers(0, 4))
    index: list[Any] = []
    for i, size in enumerate(PAGES.shape):
        first = draw(st.integers(0, size - 1))
        index.append(first if i == axis else slice(first, draw(st.integers(first + 1, size))))
    return PAGES[tuple(index)]


def elements(view: torch.Tensor) -> set[int]:
    places = torch.arange(PAGES.numel()).as_strided(
        view.shape, view.stride(), view.storage_offset()
    )
    return set(places.flatten().tolist())


@given(k=views(), v=views())
def test_caches_with_elements_in_common_are_refused(k: torch.Tensor, v: torch.Tensor) -> None:
    if elements(k) & elements(v):
        with pytest.raises(errors.ArgumentError, match="v cache: lies among"):
            check_caches_apart(k, v)


def test_caches_are_compared_again_when_their_distance_changes() -> None:
    new, table = torch.ones(2, 1, 16), ([0, 2], [0, 1], [0], [2])
    buffer = torch.zeros(5, 4, 1, 16)
    wl.append(new, new, (buffer[:2], buffer[2:4]), *table)
    for overlapping in (buffer[1:3], buffer[:2]):
        with pytest.raises(errors.ArgumentError, match="v cache: lies among"):
            wl.append(new, new, (buffer[:2], overlapping), *table)
    wl.append(new, new, (buffer[:2], buffer[3:]), *table)


def test_caches_that_need_gradients_are_refused_at_every_call() -> None:
    new, table = torch.ones(2, 1, 16), ([0, 2], [0, 1], [0], [2])
    plain, needy = (torch.zeros(2, 4, 1, 16, requires_grad=needs) for needs in (False, True))
    with torch.no_grad():
        wl.append(new, new, (needy, plain), *table)
    wl.append(new, new, (plain.clone(), plain), *table)
    with pytest.raises(errors.ArgumentError, match="k cache: requires a gradient"):
        wl.append(new, new, (needy, plain), *table)


@pytest.mark.parametrize("scales", [wl.KVScale(0.5, 2.0), wl.HeadKVScale, wl.TokenKVScale])
def test_scales_of_what_is_read_are_no_way_to_write(scales: Any) -> None:
    """They would be left out, or multiply where an append has to divide."""
    new, cache = torch.ones(2, 1, 16), torch.zeros(1, 2, 4, 1, 16)
    for variant in (scales, wl.Causal() & scales):
        with pytest.raises(errors.ArgumentError, match="KVScale multiplies what is read"):
            wl.append(new, new, cache, [0, 2], [0, 1], [0], [2], variant=variant)
        with pytest.raises(errors.ArgumentError, match="divide by the scales"):
            wl.Appender(variant, kv_format=wl.Paged(4), num_kv_heads=1, head_dim=16, device="cpu")


def test_scales_that_divide_when_written_are_a_way() -> None:
    class Divided(wl.KVScale):
        def key_transform(self, k: Any, at: Any) -> Any:
            return k / self.k_scale

    new, cache = torch.ones(2, 1, 16), torch.zeros(1, 2, 4, 1, 16)
    wl.append(new, new, cache, [0, 2], [0, 1], [0], [2], variant=Divided(0.5, 2.0))
    assert torch.equal(cache[0, :, :2, 0, 0], torch.tensor([[2.0, 2.0], [1.0, 1.0]]))


def test_index_arrays_may_be_read_only_or_run_backwards() -> None:
    k, v = torch.randn(2, 3, 1, 8)
    given = {"indptr": [0, 2, 3], "kv_indptr": [0, 1, 2], "kv_indices": [1, 0], "last": [2, 1]}
    expected, found = torch.zeros(2, 4, 2, 2, 1, 8)
    wl.append(k, v, expected, *given.values())
    for backwards in (False, True):
        arrays = [np.array(x[::-1] if backwards else x, np.int32) for x in given.values()]
        for array in arrays:
            array.flags.writeable = False
        found.zero_()
        wl.append(k, v, found, *(x[::-1] if backwards else x for x in arrays))
        assert torch.equal(found, expected)
