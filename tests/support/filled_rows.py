"""Rows whose keys are all filled with large finite numbers: each key weighs the same.

PyTorch users fill with `torch.finfo(dtype).min`, and such a row is the mean of its values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import warploom as wl
from support.filled import Filled

ROWS = 70
# Beside them a float64 loses the products, too.
FILLS = (-1e30, -1e38, *(torch.finfo(t).min for t in (torch.bfloat16, torch.float32)))


def with_constant(fill: float) -> wl.Variant:
    class Fixed(wl.Variant):
        """Some rows are filled, others see some keys."""

        def logits_transform(self, logits: Any, at: Any) -> Any:
            return wl.where(at.kv_pos <= at.q_pos - ROWS // 2, logits, fill)

    return Fixed()


class ChosenFill(wl.Variant):
    fill = wl.Scalar("float32")

    def logits_transform(self, logits: Any, at: Any) -> Any:
        return wl.where(at.kv_pos <= at.q_pos - ROWS // 2, logits, self.fill)


class TableBias(wl.Variant):
    table = wl.Tensor("float32", ("q_pos", "kv_pos"))

    def logits_transform(self, logits: Any, at: Any) -> Any:
        return 2.0 * logits - -self.table[at.q_pos, at.kv_pos]


class RowWeight(wl.Variant):
    """A number of the row times one of the element."""

    weight = wl.Tensor("float32", ("q_head",))

    def logits_transform(self, logits: Any, at: Any) -> Any:
        return logits + self.weight[at.q_head] * wl.where(at.kv_pos >= 0, 0.5, 0.0)


def filled_variants(fill: float) -> dict[str, wl.Variant]:
    """Variants with a row of such logits at least, by name."""
    return {
        "a constant": with_constant(fill),
        "a scalar": ChosenFill(fill=fill),
        "a bias of columns": Filled(bias=torch.full((ROWS,), fill)),
        "a bias of elements": TableBias(table=torch.full((ROWS, ROWS), fill)),
        "a weight of rows": RowWeight(weight=torch.full((2,), fill)),
        "infinity": Filled(bias=torch.full((ROWS,), -torch.inf)),
    }


def check_filled_rows(variant: wl.Variant, dtype: torch.dtype, **options: Any) -> None:
    """Output and log-sum-exp agree with the oracle's."""
    q, k, v = (torch.randn(ROWS, 2, 64, device=options["device"]).to(dtype) for _ in range(3))
    name = str(dtype).removeprefix("torch.")
    wrapper = wl.AttentionWrapper(
        variant, kv_format=wl.Ragged(), num_q_heads=2, head_dim=64, dtype=name, **options
    )
    wrapper.plan([0, ROWS], [0, ROWS])
    out, lse = wrapper.run(q, (k, v), return_lse=True)
    wanted, wanted_lse = wl.reference_attention(variant, *(x.float().cpu() for x in (q, k, v)))
    np.testing.assert_allclose(out.float().cpu(), wanted, atol=2e-2)
    np.testing.assert_allclose(lse.cpu(), wanted_lse, rtol=1e-5, atol=2e-2)
