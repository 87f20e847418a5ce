"""Public classes and functions answer calls that do not fit with what to write."""

from __future__ import annotations

import inspect
import pickle
from importlib import import_module
from typing import Any

import pytest
import torch

import warploom as wl
from warploom import errors
from warploom.serving.simulation import schedules as simulation

ANY: Any = wl  # type checkers would refuse these calls
Q, K = torch.zeros(3, 4, 64), torch.zeros(5, 2, 64)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: ANY.SlidingWindow(), r"missing .*'left'. Write SlidingWindow\(left, \.\.\.\)"),
        (
            lambda: ANY.SlidingWindow(window=3),
            "takes no 'window'. It is called left",
        ),
        (lambda: ANY.Rope(base=1e4), "no 'base'. It is called theta"),
        (lambda: ANY.Rope(scale=2.0), "no 'scale'. It is called scaling"),
        (lambda: ANY.Paged(block_size=16), "no 'block_size'. It is called page_size"),
        (lambda: ANY.Paged(colour=16), "It takes page_size, layout.$"),
        (lambda: ANY.Bounds(), r"Write Bounds\(max_requests, max_q_rows, max_kv_len, \.\.\.\)"),
        (lambda: ANY.Appender(), r"Write Appender\(kv_format=\.\.\., num_kv_heads=\.\.\., head"),
        (lambda: ANY.VirtualCache(), "missing .*'pool'. Write VirtualCache"),
        (lambda: ANY.GraphPool(lambda x: x, inputs={}), "missing .*'bounds'. Write GraphPool"),
        (lambda: ANY.distributed.ZigZag(), r"^ZigZag\(\): missing .* Write ZigZag\(world\)"),
        (lambda: ANY.custom_function(), r"Write custom_function\(name"),
        (lambda: ANY.simulate.RooflineCosts(), r"Write RooflineCosts\(model, \.\.\.\)"),
        (lambda: ANY.simulate.HostSeconds(1.0), r"Write HostSeconds\(schedule, plan, output\)"),
        (
            lambda: ANY.append(append_key=K),
            "'append_key' is no .*; missing.* called k",
        ),
        (lambda: ANY.append(K, K, [0], [0], K, [0], [0], [1]), "place of batch_indices"),
        (lambda: ANY.attention(Q), r"^attention\(\): missing .*'k'. Write attention\(q, k, v, "),
        (lambda: ANY.merge_state(Q, Q), r"Write merge_state\(v_a, s_a, v_b, s_b, \.\.\.\)"),
        (lambda: ANY.flex(kernel_options={}), "Leave it out: tiles are chosen"),
        (lambda: ANY.draw_mask(wl.Causal(), "x", 3), "draw_mask takes variant, path by position"),
    ],
)
def test_every_public_name_says_what_to_write(call: Any, text: str) -> None:
    with pytest.raises(errors.WrongCall, match=text):
        call()


def test_explained_names_are_what_they_were() -> None:
    """Where they live and at the face: one object, which pickle finds."""
    assert pickle.loads(pickle.dumps(wl.merge_state)) is wl.merge_state
    assert wl.merge_state is import_module("warploom.runtime.calls.merge").merge_state
    assert [*inspect.signature(wl.SlidingWindow).parameters] == ["left", "right", "sinks"]
    before = vars(simulation.Schedule)["__init__"]  # typing's, of a protocol
    assert wl.simulate.Schedule.__init__ is before
    with pytest.raises(TypeError) as caught:
        wl.SlidingWindow(Broken())  # type: ignore[arg-type]
    assert str(caught.value) == "from inside"


class Broken(int):
    def __ne__(self, other: object) -> bool:
        raise TypeError("from inside")


WRAPPER: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "device": "cpu"}


def test_a_wrapper_shows_what_was_declared_and_whether_it_has_a_plan() -> None:
    made = wl.AttentionWrapper(
        wl.Causal() & wl.KVScale(1.0, 1.0), kv_format=wl.Paged(8), dtype="bfloat16",
        kv_dtype="int8", head_dim_v=32, backend="reference", **WRAPPER,
    )  # fmt: skip
    shape = "num_q_heads=4, num_kv_heads=2, head_dim=64, head_dim_v=32, dtype=bfloat16, kv_dtype="
    variant = "Causal() & KVScale(k_scale=1.0, v_scale=1.0)"
    declared = f"Paged(layout='NHD', page_size=8), {shape}int8, device=cpu"
    assert repr(made) == f"AttentionWrapper({variant}, {declared}, not planned)"
    made.plan([0, 1], [0, 1], [0], [1])
    assert repr(made).endswith(", planned)")
    assert repr(wl.AttentionWrapper(backend="reference", **WRAPPER)).startswith(
        "AttentionWrapper(no variant, Ragged(layout='NHD'), "
    )
    assert "object at" in repr(object.__new__(wl.AttentionWrapper))


def test_names_of_flashinfers_wrappers_say_what_to_call() -> None:
    made: Any = wl.AttentionWrapper(backend="reference", **WRAPPER)
    for name, text in (
        ("forward", r"call plan\(.*and run\(q, \(k, v\)\)$"),
        ("begin_forward", r"it is called plan\("),
        ("end_forward", "leave it out"),
        ("run_return_lse", "return_lse=True"),
        ("forward_return_lse", "return_lse=True"),
        ("colour", "no attribute 'colour'$"),
    ):
        with pytest.raises(AttributeError, match=text):
            getattr(made, name)
    assert not hasattr(made, "forward")


def test_a_field_of_a_shipped_variant_under_another_librarys_name() -> None:
    made = wl.AttentionWrapper(
        wl.SlidingWindow(3), kv_format=wl.Ragged(), dtype="float32", **WRAPPER
    )
    with pytest.raises(errors.UnknownInput, match=r"'window_left'\. It is called left"):
        made.plan([0, 1], [0, 4], window_left=3)
    plain = wl.AttentionWrapper(kv_format=wl.Ragged(), dtype="float32", **WRAPPER)
    with pytest.raises(errors.UnknownInput, match="A window is a variant"):
        plain.plan([0, 1], [0, 4], window_left=3)
