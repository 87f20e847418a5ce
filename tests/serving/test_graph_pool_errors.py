"""What graph pools refuse, and that they still serve afterwards."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom.errors import (
    ArgumentError,
    ForbiddenUnderCapture,
    NoGpu,
    WarploomError,
    WrongCall,
    WrongDType,
    WrongShape,
)
from warploom.graph_errors import (
    BudgetBelowCapture,
    CaptureFailed,
    CaptureGone,
    DataDependent,
    InputWritten,
    NoSuchMode,
    NotStatic,
    OutputsChanged,
    PoolBoundsExceeded,
    PoolClosed,
    PoolInUse,
    WrongInputs,
)

BOUNDS = wl.Bounds(max_requests=8, max_q_rows=8, max_kv_len=8)
INPUTS = {"x": wl.GraphInput(torch.float32, (4,))}
X = torch.arange(12.0).reshape(3, 4)


def pool_of(step: Any, **options: Any) -> wl.GraphPool:
    return wl.GraphPool(step, options.pop("inputs", INPUTS), BOUNDS, device="cpu", **options)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


WRONG_POOLS: list[tuple[str, dict[str, Any], type[WarploomError]]] = [
    ("bucket of no rows", {"buckets": [0, 2]}, ArgumentError),
    ("bucket beyond the bounds", {"buckets": [4, 9]}, ArgumentError),
    ("no buckets", {"buckets": []}, ArgumentError),
    ("bucket that is no int", {"buckets": [2.0]}, ArgumentError),
    ("budget of nothing", {"max_bytes": 0}, ArgumentError),
    ("negative limit", {"full_rows": -1}, ArgumentError),
    ("another word", {"on_failure": "ignore"}, ArgumentError),
    ("no inputs", {"inputs": {}}, WrongInputs),
    ("input that is no declaration", {"inputs": {"x": torch.float32}}, ArgumentError),
    (
        "padding with a fraction",
        {"inputs": {"x": wl.GraphInput(torch.int32, pad=0.9)}},
        ArgumentError,
    ),
    ("padding beyond int8", {"inputs": {"x": wl.GraphInput(torch.int8, pad=300)}}, ArgumentError),
    (
        "padding beyond float16",
        {"inputs": {"x": wl.GraphInput(torch.float16, pad=1e6)}},
        ArgumentError,
    ),
    (
        "no number in int32",
        {"inputs": {"x": wl.GraphInput(torch.int32, pad=math.nan)}},
        ArgumentError,
    ),
    ("padding that is no flag", {"inputs": {"x": wl.GraphInput(torch.bool, pad=2)}}, ArgumentError),
    ("shape that is a number", {"inputs": {"x": wl.GraphInput(torch.int32, 3)}}, ArgumentError),  # type: ignore[arg-type]
    ("inputs without names", {"inputs": [wl.GraphInput(torch.int32)]}, ArgumentError),
    ("buckets that are one", {"buckets": 4}, ArgumentError),
    ("buckets of different kinds", {"buckets": [2, "4"]}, ArgumentError),
    ("buckets that are lists", {"buckets": [[4]]}, ArgumentError),
    ("no function", {"step": 3}, ArgumentError),
    ("no functions", {"step": []}, ArgumentError),
    ("input that there is not", {"step": lambda x, y: x + y}, WrongCall),
]


@pytest.mark.parametrize(
    ("options", "error"), [case[1:] for case in WRONG_POOLS], ids=[case[0] for case in WRONG_POOLS]
)
def test_pools_that_cannot_be(options: dict[str, Any], error: type[WarploomError]) -> None:
    with pytest.raises(error):
        pool_of(**{"step": double, **options})


@pytest.mark.parametrize("dtype", ["int46", "Tensor", int, None, "torch.nn"])
def test_what_names_no_type_is_refused_at_once(dtype: Any) -> None:
    with pytest.raises(ArgumentError, match=r"a torch\.dtype or its name, such as 'int64'"):
        wl.GraphInput(dtype)


def test_another_word_for_when_a_piece_is_captured_is_refused_at_once() -> None:
    with pytest.raises(ArgumentError, match="'sometimes'; expected 'always', 'full' or 'never'"):
        wl.GraphPiece(double, captured="sometimes")  # type: ignore[arg-type]


def test_bounds_and_devices_are_checked() -> None:
    with pytest.raises(ArgumentError, match="bounds"):
        wl.GraphPool(double, INPUTS, 8, device="cpu")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="max_q_rows"):
        wl.GraphPool(double, INPUTS, wl.Bounds(1, 0, 1), device="cpu")
    if not torch.cuda.is_available():
        with pytest.raises(NoGpu):
            wl.GraphPool(double, INPUTS, BOUNDS, device="cuda")


WRONG_BATCHES: list[tuple[str, Any, type[WarploomError]]] = [
    ("no mapping", X, WrongInputs),
    ("another name", {"y": X}, WrongInputs),
    ("too many", {"x": X, "y": X}, WrongInputs),
    ("no tensor", {"x": [1.0]}, WrongInputs),
    ("no rows", {"x": X[:0]}, WrongInputs),
    ("type", {"x": X.double()}, WrongDType),
    ("shape of a row", {"x": X[:, :3]}, WrongShape),
    ("no dimension", {"x": torch.tensor(1.0)}, WrongShape),
    ("beyond the bounds", {"x": torch.zeros(9, 4)}, PoolBoundsExceeded),
]


@pytest.mark.parametrize(
    ("batch", "error"),
    [case[1:] for case in WRONG_BATCHES],
    ids=[case[0] for case in WRONG_BATCHES],
)
def test_batches_that_were_not_declared(batch: Any, error: type[WarploomError]) -> None:
    pool = pool_of(double)
    with pytest.raises(error):
        pool.run(batch)
    assert torch.equal(pool.run({"x": X}), X * 2)


def test_inputs_have_equally_many_rows() -> None:
    pool = pool_of(double, inputs=INPUTS | {"y": wl.GraphInput(torch.int32)})
    with pytest.raises(WrongInputs, match="2 and 3 rows"):
        pool.run({"x": X, "y": torch.zeros(2, dtype=torch.int32)})


def test_modes_that_there_are_not() -> None:
    pool = pool_of(double, buckets=[2])
    with pytest.raises(NoSuchMode, match="full, partial, eager"):
        pool.choose(1, "fast")
    with pytest.raises(NoSuchMode, match="largest bucket has 2"):
        pool.run({"x": X}, mode="full")
    with pytest.raises(ArgumentError):
        pool.choose(0)


def looks(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum().item() > -1 else x


def branches(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if (x > -1).any() else x


def compares(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if 2.0 in x or x[0, 0] < 3 else x


def lists(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.tolist() else x


def leaves_torch(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if np.asarray(x).size and x.numpy().size else x


def finds(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if len(torch.where(x > -1)) else x


def masks(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[x > 2] = 0
    return x * 2


def breaks(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("no such layer")


@pytest.mark.parametrize("step", [looks, branches, compares, lists, leaves_torch, finds, masks])
def test_steps_that_look_at_values(step: Callable[..., Any]) -> None:
    wanted = step(X)
    pool = pool_of(step)
    for _ in range(2):
        with pytest.raises(DataDependent, match="GraphPiece"):
            pool.run({"x": X})
    assert torch.equal(pool.run({"x": X}, mode="eager"), wanted)
    falling = pool_of(step, on_failure="eager")
    for _ in range(2):
        assert torch.equal(falling.run({"x": X}), wanted)
    stats = falling.stats()
    assert stats.failures == 1 and stats.runs["eager"] == 2 and stats.captured == ()
    assert "DataDependent" in falling.choose(3).reason and falling.choose(8).mode == "full"


def test_a_part_that_cannot_be_captured_leaves_the_rest_to_partial_mode() -> None:
    pool = pool_of([double, wl.GraphPiece(looks, "full"), double], on_failure="eager")
    assert torch.equal(pool.run({"x": X}), X * 8)
    assert pool.choose(3).mode == "partial"
    assert torch.equal(pool.run({"x": X}), X * 8)
    assert pool.stats().runs == {"full": 0, "partial": 1, "eager": 1}


def test_warming_up_tries_the_mode_that_is_left() -> None:
    pool = pool_of([double, wl.GraphPiece(looks, "full"), double], on_failure="eager")
    assert pool.warm_up() == len(pool.buckets) > 1
    assert torch.equal(pool.run({"x": X}), X * 8)
    assert pool.stats().runs == {"full": 0, "partial": 1, "eager": 0}


def test_steps_that_write_to_their_inputs_are_refused() -> None:
    """Padding would grow by one with each batch, and index past a table in the end."""

    def counts(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1) * 2

    for on_failure in ("raise", "eager"):
        pool = pool_of(counts, on_failure=on_failure)
        with pytest.raises(InputWritten, match="writes to its input x"):
            pool.run({"x": X.clone()})


def test_errors_of_the_step_are_its_own() -> None:
    with pytest.raises(ValueError, match="no such layer"):
        pool_of(breaks, on_failure="eager").run({"x": X})


WRONG_RESULTS: dict[str, Callable[..., Any]] = {
    "none": lambda x: None,
    "a number": lambda x: 3.0,
    "nothing": lambda x: (),
    "one row": lambda x: x.sum(0, keepdim=True),
    "no rows": lambda x: x.sum(),
}


@pytest.mark.parametrize("mode", ["full", "eager"])
@pytest.mark.parametrize("step", WRONG_RESULTS.values(), ids=WRONG_RESULTS)
def test_results_that_no_replay_can_rewrite(step: Callable[..., Any], mode: str) -> None:
    with pytest.raises(NotStatic, match=r"rows"):
        pool_of(step).run({"x": X}, mode=mode)


def test_outputs_are_alike_for_all_batches() -> None:
    pool = pool_of(lambda x: x.repeat(1, len(x)))
    pool.run({"x": X})
    with pytest.raises(OutputsChanged, match=r"\[rows, 32\], and .*\[rows, 16\] before"):
        pool.run({"x": torch.zeros(8, 4)})
    with pytest.raises(OutputsChanged):
        pool.run({"x": X[:2]}, mode="eager")
    pool.run({"x": X})


def test_outputs_that_differ_from_call_to_call() -> None:
    calls: list[int] = []

    def growing(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.repeat(1, len(calls))

    with pytest.raises(OutputsChanged):
        pool_of(growing).run({"x": X})


def test_memory_that_a_capture_reads_must_stay() -> None:
    weights = {"w": torch.full((4,), 3.0)}
    pool = pool_of(lambda x: x * weights["w"])
    assert torch.equal(pool.run({"x": X}), X * 3)
    weights["w"] = torch.full((4,), 5.0)
    gc.collect()
    with pytest.raises(CaptureGone, match="Hold what the step reads"):
        pool.run({"x": X})
    pool.clear()  # which is what to do when weights have moved
    assert torch.equal(pool.run({"x": X}), X * 5)


def test_captures_do_not_nest() -> None:
    inner = pool_of(double)
    outer = pool_of(lambda x: inner.run({"x": x}) * 1)
    with pytest.raises(CaptureFailed, match="ForbiddenUnderCapture"):
        outer.run({"x": X})

    def asks_itself(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = own.run({"x": x})
        return result

    own = pool_of(asks_itself)
    with pytest.raises(PoolInUse, match="run\\(\\) of thread"):
        own.run({"x": X})
    assert torch.equal(inner.run({"x": X}), X * 2)


def test_plans_are_refused_within_a_step() -> None:
    attention = wl.AttentionWrapper(
        kv_format=wl.Ragged(), num_q_heads=1, head_dim=64, dtype="float32", device="cpu",
        bounds=BOUNDS, cuda_graph=True,
    )  # fmt: skip

    def planning(x: torch.Tensor) -> torch.Tensor:
        attention.plan([0, len(x)], [0, 8])
        return x * 2

    with pytest.raises(CaptureFailed, match=ForbiddenUnderCapture.__name__):
        pool_of(planning).run({"x": X})
    assert torch.equal(pool_of(planning, on_failure="eager").run({"x": X}), X * 2)


def test_threads_do_not_share_a_pool() -> None:
    entered, go = threading.Event(), threading.Event()

    def waits(x: torch.Tensor) -> torch.Tensor:
        entered.set()
        assert go.wait(10)
        return x * 2

    pool = pool_of(waits)
    thread = threading.Thread(target=pool.run, args=({"x": X},), name="first")
    thread.start()
    assert entered.wait(10)
    with pytest.raises(PoolInUse, match="thread first"):
        pool.run({"x": X})
    go.set()
    thread.join()
    assert torch.equal(pool.run({"x": X}), X * 2)


def test_closed_pools_serve_nothing() -> None:
    with pool_of(double) as pool:
        pool.run({"x": X})
    pool.close()
    for call in (lambda: pool.run({"x": X}), pool.warm_up, pool.clear):
        with pytest.raises(PoolClosed):
            call()
    assert pool.stats().captured == () and pool.stats().own_bytes == 0


def test_a_budget_below_one_capture() -> None:
    pool = pool_of(double, max_bytes=100)
    with pytest.raises(BudgetBelowCapture, match="max_bytes is 100, and full of 4 rows"):
        pool.run({"x": X})
    assert pool.stats().captured == () and pool.stats().shared_bytes == 0
    assert torch.equal(pool.run({"x": X}, mode="eager"), X * 2)
    falling = pool_of(double, max_bytes=100, on_failure="eager")
    assert falling.warm_up() == 0
    assert torch.equal(falling.run({"x": X}), X * 2)
    assert falling.stats().failures == 1


@pytest.mark.parametrize(
    "other",
    [lambda x: x.double(), lambda x: x[:, :2], lambda x: (x, x)],
    ids=["type", "shape", "number"],
)
def test_what_changes_between_graphs_is_refused(other: Callable[[torch.Tensor], Any]) -> None:
    """The graph behind would read what an earlier batch left at its own address."""
    between: list[Callable[[torch.Tensor], Any]] = [double]
    step: list[Any] = [
        double,
        wl.GraphPiece(lambda x: between[0](x), "never"),
        lambda *flow: torch.stack([x.sum(1) for x in flow]).sum(0).float(),
    ]
    pool = pool_of(step)
    pool.run({"x": X})
    between[0] = other
    for _ in range(2):
        with pytest.raises(OutputsChanged):
            pool.run({"x": X + 1})
    between[0] = double
    assert torch.equal(pool.run({"x": X + 1}), (X + 1).sum(1) * 4)


def test_outputs_may_be_others_after_clear() -> None:
    weight = [torch.ones(4, 4)]
    pool = pool_of(lambda x: x.to(weight[0].dtype) @ weight[0])
    pool.run({"x": X})
    weight[0] = weight[0].double()
    pool.clear()
    assert pool.run({"x": X}).dtype == torch.float64
