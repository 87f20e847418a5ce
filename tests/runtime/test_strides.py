"""Tensors of any strides and addresses are served: copied where a kernel cannot reach them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.emulator import Emulator
from support.parts import compiled

import warploom as wl
from warploom import errors, notices
from warploom.codegen.source import TileConfig
from warploom.notices import CopyWarning
from warploom.runtime.launching import launch
from warploom.runtime.tensors import strides
from warploom.runtime.tensors.strides import obstacle

HEADS, DIM = 4, 32
GPU = 16  # bytes of a vector


@pytest.fixture(autouse=True)
def nobody_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_told", set())


def last_apart(x: torch.Tensor) -> torch.Tensor:
    """The same values, every other element of a wider tensor."""
    wide = torch.full((*x.shape, 2), float("nan"), dtype=x.dtype)
    wide[..., 0] = x
    return wide[..., 0]


def column_major(x: torch.Tensor) -> torch.Tensor:
    return x.mT.contiguous().mT


def shifted(x: torch.Tensor) -> torch.Tensor:
    """The same values, one element behind a border of 16 bytes."""
    flat = torch.empty(x.numel() + 1, dtype=x.dtype)
    found = flat[1:].view(x.shape).copy_(x)
    assert found.data_ptr() % GPU == x.element_size()
    return found


def padded(x: torch.Tensor, by: int) -> torch.Tensor:
    """The same values, in rows that are longer."""
    return torch.cat((x, x.new_full((*x.shape[:-1], by), float("nan"))), -1)[..., : x.shape[-1]]


HALF = torch.zeros(6, 4, 32, dtype=torch.float16)
TABLE = [
    # tensor, reason on the CPU, on a GPU, of the copy engine
    (HALF, None, None, None),
    (HALF[:, ::2], None, None, None),
    (HALF.transpose(0, 1), None, None, None),
    (HALF[..., ::2], "last stride is 2", "last stride is 2", "last stride is 2"),
    (HALF.view(6, 16, 8).mT, "last stride is 8", "last stride is 8", "last stride is 8"),
    (HALF[..., :1].expand(6, 4, 8), "last stride is 0", "last stride is 0", "last stride is 0"),
    (padded(HALF, 4), None, "no multiple of 8 elements", "no multiple of 8 elements"),
    (padded(HALF, 8), None, None, None),
    (padded(HALF[:1, :1], 4), None, None, None),  # strides of axes of one place mean nothing
    (shifted(HALF), None, "address is no multiple of 16", "address is no multiple of 16"),
    (
        padded(HALF, 8)[..., 4:28],
        None,
        "address is no multiple of 16",
        "address is no multiple of 16",
    ),
    (HALF[:1].expand(6, 4, 32), None, None, "expanded"),
    (HALF[:, :1].expand(6, 4, 32), None, None, "expanded"),
    (HALF[:1, :1].expand(1, 4, 32)[:, :1], None, None, None),
    (shifted(HALF)[:0], None, None, None),  # nothing is read
]


@pytest.mark.parametrize("row", range(len(TABLE)))
def test_what_keeps_a_kernel_from_a_tensor(row: int) -> None:
    tensor, on_cpu, on_gpu, by_engine = TABLE[row]
    for reason, found in (
        (on_cpu, obstacle(tensor, 1)),
        (on_gpu, obstacle(tensor, GPU)),
        (by_engine, obstacle(tensor, GPU, by_engine=True)),
    ):
        assert (found is None) == (reason is None), found
        if found is not None:
            assert reason in found.reason and found.remedy
            assert obstacle(tensor.clone(memory_format=torch.contiguous_format), GPU, True) is None


def test_strides_that_the_copy_engine_cannot_count() -> None:
    far = torch.empty_strided((2, 4, 32), (1 << 39, 32, 1), dtype=torch.float16, device="meta")
    assert obstacle(far, GPU) is None
    found = obstacle(far, GPU, by_engine=True)
    assert found is not None and "too large" in found.reason


def dense() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 5, HEADS, DIM), *torch.randn(2, 2, 40, 2, DIM)  # type: ignore[return-value]


@pytest.mark.parametrize("move", [last_apart, column_major])
@pytest.mark.parametrize("which", ["q", "k", "v", "qkv"])
def test_attention_of_any_strides(which: str, move: Callable[..., Any]) -> None:
    tensors = dense()
    expected = wl.attention(*tensors, variant=wl.Causal(), return_lse=True)
    moved = [move(x) if name in which else x for name, x in zip("qkv", tensors, strict=True)]
    with pytest.warns(CopyWarning) as told:
        found = wl.attention(*moved, variant=wl.Causal(), return_lse=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert [str(each.message)[0] for each in told] == list(which)
    exact = wl.attention(*moved, variant=wl.Causal(), backend="reference")
    torch.testing.assert_close(exact, expected[0], atol=1e-5, rtol=1e-5)


def test_each_place_is_told_once_and_what_to_do() -> None:
    q, k, v = dense()
    q = last_apart(q)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(3):
            wl.attention(q, k, v)
        wl.attention(q, k, v)
    assert [str(each.message) for each in told] == [
        "q is copied at each call from here: its last stride is 2, and kernels read the head "
        "dimension as one run. To save that, lay it out with .contiguous()."
    ] * 2
    assert {each.filename for each in told} == {__file__}
    assert len({each.lineno for each in told}) == 2
    assert all(each.category is CopyWarning for each in told)


def test_a_filter_can_make_it_an_error() -> None:
    q, k, v = dense()
    with warnings.catch_warnings():
        warnings.simplefilter("error", CopyWarning)
        for _ in range(2):  # always
            with pytest.raises(CopyWarning, match="k is copied"):
                wl.attention(q, last_apart(k), v)


def planned(kv_format: Any = None, **options: Any) -> wl.AttentionWrapper:
    shape: dict[str, Any] = {"num_q_heads": HEADS, "num_kv_heads": 2, "head_dim": DIM}
    shape |= {"device": "cpu", "dtype": "float32"}
    wrapper = wl.AttentionWrapper(wl.Causal(), kv_format=kv_format, **shape | options)
    if kv_format is None:
        wrapper.plan([0, 2, 5], [0, 10, 40])
    else:
        wrapper.plan([0, 2, 5], [0, 2, 5], [7, 4, 1, 0, 9], [3, 8])
    return wrapper


def ragged(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, Any]:
    torch.manual_seed(0)
    q, kv = torch.randn(5, HEADS, DIM), torch.randn(2, 40, 2, DIM)
    return q.to(dtype), tuple(kv.to(dtype))


@pytest.fixture
def as_on_gpu() -> Iterator[wl.AttentionWrapper]:
    """A wrapper of the CPU that reaches memory as a GPU does."""
    wrapper = planned()
    compiled(wrapper).launcher._misaligned = GPU - 1
    yield wrapper


@pytest.mark.filterwarnings("ignore::warploom.notices.CopyWarning")
@pytest.mark.parametrize("move", [shifted, last_apart, lambda x: padded(x, 1)])
def test_calls_with_and_without_copies_take_turns(
    as_on_gpu: wl.AttentionWrapper, move: Callable[..., Any]
) -> None:
    wrapper = as_on_gpu
    q, (k, v) = ragged()
    expected = wrapper.run(q, (k, v))
    good, bad = (q, k, v), (move(q), move(k), move(v))
    for turn in (0, 7, 0, 0, 1, 1, 2, 4, 7, 7, 3, 0):
        mixed = [bad[i] if turn >> i & 1 else good[i] for i in range(3)]
        out, target = torch.zeros_like(q), move(torch.zeros_like(q))
        for given in (None, out, target):
            found = wrapper.run(mixed[0], tuple(mixed[1:]), out=given)
            assert torch.equal(found, expected)
            assert given is None or found is given
            for name, i in (("q", 0), ("k", 1), ("v", 2)):
                own = compiled(wrapper).params.get(name) == mixed[i].data_ptr()
                assert own == (not turn >> i & 1) and compiled(wrapper).params.get(name) % GPU == 0


def test_an_address_alone_is_seen_by_calls_that_are_known(
    as_on_gpu: wl.AttentionWrapper,
) -> None:
    q, kv = ragged()
    expected = as_on_gpu.run(q, kv, return_lse=True)
    with pytest.warns(CopyWarning, match=r"q is copied .* address .* \.clone\(\) of it"):
        found = as_on_gpu.run(shifted(q), kv, return_lse=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::warploom.notices.CopyWarning")
def test_results_go_where_they_are_wanted() -> None:
    wrapper, (q, kv) = planned(), ragged()
    expected, sums = wrapper.run(q, kv, return_lse=True)
    wide = torch.full((5, HEADS, DIM, 2), 7.0)
    out, lse = wide[..., 0], torch.empty(HEADS, 5).mT
    found = wrapper.run(q, kv, out=out, lse=lse, return_lse=True)
    assert found[0] is out and found[1] is lse
    assert torch.equal(out, expected) and torch.equal(lse, sums)
    assert (wide[..., 1] == 7).all()
    assert wrapper.run(q, kv, out=out) is out
    memory = torch.zeros(5 * HEADS * DIM * 2)
    out = memory.view(5, HEADS, DIM, 2)[..., 0]
    with pytest.raises(errors.ArgumentError, match="lse: reaches into the memory of out"):
        wrapper.run(q, kv, out=out, lse=memory[: 5 * HEADS].view(5, HEADS))
    with pytest.raises(errors.WrongStride, match="expanded tensor, cannot be written"):
        wrapper.run(q, kv, out=torch.zeros(5, HEADS, 1).expand(5, HEADS, DIM))


@pytest.mark.parametrize("is_pair", [True, False], ids=["pair", "one cache"])
def test_a_paged_cache_is_copied_up_to_a_size(
    is_pair: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = planned(wl.Paged(8))
    torch.manual_seed(0)
    q, cache = torch.randn(5, HEADS, DIM), torch.randn(10, 2, 8, 2, DIM)

    def given(x: torch.Tensor) -> Any:
        return (x[:, 0], x[:, 1]) if is_pair else x

    expected = wrapper.run(q, given(cache))
    with pytest.warns(CopyWarning) as told:
        found = wrapper.run(q, given(last_apart(cache)))
    assert [str(each.message)[0] for each in told] == ["k", "v"]
    assert torch.equal(found, expected)
    assert torch.equal(wrapper.run(q, given(cache)), expected)
    monkeypatch.setattr(strides, "LARGEST_CACHE_COPIED", 10 * 8 * 2 * DIM * 4 - 1)
    with pytest.raises(errors.ArgumentError, match=r"k: .* not copied .* once, lay it out with"):
        wrapper.run(q, given(last_apart(cache)))
    assert torch.equal(wrapper.run(q, given(cache)), expected)


def test_only_caches_are_refused_for_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strides, "LARGEST_CACHE_COPIED", 0)
    wrapper, (q, (k, v)) = planned(), ragged()
    with pytest.warns(CopyWarning):
        found = wrapper.run(q, (last_apart(k), v))
    assert torch.equal(found, wrapper.run(q, (k, v)))


@pytest.mark.filterwarnings("ignore::warploom.notices.CopyWarning")
def test_wrong_tensors_are_refused_before_anything_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrapper, (q, (k, v)) = planned(), ragged()
    monkeypatch.setattr(strides, "reachable", lambda *_: pytest.fail("copied"))
    with pytest.raises(errors.WrongShape, match="v has shape"):
        wrapper.run(last_apart(q), (last_apart(k), last_apart(v)[:, :1]))
    freed = last_apart(v)
    freed.untyped_storage().resize_(0)
    with pytest.raises(errors.ArgumentError, match="was it freed"):
        wrapper.run(last_apart(q), (k, freed))


@pytest.mark.parametrize("axis", [0, 1], ids=["tokens", "heads"])
def test_tensor_copies_do_not_follow_expanded_tensors(emulator: Emulator, axis: int) -> None:
    wrapper = planned(dtype="bfloat16", tile=TileConfig(64, 64, 4, 2, "hopper", 2))
    q, kv = ragged(torch.bfloat16)
    expanded = tuple(x.narrow(axis, 0, 1).expand_as(x) for x in kv)
    with pytest.warns(CopyWarning, match="tensor copies cannot follow.* as many heads"):
        found = wrapper.run(q, expanded)
    assert torch.equal(found, wrapper.run(q, tuple(x.contiguous() for x in expanded)))


def test_a_batch_expanded_from_one_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = dense()
    expected = wl.attention(q, k[:1], v[:1])
    seen = []
    run = wl.AttentionWrapper.run
    monkeypatch.setattr(
        wl.AttentionWrapper,
        "run",
        lambda self, q, kv, **x: seen.append(kv) or run(self, q, kv, **x),
    )
    found = wl.attention(q, *(x[:1].expand(2, -1, -1, -1) for x in (k, v)))
    assert torch.equal(found, expected)
    assert [len(x) for x in seen[0]] == [1, 1]
    assert seen[0][0].data_ptr() == k.data_ptr()


@pytest.mark.filterwarnings("ignore::warploom.notices.CopyWarning")
@pytest.mark.parametrize("move", [last_apart, column_major])
def test_new_keys_are_appended_from_any_strides(move: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 3, 2, DIM)
    table = [0, 3], [0, 1], [1], [3]
    expected, found = torch.zeros(2, 2, 2, 4, 2, DIM)
    wl.append(k, v, expected, *table)
    for new in ((move(k), v), (k, move(v)), (k, v), (move(k), move(v))):
        found.zero_()
        wl.append(*new, found, *table)
        assert torch.equal(found, expected)
    text = r"k cache has strides .*last stride is 2.* Lay it out with \.contiguous\(\)\.$"
    with pytest.raises(errors.WrongStride, match=text):
        wl.append(k, v, last_apart(found), *table)


def test_compiled_functions_warn_too() -> None:
    q, k, v = dense()
    compiled = torch.compile(wl.attention, backend="eager", fullgraph=True)
    expected = compiled(q, k, v)
    with pytest.warns(CopyWarning):
        assert torch.equal(compiled(last_apart(q), k, v), expected)


@pytest.mark.parametrize("told", [True, False], ids=["told", "untold"])
def test_who_writes_where_is_looked_at_once(told: bool) -> None:
    """By runs with copies, too: those are new memory, which nobody else has."""
    wrapper = wl.AttentionWrapper(
        num_q_heads=2, head_dim=64, dtype="float32", device="cpu", max_scores=told
    )
    wrapper.plan([0, 3], [0, 5])
    q, (k, v) = torch.randn(3, 2, 128)[..., ::2], torch.randn(2, 5, 2, 64)
    given: dict[str, Any] = {"out": torch.empty(3, 2, 64), "lse": torch.empty(3, 2)}
    if told:
        given["max_scores"] = torch.empty(3, 2)
    checks = patch.object(launch, "check_run_apart", wraps=launch.check_run_apart)
    with checks as looks, pytest.warns(CopyWarning):
        wrapper.run(q, (k, v), **given)
    assert looks.call_count == 1
    expected = wrapper.run(q.contiguous(), (k, v))
    assert torch.equal(given["out"], expected)
