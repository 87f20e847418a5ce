"""Kernels that write new keys and values into a paged cache: what decides one, and its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from warploom.codegen.abi import ParamField, input_fields, ordered, struct_text
from warploom.codegen.launch_shape import LaunchShape
from warploom.codegen.lowering.functors import variant_struct
from warploom.codegen.lowering.specialize import only_hooks
from warploom.codegen.render import config_struct, environment, short_dims, short_dtypes
from warploom.codegen.source import KernelSource
from warploom.dsl.types.dtypes import DType
from warploom.dsl.types.spec import TracedVariant

THREADS = 128

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
class AppendSpec:
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


def key_value_hooks(traced: TracedVariant) -> TracedVariant:
    """The part of a variant that an append applies, with the fields that it reads."""
    return only_hooks(traced, ("key_transform", "value_transform"))


def append_fields(spec: AppendSpec) -> tuple[ParamField, ...]:
    """All members of the kernel's `Params`, in storage order."""
    fields = [ParamField(*row) for row in _POINTERS]
    fields += [ParamField("long long", name, "elements") for name in STRIDES]
    fields += [ParamField("int", name, meaning) for name, meaning in _NUMBERS]
    return ordered([*fields, *input_fields(spec.variant)])


def append_launch() -> LaunchShape:
    """What a launch needs; the grid is what the device holds at once."""
    return LaunchShape(THREADS, 0, 0)


def render_append(spec: AppendSpec, language: Literal["cuda", "cpp"]) -> KernelSource:
    """Source of the kernel.

    Raises:
        UnsupportedSpec: the variant calls a custom function without text in this language.
    """
    template = "append.cu.j2" if language == "cuda" else "append.cpp.j2"
    dims = f"d{spec.head_dim_qk}v{spec.head_dim_v}"
    name = f"append_{spec.dtype.name}_{spec.cache_dtype.name}_{dims}_page{spec.page_size}"
    config: dict[str, str | int | bool] = {
        "element": spec.dtype.c_name,
        "kv_element": spec.cache_dtype.c_name,
        "head_dim_qk": spec.head_dim_qk,
        "head_dim_v": spec.head_dim_v,
        "page_size": spec.page_size,
    }
    context = {
        "title": f"// {name}: {spec.variant.name}\n"
        f"// rendered by warploom from templates/{template}",
        "params_struct": struct_text(append_fields(spec)),
        "variant_struct": variant_struct(spec.variant, language),
        "config_struct": config_struct(config),
        "entry": "warploom_kernel",
        "threads": THREADS,
    }
    text = environment().get_template(template).render(context)
    labels = (
        ("kind", "append"),
        ("variant", spec.variant.name),
        ("dtype", short_dtypes(spec.dtype, spec.cache_dtype)),
        ("head_dim", short_dims(spec.head_dim_qk, spec.head_dim_v)),
        ("format", f"paged{spec.page_size}"),
    )
    return KernelSource(name, text, language, labels=labels)
