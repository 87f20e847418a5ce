"""What the CPU back end records, and what may be given to record in."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from support.recorded_variants import ROWS, VARIANTS, Dump, Rows
from support.sampling import few

import warploom as wl
from warploom.codegen.source import TileConfig
from warploom.errors import (
    ArgumentError,
    FrozenByGraph,
    MissingInput,
    UnknownInput,
    WarploomError,
    WrongDevice,
    WrongDType,
    WrongShape,
    WrongStride,
)
from warploom.runtime.trials.case import Case, Setup
from warploom.runtime.trials.trials import Trial, mismatch
from warploom.testing import run_property, warm_up

NAN = float("nan")
SETUPS = [
    Setup(wl.Ragged(), "float32", tile=TileConfig(8, 64, 1, 1)),
    Setup(wl.Paged(16), "bfloat16", tile=TileConfig(24, 64, 1, 1)),
    Setup(wl.Dense(layout="HND"), "float16", 40, 72),
    Setup(wl.BlockSparse(block=(32, 16)), "float32", tile=TileConfig(32, 64, 1, 1)),
    Setup(wl.Composed(4), "float32"),
    Setup(wl.Paged(3), "bfloat16", kv_dtype="float8_e4m3fn"),
]


def test_any_batch_is_recorded_as_the_oracle_does() -> None:
    subjects = [(x, SETUPS[i % len(SETUPS)]) for i, x in enumerate(VARIANTS.values())]
    subjects += [(ROWS, SETUPS[i]) for i in (0, 3, 4)]
    run_property(warm_up(subjects, progress=False), None, few(40, of=75))


def test_split_keys_are_recorded_once_each() -> None:
    for name in ("before a cap", "two parts"):
        for q_lens in ((1,), (5, 1)):
            case = Case(SETUPS[1], q_lens, (900, 300)[: len(q_lens)], 2, 4, scale=2.0, seed=5)
            assert mismatch(VARIANTS[name], case) is None


def test_a_trial_sees_what_is_recorded_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(SETUPS[0], (5,), (9,))
    run = Trial.run

    def spoilt(change: Any) -> str | None:
        def changed(trial: Trial) -> Any:
            results = run(trial)
            change(trial.recorded["seen"])
            return results

        monkeypatch.setattr(Trial, "run", changed)
        return mismatch(VARIANTS["before a cap"], case)

    assert spoilt(lambda seen: None) is None
    assert "writes nothing" in str(spoilt(lambda seen: seen[0, 0, 0, :1].fill_(NAN)))
    assert "writes 0" in str(spoilt(lambda seen: seen[0, 0, 0, 8:].fill_(0.0)))
    assert "seen holds" in str(spoilt(lambda seen: seen[0, 0, 0, :1].add_(0.01)))


# --- ways to give an output


def dense(rows: int = 5, keys: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 2, keys, 2, 64, generator=generator)
    return torch.randn(2, rows, 4, 64, generator=generator), k, v


def products(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) / 8


def empty(*shape: int) -> torch.Tensor:
    return torch.full(shape or (2, 4, 5, 7), NAN)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_given_to_the_call_or_when_the_variant_is_made(backend: str | None) -> None:
    q, k, v = dense()
    given, bound = empty(), empty()
    wl.attention(q, k, v, variant=Dump(), seen=given, backend=backend)
    wl.attention(q, k, v, variant=Dump(seen=bound), backend=backend)
    torch.testing.assert_close(given, products(q, k), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(bound, given)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_given_to_plan_or_to_one_run(backend: str | None) -> None:
    q, k, v = (x.flatten(0, 1) for x in dense())
    variant = Rows() & wl.Causal()
    wrapper = wl.AttentionWrapper(
        variant, kv_format=wl.Ragged(), num_q_heads=4, num_kv_heads=2, head_dim=64,
        dtype="float32", device="cpu", backend=backend,
    )  # fmt: skip
    planned, given = (torch.full((10, 7, 4), NAN, dtype=torch.float16) for _ in range(2))
    wrapper.plan([0, 5, 10], [0, 7, 14], rows=planned)
    out = torch.empty_like(q)
    wrapper.run(q, (k, v), out=out, rows=given)
    assert planned.isnan().all()
    wrapper.run(q, (k, v), out=out)
    assert torch.equal(planned.isnan(), given.isnan())
    torch.testing.assert_close(planned, given, equal_nan=True)
    assert int(given[0].isnan().sum()) == 4 * 4  # the first row sees three keys of seven


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("name", ["lse", "max_scores"])
def test_results_of_rows_are_refused_where_values_are_recorded(
    name: str, backend: str | None
) -> None:
    q, k, v = (x.flatten(0, 1) for x in dense())
    wrapper = wl.AttentionWrapper(
        Rows(), kv_format=wl.Ragged(), num_q_heads=4, num_kv_heads=2, head_dim=64,
        dtype="float32", device="cpu", backend=backend, max_scores=True,
    )  # fmt: skip
    room = torch.zeros(10, 7, 4)
    rows = room.view(torch.float16).view(10, 7, 8)[..., :4]
    wrapper.plan([0, 5, 10], [0, 7, 14], rows=rows)
    with pytest.raises(ArgumentError, match="reaches into the memory of"):
        wrapper.run(q, (k, v), **cast(Any, {name: room[:, 0]}))
    assert not room.any()


def test_views_larger_tensors_and_arrays() -> None:
    q, k, v = dense()
    room = empty(3, 6, 14, 4)
    wl.attention(q, k, v, variant=Dump(), seen=room.permute(0, 3, 1, 2)[..., ::2])
    torch.testing.assert_close(
        room.permute(0, 3, 1, 2)[:2, :, :5, ::2], products(q, k), rtol=1e-5, atol=1e-5
    )
    assert int((~room.isnan()).sum()) == 2 * 4 * 5 * 7
    array = np.full((2, 4, 5, 7), NAN, np.float32)
    wl.attention(q, k, v, variant=Dump(), seen=array)
    np.testing.assert_allclose(array, products(q, k), rtol=1e-5, atol=1e-5)


def test_a_negative_scale() -> None:
    q, k, v = dense()
    for variant in (Dump(), Dump() & wl.SoftCap(2.0)):
        seen = empty()
        wl.attention(q, k, v, variant=variant, seen=seen, sm_scale=-1.0)
        torch.testing.assert_close(seen, -8 * products(q, k), rtol=1e-5, atol=1e-4)


def test_results_are_those_of_a_variant_that_records_nothing() -> None:
    q, k, v = dense(90, 90)
    plain = wl.attention(q, k, v, variant=wl.Causal() & wl.SoftCap(2.0))
    seen = empty(2, 4, 90, 90)
    found = wl.attention(q, k, v, variant=wl.Causal() & Dump() & wl.SoftCap(2.0), seen=seen)
    assert torch.equal(found, plain)


def test_selected_pages_are_recorded_at_their_place_in_the_selection() -> None:
    torch.manual_seed(0)
    q, cache = torch.randn(1, 2, 64), torch.randn(9, 2, 4, 1, 64)
    wrapper = wl.PageSelectionWrapper(
        Dump(), kv_format=wl.Paged(4), num_q_heads=2, num_kv_heads=1, head_dim=64,
        dtype="float32", device="cpu",
    )  # fmt: skip
    seen = empty(1, 2, 1, 16)
    selection = torch.tensor([[[7, 2, 5, 0]]], dtype=torch.int32)
    wrapper.plan([0, 1], [0, 3], selection, [2])
    wrapper.run(q, cache, seen=seen)
    keys = cache[[7, 2, 5], 0].flatten(0, 1)[:10, 0]
    torch.testing.assert_close(seen[0, :, 0, :10], q[0] @ keys.T / 8, rtol=1e-5, atol=1e-5)
    assert seen[..., 10:].isnan().all()


# --- what is refused


@pytest.mark.parametrize(
    ("seen", "error", "text"),
    [
        (empty().half(), WrongDType, "Allocate it with dtype=torch.float32"),
        (empty(2, 4, 4, 7), WrongShape, "q_idx>=5"),
        (empty(2, 4, 5, 6), WrongShape, "kv_pos>=7"),
        (empty(1, 4, 5, 7), WrongShape, "batch>=2"),
        (empty(2, 5, 5, 7), WrongShape, "q_head=4"),
        (empty(4, 5, 7), WrongShape, "batch, q_head"),
        (empty(1).expand(2, 4, 5, 7), WrongStride, "overlap"),
        (empty().requires_grad_(), ArgumentError, "requires a gradient"),
        (torch.empty(2, 4, 5, 7, device="meta"), WrongDevice, "meta"),
        ([[0.0]], ArgumentError, "list"),
        (None, ArgumentError, "None"),
    ],
)
@pytest.mark.parametrize("backend", [None, "reference"])
def test_wrong_outputs(
    seen: Any, error: type[WarploomError], text: str, backend: str | None
) -> None:
    with pytest.raises(error, match=text):
        wl.attention(*dense(), variant=Dump(), seen=seen, backend=backend)


def test_missing_and_read_only() -> None:
    with pytest.raises(MissingInput, match="q_idx>=5"):
        wl.attention(*dense(), variant=Dump())
    array = np.zeros((2, 4, 5, 7), np.float32)
    array.flags.writeable = False
    with pytest.raises(ArgumentError, match="read-only"):
        wl.attention(*dense(), variant=Dump(), seen=array)


@pytest.mark.parametrize("other", ["q", "k", "v", "out", "lse", "max_scores"])
@pytest.mark.parametrize("backend", [None, "reference"])
def test_memory_that_another_tensor_has(other: str, backend: str | None) -> None:
    q, k, v = (x.flatten(0, 1).contiguous() for x in dense())
    given = {"q": q, "k": k, "v": v, "out": torch.empty_like(q)}
    given |= {"lse": torch.empty(10, 4), "max_scores": torch.empty(10, 4)}
    shared = given[other]
    room = torch.zeros(shared.numel() + 280)
    given[other] = room[: shared.numel()].view(shared.shape)
    wrapper = wl.AttentionWrapper(
        Dump(), kv_format=wl.Ragged(), num_q_heads=4, num_kv_heads=2, head_dim=64,
        dtype="float32", device="cpu", backend=backend, max_scores=True,
    )  # fmt: skip
    wrapper.plan([0, 5, 10], [0, 7, 14])

    def run(at: int) -> None:
        seen = room[at : at + 280].view(2, 4, 5, 7)
        results: dict[str, Any] = {name: given[name] for name in ("out", "lse", "max_scores")}
        wrapper.run(given["q"], (given["k"], given["v"]), **results, seen=seen)

    run(shared.numel())
    with pytest.raises(ArgumentError, match=f"the memory of {other}|the memory of seen"):
        run(shared.numel() - 1)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_memory_of_another_field(backend: str | None) -> None:
    q, k, v = dense()
    shared = torch.zeros(2600)
    variant = Dump() & wl.Alibi(slopes=shared[:4])
    seen, out = shared[3:283].view(2, 4, 5, 7), shared[3:2563].view(q.shape)
    wrapper = wl.AttentionWrapper(
        variant, kv_format=wl.Dense(), num_q_heads=4, num_kv_heads=2, head_dim=64,
        dtype="float32", device="cpu", backend=backend,
    )  # fmt: skip
    wrapper.plan([0, 5, 10], [0, 7, 14])
    with pytest.raises(ArgumentError, match="seen: reaches into the memory of slopes"):
        wl.attention(q, k, v, variant=variant, seen=seen, backend=backend)
    with pytest.raises(ArgumentError, match="out: reaches into the memory of slopes"):
        wrapper.run(q, (k, v), seen=empty(), out=out)


def test_rows_of_dense_requests_need_a_batch() -> None:
    q, k, v = dense()
    rows = torch.full((10, 7, 4), NAN, dtype=torch.float16)
    with pytest.raises(ArgumentError, match="add the axis 'batch'"):
        wl.attention(q, k, v, variant=Rows(), rows=rows)
    wl.attention(q[:1], k[:1], v[:1], variant=Rows(), rows=rows)
    assert int((~rows.isnan()).sum()) == 5 * 7 * 4


def test_gradients_and_compilers_know_nothing_of_it() -> None:
    q, k, v = dense()
    seen, variant = empty(), Dump()
    with pytest.raises(ArgumentError, match=r"seen.*no_grad"):
        wl.attention(q.clone().requires_grad_(), k, v, variant=variant, seen=seen)
    with torch.no_grad():
        wl.attention(q.clone().requires_grad_(), k, v, variant=variant, seen=seen)
    assert not seen.isnan().any()
    step = torch.compile(lambda x: wl.attention(q, k, v, variant=variant, seen=x), backend="eager")
    with pytest.raises(Exception, match=r"seen.*outside of torch.compile"):
        step(seen)


def test_compilers_refuse_wrappers_too() -> None:
    q, k, v = (x.flatten(0, 1) for x in dense())
    wrapper = wl.AttentionWrapper(
        Dump(), kv_format=wl.Ragged(), num_q_heads=4, num_kv_heads=2, head_dim=64,
        dtype="float32", device="cpu",
    )  # fmt: skip
    seen = empty()
    wrapper.plan([0, 5, 10], [0, 7, 14], seen=seen)
    step = torch.compile(lambda x: wrapper.run(x, (k, v)), backend="eager")
    with pytest.raises(Exception, match=r"seen.*outside of torch.compile"):
        step(q)
    assert seen.isnan().all()


def test_frozen_outputs_stay_where_they_are() -> None:
    bounds = wl.Bounds(max_requests=2, max_q_rows=10, max_kv_len=7)
    wrapper = wl.AttentionWrapper(
        Dump(), kv_format=wl.Ragged(), num_q_heads=4, num_kv_heads=2, head_dim=64,
        dtype="float32", device="cpu", bounds=bounds, cuda_graph=True,
    )  # fmt: skip
    seen = empty()
    q, k, v = (x.flatten(0, 1) for x in dense())
    wrapper.plan([0, 5, 10], [0, 7, 14], seen=seen)
    wrapper.run(q, (k, v))
    assert not seen.isnan().any()
    with pytest.raises(FrozenByGraph, match="seen"):
        wrapper.plan([0, 5, 10], [0, 7, 14], seen=empty())


def test_appends_record_nothing() -> None:
    class Turned(Dump):
        def key_transform(self, k: Any, at: Any) -> Any:
            return k * 2

    cache = torch.zeros(2, 2, 4, 1, 64)
    k, v = torch.ones(2, 3, 1, 64)
    given: dict[str, Any] = {"seen": empty()}
    with pytest.raises(UnknownInput, match="seen"):
        wl.append(k, v, cache, [0, 3], [0, 1], [0], [3], variant=Turned(), **given)


def test_recordings_over_tensors_that_are_copied_are_refused() -> None:
    """Neither a result nor a key that the kernel cannot reach may lie where values are recorded."""
    sizes: dict[str, Any] = {"num_q_heads": 2, "num_kv_heads": 2, "head_dim": 16}
    wrapper = wl.AttentionWrapper(Dump(), dtype="float32", device="cpu", **sizes)
    q, k, v = torch.randn(3, 8, 2, 16)
    seen = torch.zeros(1, 2, 8, 64)
    wrapper.plan([0, 8], [0, 8], seen=seen)
    over = seen.view(-1)[: 2 * q.numel()].view(8, 2, 16, 2)[..., 0]
    with pytest.raises(ArgumentError, match="reaches into"):
        wrapper.run(q, (k, v), out=over)
    with pytest.raises(ArgumentError, match="reaches into"):
        wrapper.run(q, (over, v))

    with pytest.raises(ArgumentError, match="reaches into"):
        wrapper.run(q, (k, v), out=over, seen=seen.numpy())
