"""What is told to whom FlexAttention's functions and arguments are known, in their words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom import errors

Q = torch.zeros(1, 4, 8, 16)
TABLE: Any = torch.zeros(8)
BIAS, EMPTY = torch.zeros(4, 8, 8), torch.zeros(0)


def scored(function: Callable[..., Any]) -> None:
    wl.flex_attention(Q, Q, Q, score_mod=lambda score, b, h, i, j: score + function(h, i, j))


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda h, i, j: TABLE[True], r"indexing it by True .* write 1 for an element, or None"),
        (lambda h, i, j: TABLE[np.False_], r"indexing it by .*False_? .* write 0 for an element"),
        (lambda h, i, j: TABLE[1.5], r"indexing it by 1\.5 .* are ints: .* TABLE\[kv_idx\]"),
        (lambda h, i, j: torch.ones(3), r"as in table\[kv_idx\]\..*: do so before, outside"),
        (lambda h, i, j: torch.ones(8, 8), r"as in table\[h, kv_idx\]"),
        (lambda h, i, j: torch.ones(4, 8, 8), r"as in table\[h, q_idx, kv_idx\]"),
        (lambda h, i, j: torch.ones(1, 4, 8, 8), r"as in table\[b, h, q_idx, kv_idx\]"),
        (lambda h, i, j: torch.ones(1, 1, 4, 8, 8), r"as in table\[\.\.\.\]"),
    ],
)
def test_indices_are_told_in_the_order_of_the_tensor(
    function: Callable[..., Any], told: str
) -> None:
    with pytest.raises(errors.CannotTrace, match=told) as caught:
        scored(function)
    assert "field" not in str(caught.value) and "to_int" not in str(caught.value)


@pytest.mark.parametrize(
    ("mask", "told"),
    [
        (lambda b, h, i, j: i - j, r"an int32; expected a bool\. Compare, as in q_idx >= kv_idx"),
        (lambda b, h, i, j: ~(i - j), r"an int32; expected a bool \(`~` of an int is an int\)\."),
        (lambda b, h, i, j: -1, r"an int32; expected a bool \(of a bool of Python's own `~` makes"),
        (lambda b, h, i, j: 7, r"an int32; expected a bool\. Compare"),
        (lambda b, h, i, j: 1.0 * i, r"a float32; expected a bool\. Compare"),
    ],
)
def test_the_remark_about_complements_is_made_of_complements(
    mask: Callable[..., Any], told: str
) -> None:
    with pytest.raises(errors.WrongResult, match=told):
        wl.flex(mask_mod=mask)


@pytest.mark.parametrize("q_idx", ["row", "position"])
def test_values_are_shown_by_the_names_of_the_function(q_idx: Any, capsys: Any) -> None:
    def score_mod(points: Any, b: Any, head: Any, row: Any, column: Any) -> Any:
        print(points, b, head, row, column, row - column, BIAS[head, 0, column], sep="\n")
        return points

    wl.flex(score_mod, q_idx=q_idx)
    kinds = ["float32", *["int32"] * 5, "float32"]
    texts = "points", "b", "head", "row", "column", "row - column", "BIAS[head, 0, column]"
    assert capsys.readouterr().out.splitlines()[:7] == [
        f"<{kind} known only in the kernel: {text}>"
        for kind, text in zip(kinds, texts, strict=True)
    ]


def test_values_of_functions_without_names_are_shown_by_flexattentions(capsys: Any) -> None:
    def mask_mod(*given: Any) -> Any:
        print(given[2] >= given[3])
        return given[2] >= given[3]

    wl.flex(mask_mod=mask_mod)
    shown = capsys.readouterr().out
    assert shown.startswith("<bool known only in the kernel: q_idx >= kv_idx>")


def test_functors_of_classes_show_their_own_names(capsys: Any) -> None:
    class Shows(wl.Variant):
        table = wl.Tensor("float32", ("kv_pos",))

        def logits_transform(self, logits: Any, at: Any) -> Any:
            print(logits * self.table[at.kv_pos])
            return logits

    chained = wl.flex(lambda score, b, h, i, j: score) & Shows()
    wl.AttentionWrapper(chained, num_q_heads=1, head_dim=16, backend="reference")
    shown = capsys.readouterr().out
    assert shown.startswith("<float32 known only in the kernel: logits * self.table[at.kv_pos]>")


CASES: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    ((Q, Q.to("meta"), Q), {}, r"^key is on meta; expected cpu, as query\. Move it with .to\('cpu"),
    ((Q, Q.half(), Q), {}, "^key has dtype torch.float16"),
    ((Q, Q, Q[:, :, :4]), {}, "^value has shape .* as key"),
    ((Q, Q[..., :8], Q), {}, "^key has shape .* head dimension 16, as query"),
    ((Q[0], Q, Q), {}, r"^query has shape \(4, 8, 16\); expected \[batch, heads, tokens, dim\]"),
    ((Q, Q, Q[..., :3]), {}, "^value's head_dim=3 is not supported"),
    ((Q, Q, Q), {"scale": "x"}, "^scale: is 'x'"),
]


@pytest.mark.parametrize(("given", "more", "told"), CASES)
def test_arguments_of_flex_attention_have_its_names(given: Any, more: Any, told: str) -> None:
    with pytest.raises(errors.WarploomError, match=told) as caught:
        wl.flex_attention(*given, **more)
    assert isinstance(caught.value.__cause__, type(caught.value))


def test_captured_tensors_keep_their_names() -> None:
    k = torch.zeros(3)
    with pytest.raises(errors.WrongShape, match=r"^k_tensor has shape \(3,\); expected at least 8"):
        scored(lambda h, i, j: k[j])


def test_dimensions_without_elements_are_named() -> None:
    """They were told to have any length, or to be made like a BlockMask."""
    with pytest.raises(errors.WrongShape, match=r"EMPTY has shape \(0,\); expected no dimension"):
        scored(lambda h, i, j: EMPTY[j])

    class Reads(wl.Variant):
        table = wl.Tensor("float32", (None,))

        def logits_transform(self, logits: Any, at: Any) -> Any:
            return logits + self.table[at.kv_pos]

    told = r"\(0,\); expected \[any\], and no dimension of 0"
    with pytest.raises(errors.WrongShape, match=told):
        wl.attention(Q, Q, Q, variant=Reads(), layout="HND", table=EMPTY)


def test_what_is_written_to_is_allocated_on_the_device() -> None:
    wrapper = wl.AttentionWrapper(num_q_heads=4, head_dim=16, dtype="float32", device="cpu")
    wrapper.plan([0, 8], [0, 8])
    q = Q[0].transpose(0, 1).contiguous()
    with pytest.raises(errors.WrongDevice, match=r"^out is on meta; .* Allocate it there"):
        wrapper.run(q, (q, q), out=q.to("meta"))
    with pytest.raises(errors.WrongDevice, match=r"cpu, which the wrapper was made for. M"):
        wrapper.run(q.to("meta"), (q, q))
