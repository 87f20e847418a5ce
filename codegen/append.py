"""Kernels that write new keys and values into a paged cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from warploom.codegen.lowering.specialize import only_hooks
from warploom.codegen.render import Config
from warploom.codegen.vector_kinds import VectorSpec, vector_fields
from warploom.dsl.types.dtypes import DType
from warploom.dsl.types.spec import TracedVariant

_POINTERS = (
    ("const void*", "k", "new keys [row, head, head_dim]"),
    ("const void*", "v", "new values"),
    ("void*", "k_cache", "pages of keys"),
    ("void*", "v_cache", "pages of values"),
    ("const int*", "indptr", "request i has the new rows indptr[i] .. indptr[i + 1]"),
    ("const int*", "kv_indptr", "and the pages kv_indices[kv_indptr[i]] .."),
    ("const int*", "kv_indices", "pages of all requests"),
    ("const int*", "last_page_len", "tokens in each request's last page, new ones included"),
)
STRIDES = (
    "k_row_stride", "k_head_stride", "v_row_stride", "v_head_stride",
    "k_cache_block_stride", "k_cache_token_stride", "k_cache_head_stride",
    "v_cache_block_stride", "v_cache_token_stride", "v_cache_head_stride",
)  # fmt: skip
# the counts of a batch come first
_NUMBERS = (
    ("num_requests", "requests"),
    ("num_rows", "rows of k and v; those past indptr's last entry are left out"),
    ("num_indices", "length of kv_indices"),
    ("num_pages", "pages of the caches"),
    ("num_q_heads", "query heads, for functors"),
    ("num_kv_heads", "key/value heads"),
)
POINTERS = tuple(name for _, name, _ in _POINTERS)
COUNTS = tuple(name for name, _ in _NUMBERS[:4])


@dataclass(frozen=True)
class AppendSpec(VectorSpec):
    """Everything an append kernel is compiled for.

    Attributes:
        variant: key and value transform of the traced variant, and no other hook.
        head_dim_qk, head_dim_v: lengths of key and value vectors.
        dtype: of new keys and values.
        cache_dtype: of the cache.
        page_size: tokens of a page.
    """

    variant: TracedVariant
    head_dim_qk: int
    head_dim_v: int
    dtype: DType
    cache_dtype: DType
    page_size: int

    kind = "append"
    own_fields = vector_fields(_POINTERS, STRIDES, _NUMBERS)

    @property
    def name(self) -> str:
        dims = f"d{self.head_dim_qk}v{self.head_dim_v}"
        return f"append_{self.dtype.name}_{self.cache_dtype.name}_{dims}_page{self.page_size}"

    @property
    def labels(self) -> Mapping[str, str]:
        return {**super().labels, "format": f"paged{self.page_size}"}

    @property
    def stored_dtype(self) -> DType:
        return self.cache_dtype

    @property
    def head_dims(self) -> tuple[int, int]:
        return self.head_dim_qk, self.head_dim_v

    @property
    def config(self) -> Config:
        return {
            "element": self.dtype.c_name,
            "kv_element": self.cache_dtype.c_name,
            "head_dim_qk": self.head_dim_qk,
            "head_dim_v": self.head_dim_v,
            "page_size": self.page_size,
        }


def key_value_hooks(traced: TracedVariant) -> TracedVariant:
    """The part of a variant that an append applies, with the fields that it reads."""
    return only_hooks(traced, ("key_transform", "value_transform"))
