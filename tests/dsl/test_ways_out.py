"""What needs the value of something in the kernel names the way out; values print readably."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import warploom as wl
from warploom.dsl.variants.trace import trace
from warploom.errors import CannotTrace


@pytest.mark.parametrize(
    ("compute", "cure"),
    [
        (lambda x, at: math.tanh(x), "Write wl.tanh"),
        (lambda x, at: float(x), "wl.to_float"),
        (lambda x, at: int(x), "wl.to_int"),
        (lambda x, at: round(x), "torch.round"),
        (lambda x, at: len(range(at.kv_len)), "count of a loop must be a Python number"),
        (lambda x, at: f"{x:.3f}", "wl.Output"),
        (lambda x, at: np.interp(x, [0, 1], [0, 1]), "Tensor field"),
        (lambda x, at: np.cumsum(x), "one query and one key"),
        (lambda x, at: [1, 2][at.kv_pos], "declare tables as Tensor fields"),
    ],
)
def test_what_needs_a_number_names_the_way_out(
    compute: Callable[[Any, Any], Any], cure: str
) -> None:
    class Needs(wl.Variant):
        def logits_transform(self, logits: Any, at: Any) -> Any:
            return compute(logits, at)

    with pytest.raises(CannotTrace, match=cure):
        trace(Needs())


def test_values_print_readably_however_large_their_graph_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Prints(wl.Variant):
        table = wl.Tensor("float32", ("q_head", None))

        def logits_transform(self, logits: Any, at: Any) -> Any:
            deep = logits
            for _ in range(60):
                deep = wl.tanh(deep) + deep
            near = wl.where(at.kv_pos > at.q_pos, logits * 2.5, self.table[at.q_head, at.kv_pos])
            print(near, at, self.table, deep, sep="\n")
            return logits

    trace(Prints())
    near, at, table, deep, *_ = capsys.readouterr().out.splitlines()
    text = "where(at.kv_pos > at.q_pos, logits * 2.5, self.table[at.q_head, at.kv_pos])"
    assert near == f"<float32 known only in the kernel: {text}>"
    assert at == "<the position in logits_transform>"
    assert table == "<tensor field 'table'>"
    assert len(deep) < 300
