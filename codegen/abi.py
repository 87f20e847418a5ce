"""The kernel's one argument: a table of fields, its C struct, and the packer that fills it.

Both back ends take `Params` by that name. Fields are ordered by size, 8 bytes first, so that C's
layout has no holes and Python's `struct` packs the same bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from warploom.codegen.stamps import STAMP_POINTER, stamp_struct
from warploom.dsl.types.spec import AttentionSpec, OutputField, TracedVariant

_FORMAT = {"float": "f", "int": "i", "unsigned": "I"}


@dataclass(frozen=True)
class ParamField:
    """A member of `Params`: C type, name, meaning; pointers, `long long` take 8 bytes, others 4."""

    c_type: str
    name: str
    meaning: str

    @property
    def is_wide(self) -> bool:
        return self.c_type.endswith("*") or self.c_type == "long long"


_POINTERS = (
    ("const void*", "q", "queries"),
    ("const void*", "k", "keys"),
    ("const void*", "v", "values"),
    ("void*", "o", "output"),
    ("float*", "lse", "log-sum-exp of each row, or null"),
    ("const int*", "header", "PlanHeader"),
    ("const int*", "cta_indptr", "list i has items cta_indptr[i] .. cta_indptr[i + 1]"),
    ("const int*", "openings", "first WorkItem of each list, and that item's Segment"),
    ("const int*", "items", "WorkItem records"),
    ("const int*", "segments", "Segment records"),
    ("const int*", "merges", "Merge records"),
    ("const int*", "indices", "blocks of keys, if the format is indexed"),
    ("float*", "partial_o", "[slot, row of tile, head_dim_v] partial outputs"),
    ("float*", "partial_state", "[slot, row of tile, 2] largest logit, and sum relative to it"),
    ("unsigned*", "arrivals", "one counter per merge record; zero between launches"),
)

# What kernels have besides that tell the largest scores: the headers look for it.
_MAX_SCORES = ("float*", "max_scores", "largest score of each row, or null")

# What kernels have besides that tell when work items ran: likewise.
_STAMPS = (STAMP_POINTER, "stamps", "one for each of the items")

# What composed plans have besides.
_COMPOSED = (
    ("const int*", "units", "Unit records"),
    ("const int*", "packed_rows", "unit and row within the unit, for each row of each tile"),
    ("const int*", "row_merges", "RowMerge records"),
    ("const int*", "contributions", "partial rows of what is merged, in order of keys"),
)

# Strides count elements. A row of q is at
# q + batch*q_batch_stride + row*q_row_stride + head*q_head_stride; a key is at
# k + block*k_block_stride + token*k_token_stride + head*k_head_stride.
_STRIDES = tuple(
    f"{tensor}_{axis}_stride"
    for tensor, axes in (
        ("q", ("batch", "row", "head")),
        ("k", ("block", "token", "head")),
        ("v", ("block", "token", "head")),
        ("o", ("batch", "row", "head")),
        ("lse", ("batch", "row", "head")),
    )
    for axis in axes
)
MAX_SCORES_STRIDES = tuple(f"max_scores_{axis}_stride" for axis in ("batch", "row", "head"))

_NUMBERS = (
    ("int", "num_q_heads", "query heads"),
    ("int", "num_kv_heads", "key/value heads"),
    ("int", "group_size", "query heads per key/value head"),
    ("float", "sm_scale", "factor of q.k before logits_transform"),
    ("float", "lse_scale", "1 for natural log-sum-exp, log2(e) for base 2"),
)


def param_fields(spec: AttentionSpec) -> tuple[ParamField, ...]:
    """All members of `Params` for this spec, in storage order."""
    composed = _COMPOSED if spec.kv_format.composed else ()
    max_scores, strides = ((_MAX_SCORES,), MAX_SCORES_STRIDES) if spec.max_scores else ((), ())
    stamps = (_STAMPS,) if spec.stamps else ()
    fields = [ParamField(*row) for row in (*_POINTERS, *composed, *max_scores, *stamps, *_NUMBERS)]
    fields += [ParamField("long long", name, "elements") for name in (*_STRIDES, *strides)]
    return ordered([*fields, *input_fields(spec.variant)])


def input_fields(variant: TracedVariant) -> list[ParamField]:
    """Members for a variant's inputs.

    They are named `x_<field>`; a tensor adds its sizes `x_<field>_n<i>` and its strides in elements
    `x_<field>_s<i>`.
    """
    fields = []
    for scalar in variant.scalars:
        c_type = "float" if scalar.dtype.kind.value == "float32" else "int"
        fields.append(ParamField(c_type, f"x_{scalar.name}", "scalar input"))
    for tensor in variant.tensors:
        is_written = isinstance(tensor, OutputField)
        c_type = f"{'' if is_written else 'const '}{tensor.dtype.c_name}*"
        meaning = "recorded values" if is_written else "tensor input"
        fields.append(ParamField(c_type, f"x_{tensor.name}", meaning))
        for dim in range(len(tensor.axes)):
            fields.append(ParamField("long long", f"x_{tensor.name}_s{dim}", "its stride"))
            fields.append(ParamField("int", f"x_{tensor.name}_n{dim}", "its size"))
    return fields


def ordered(fields: Iterable[ParamField]) -> tuple[ParamField, ...]:
    """Wide members first, so that there are no holes; the order within a size stays."""
    return tuple(sorted(fields, key=lambda field: not field.is_wide))


TENSOR_MAP_BYTES = 128
TENSOR_MAPS = (
    "  alignas(64) TensorMap k_map;  // keys, for bulk tensor copies",
    "  alignas(64) TensorMap v_map;  // values",
    "  alignas(64) TensorMap k_once_map;  // both, where decodes stream through beside prefills",
    "  alignas(64) TensorMap v_once_map;",
)


def struct_text(fields: tuple[ParamField, ...], tensor_maps: int = 0) -> str:
    """C++ text of `struct Params`; with so many tensor maps at its end, for kernels that copy so.

    The record that a kernel with stamps writes comes before.
    """
    has_stamps = any(field.c_type == STAMP_POINTER for field in fields)
    records = [stamp_struct(), ""] if has_stamps else []
    lines = [f"  {field.c_type} {field.name};  // {field.meaning}" for field in fields]
    lines += TENSOR_MAPS[:tensor_maps]
    return "\n".join([*records, "struct Params {", *lines, "};"])


class Packer:
    """Fills the bytes of `Params` from named values; missing or unknown names are errors."""

    def __init__(self, fields: tuple[ParamField, ...]) -> None:
        self.fields = fields
        self.names = tuple(field.name for field in fields)
        codes = [
            "Q" if field.c_type.endswith("*") else "q" if field.is_wide else _FORMAT[field.c_type]
            for field in fields
        ]
        self.codes = "".join(codes)
        self._struct = struct.Struct("=" + self.codes)

    @property
    def offsets(self) -> dict[str, int]:
        """Byte at which each member begins, for callers that rewrite single members."""
        sizes = (struct.calcsize("=" + code) for code in self.codes)
        return dict(zip(self.names, (0, *accumulate(sizes)), strict=False))

    @property
    def size(self) -> int:
        """Bytes of the struct, padded to 8 as C pads it."""
        return (self._struct.size + 7) // 8 * 8

    @property
    def tensor_maps_offset(self) -> int:
        """Byte at which the tensor maps of keys and values begin, behind all members."""
        return (self._struct.size + 63) // 64 * 64

    def pack(self, values: Mapping[str, int | float]) -> bytes:
        if values.keys() != set(self.names):
            raise ValueError(f"parameters differ: {sorted(values.keys() ^ set(self.names))}")
        return self._struct.pack(*(values[name] for name in self.names)).ljust(self.size, b"\0")
