"""A wrapper's `repr`, and error messages for names that FlashInfer's wrappers have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.variant import Variant
from warploom.runtime.formats.batch import Batch
from warploom.runtime.planning.visibility import Heads

# attribute of FlashInfer's wrappers -> what to write instead
_FLASHINFER = {
    "forward": "call plan(...) once for a batch, and run(q, (k, v))",
    "begin_forward": "it is called plan(qo_indptr, kv_indptr, ...)",
    "end_forward": "leave it out: the next plan(...) replaces this one",
    "forward_return_lse": "call run(q, (k, v), return_lse=True)",
    "run_return_lse": "call run(q, (k, v), return_lse=True)",
    "reset_workspace_buffer": "a workspace belongs to the constructor: workspace=...",
}


class Shown:
    """Base of wrappers: how they are shown, and hints for unknown attributes."""

    device: torch.device
    heads: Heads
    kv_format: KVFormat
    spec: AttentionSpec
    _batch: Batch | None
    _variant: Variant

    def __repr__(self) -> str:
        if "_batch" not in vars(self):  # the constructor raised
            return object.__repr__(self)
        spec = self.spec
        head = str(spec.head_dim_qk)
        if spec.head_dim_v != spec.head_dim_qk:
            head += f", head_dim_v={spec.head_dim_v}"
        kind = spec.dtype.name
        if spec.stored_dtype != spec.dtype:
            kind += f", kv_dtype={spec.stored_dtype.name}"
        variant = "no variant" if type(self._variant) is Variant else repr(self._variant)
        return (
            f"{type(self).__name__}({variant}, {self.kv_format}, num_q_heads={self.heads.num_q}, "
            f"num_kv_heads={self.heads.num_kv}, head_dim={head}, dtype={kind}, "
            f"device={self.device}, {'not ' if self._batch is None else ''}planned)"
        )

    if not TYPE_CHECKING:  # type checkers must still report unknown attributes

        def __getattr__(self, name: str) -> object:
            kind = type(self).__name__
            hint = f". FlashInfer has it; here, {_FLASHINFER[name]}" if name in _FLASHINFER else ""
            reason = f"{kind!r} object has no attribute {name!r}{hint}"
            raise AttributeError(reason, name=name, obj=self)
