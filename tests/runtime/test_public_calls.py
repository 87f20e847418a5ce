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

Q, K = torch.zeros(3, 4, 64), torch.zeros(5, 2, 64)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: wl.SlidingWindow(), r"missing .*'left'. Write SlidingWindow\(left, \.\.\.\)"),
        (
            lambda: wl.SlidingWindow(window=3),
            "takes no 'window'. It is called left",
        ),
        (lambda: wl.Rope(base=1e4), "no 'base'. It is called theta"),
        (lambda: wl.Paged(block_size=16), "no 'block_size'. It is called page_size"),
        (lambda: wl.Paged(colour=16), "It takes page_size, layout.$"),
        (lambda: wl.Bounds(), r"Write Bounds\(max_requests, max_q_rows, max_kv_len, \.\.\.\)"),
        (lambda: wl.Appender(), r"Write Appender\(kv_format=\.\.\., num_kv_heads=\.\.\., head"),
        (lambda: wl.VirtualCache(), "missing .*'pool'. Write VirtualCache"),
        (lambda: wl.GraphPool(lambda x: x, inputs={}), "missing .*'bounds'. Write GraphPool"),
        (lambda: wl.simulate.RooflineCosts(), r"Write RooflineCosts\(model, \.\.\.\)"),
        (lambda: wl.simulate.HostSeconds(1.0), r"Write HostSeconds\(schedule, plan, output\)"),
        (
            lambda: wl.append(append_key=K),
            "'append_key' is no .*; missing.* called k",
        ),
        (lambda: wl.append(K, K, [0], [0], K, [0], [0], [1]), "place of batch_indices"),
        (lambda: wl.attention(Q), r"^attention\(\): missing .*'k'. Write attention\(q, k, v, "),
        (lambda: wl.merge_state(Q, Q), r"Write merge_state\(v_a, s_a, v_b, s_b, \.\.\.\)"),
        (lambda: wl.flex(kernel_options={}), "Leave it out: tiles are chosen"),
        (lambda: wl.draw_mask(wl.Causal(), "x", 3), "draw_mask takes variant, path by position"),
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
    with pytest.raises(TypeError) as caught:
        wl.SlidingWindow(Broken())  # type: ignore[arg-type]
    assert str(caught.value) == "from inside"


class Broken(int):
    def __lt__(self, other: object) -> bool:
        raise TypeError("from inside")
