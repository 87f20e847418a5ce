"""Fields that no kernel reads, since they fold away or nothing asks for them, may be given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom.dsl.reference import reference_attention
from warploom.dsl.variants.trace import trace
from warploom.errors import UnknownInput

HEADS, ROWS, DIM = 2, 12, 16


class Folded(wl.Variant):
    """Of its fields only `gain` reaches the kernel."""

    gain = wl.Scalar("float32")
    flag = wl.Scalar("bool")
    other = wl.Scalar("int32", default=3)
    table = wl.Tensor("float32", ("q_head",))

    def logits_transform(self, logits: Any, at: Any) -> Any:
        self.table[at.q_head]  # forgotten
        return wl.where(self.flag, logits * self.gain, logits * self.gain)


UNREAD: dict[str, Any] = {"flag": True, "other": 5, "table": torch.ones(HEADS)}


class Plain(wl.Variant):
    gain = wl.Scalar("float32")

    def logits_transform(self, logits: Any, at: Any) -> Any:
        return logits * self.gain


def tensors() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    return tuple(torch.randn(1, ROWS, HEADS, DIM) for _ in range(3))


def test_a_trace_names_them() -> None:
    traced = trace(Folded())
    assert traced.input_names == ("gain",)
    assert traced.unread == ("flag", "other", "table")
    assert trace(Plain()).unread == ()


@pytest.mark.parametrize("backend", [None, "reference"])
def test_attention_takes_and_does_not_use_them(backend: Any) -> None:
    q, k, v = tensors()
    expected = wl.attention(q, k, v, variant=Plain(), gain=0.5, backend=backend)
    for given in (UNREAD, {}, {"flag": "no bool", "table": torch.ones(99, 3)}):
        found = wl.attention(q, k, v, variant=Folded(), gain=0.5, backend=backend, **given)
        torch.testing.assert_close(found, expected)
    bound = wl.attention(q, k, v, variant=Folded(gain=0.5, **UNREAD), backend=backend)
    torch.testing.assert_close(bound, expected)
    out, _ = reference_attention(Folded(), q[0], k[0], v[0], inputs={"gain": 0.5, **UNREAD})
    np.testing.assert_allclose(out, expected[0], atol=1e-5)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_wrappers_take_them_in_plans_and_in_all_runs(backend: Any) -> None:
    q, k, v = (x[0] for x in tensors())
    wrapper = wl.AttentionWrapper(
        Folded, kv_format=wl.Ragged(), num_q_heads=HEADS, num_kv_heads=HEADS, head_dim=DIM,
        dtype="float32", device="cpu", backend=backend,
    )  # fmt: skip
    expected = wl.attention(q[None], k[None], v[None], variant=Plain(gain=0.5))[0]
    wrapper.plan([0, ROWS], [0, ROWS], gain=9.0, **UNREAD)
    for _ in range(3):  # the second run knows its tensors
        torch.testing.assert_close(wrapper.run(q, (k, v), gain=0.5, **UNREAD), expected)
    learnt = torch.ones(HEADS, requires_grad=True)
    torch.testing.assert_close(wrapper.run(q, (k, v), gain=0.5, table=learnt), expected)
    with pytest.raises(UnknownInput, match=r"no input 'tabel'. Did you mean 'table'"):
        wrapper.run(q, (k, v), gain=0.5, tabel=learnt)


def test_page_selections_take_them() -> None:
    q, k, v = (x[0] for x in tensors())
    wrapper = wl.PageSelectionWrapper(
        Folded, kv_format=wl.Paged(ROWS), num_q_heads=HEADS, num_kv_heads=HEADS, head_dim=DIM,
        dtype="float32", device="cpu",
    )  # fmt: skip
    expected = wl.attention(q[None], k[None], v[None], variant=Plain(gain=0.5))[0]
    one = torch.ones(1, dtype=torch.int32)
    table = torch.zeros(1, HEADS, 1, dtype=torch.int32)
    wrapper.plan([0, ROWS], [0, 1], table, ROWS * one, gain=0.5, **UNREAD)
    torch.testing.assert_close(wrapper.run(q, (k[None], v[None]), **UNREAD), expected)


def test_captured_tensors_that_fold_away_may_be_given() -> None:
    table = torch.ones(HEADS)
    variant = wl.flex(lambda s, b, h, i, j: torch.where(table[h] > 0, s, s))
    assert trace(variant).unread == ("table",)
    q, k, v = tensors()
    found = wl.attention(q, k, v, variant=variant, table=torch.zeros(HEADS))
    torch.testing.assert_close(found, wl.attention(q, k, v))


def test_compiled_functions_and_appends_take_them() -> None:
    q, k, v = tensors()
    variant = Folded(gain=0.5)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(flag: bool, table: torch.Tensor) -> Any:
        return wl.attention(q, k, v, variant=variant, flag=flag, table=table)

    expected = wl.attention(q, k, v, variant=variant)
    torch.testing.assert_close(attend(True, torch.ones(HEADS)), expected)
    cache = torch.zeros(2, 1, 16, HEADS, DIM)
    tables = [0, ROWS], [0, 1], [0], [ROWS]
    tables_ = [torch.tensor(x, dtype=torch.int32) for x in tables]
    wl.append(k[0], v[0], (cache[0], cache[1]), *tables_, variant=variant, **UNREAD)
    torch.testing.assert_close(cache[0, 0, :ROWS], k[0])
