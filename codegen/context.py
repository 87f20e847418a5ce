"""The one object a kernel template may see.

Keys:
    title: comment lines naming the spec, the tile and the template.
    plan_structs: C structs of the plan records.
    params_struct: `struct Params`.
    variant_struct: custom functions and `struct Variant`.
    config_struct: `struct Config`, the sizes as compile-time constants.
    entry: the kernel's `extern "C"` name.
    launch_bounds: arguments of `__launch_bounds__`, for CUDA templates.
    config: the same sizes as values, where a template must choose text: element and kv_element (C++
        types), head_dim_qk, head_dim_v, rows, keys, warps, stages, block_kv (tokens per indexed
        block; 0 if affine), indexed, column_positions, composed (a tile may hold rows of several
        requests); for Hopper also query_stages, threads and bulk (whether keys come by
        tensor copies).
"""

from __future__ import annotations

import re
from typing import Literal

from warploom.codegen.abi import param_fields, struct_text
from warploom.codegen.functors import variant_struct
from warploom.codegen.linear_bias import may_shift_rows
from warploom.codegen.source import LABELS, TileConfig
from warploom.codegen.tiles import launch_bounds
from warploom.codegen.tiles_hopper import copies_in_bulk, hopper_threads, keeps_bytes, may_turn_rows
from warploom.dsl.dtypes import DType
from warploom.dsl.spec import AttentionSpec

_SHORT_DTYPE = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "int8": "i8",
}


def kernel_context(
    spec: AttentionSpec,
    tile: TileConfig,
    plan_structs: str,
    template: str,
    language: Literal["cuda", "cpp"],
) -> dict[str, object]:
    """Everything that `template` needs to render a kernel."""
    config = config_values(spec, tile)
    return {
        "title": _title(spec, tile, template),
        "plan_structs": plan_structs,
        "params_struct": struct_text(param_fields(spec), tensor_maps="bulk" in config),
        "variant_struct": variant_struct(
            spec.variant,
            language,
            turns=may_turn_rows(spec, tile),
            bytes_of_columns=keeps_bytes(spec, tile),
            shifts_rows=language == "cuda" and may_shift_rows(spec, tile),
        ),
        "config_struct": config_struct(config),
        "config": config,
        "entry": "warploom_kernel",
        "launch_bounds": launch_bounds(spec, tile),
    }


def kernel_name(spec: AttentionSpec, tile: TileConfig, template: str) -> str:
    """Readable name such as `portable_SoftCap_Causal_bf16_d128_paged16_r128k64`."""
    labels = dict(kernel_labels(spec, tile, template))
    labels["head_dim"] = "d" + labels["head_dim"].replace("/", "v")
    return "_".join(re.sub(r"\W+", "_", label).strip("_") for label in labels.values())


def kernel_labels(
    spec: AttentionSpec, tile: TileConfig, template: str
) -> tuple[tuple[str, str], ...]:
    """What people tell a kernel by."""
    labels = (
        template.partition(".")[0],
        spec.variant.name,
        short_dtypes(spec.dtype, spec.stored_dtype),
        short_dims(spec.head_dim_qk, spec.head_dim_v),
        spec.kv_format.label,
        f"r{tile.rows}k{tile.keys}",
    )
    return tuple(zip(LABELS, labels, strict=True))


def short_dtypes(dtype: DType, stored: DType) -> str:
    """Of queries, and of keys and values if theirs is another."""
    names = [_SHORT_DTYPE[found.name] for found in (dtype, stored)]
    return "/".join(dict.fromkeys(names))


def short_dims(head_dim_qk: int, head_dim_v: int) -> str:
    return "/".join(dict.fromkeys((str(head_dim_qk), str(head_dim_v))))


def _dtypes(spec: AttentionSpec) -> str:
    stored = "" if spec.kv_dtype is None else f" with {spec.kv_dtype.name} keys and values"
    return spec.dtype.name + stored


def config_values(spec: AttentionSpec, tile: TileConfig) -> dict[str, str | int | bool]:
    block_kv = spec.kv_format.block_kv
    values: dict[str, str | int | bool] = {
        "element": spec.dtype.c_name,
        "kv_element": spec.stored_dtype.c_name,
        "head_dim_qk": spec.head_dim_qk,
        "head_dim_v": spec.head_dim_v,
        "rows": tile.rows,
        "keys": tile.keys,
        "warps": tile.warps,
        "stages": tile.stages,
        "block_kv": block_kv,
        "indexed": block_kv > 0,
        "column_positions": spec.kv_format.column_positions,
        "composed": spec.kv_format.composed,
        **spec.kv_format.constants,
    }
    if tile.template == "hopper":
        values |= {
            "query_stages": tile.query_stages,
            "bulk": copies_in_bulk(spec.kv_format, tile),
            "threads": hopper_threads(spec, tile),
        }
    return values


def config_struct(config: dict[str, str | int | bool]) -> str:
    """`struct Config`: types, and a constant (`kHeadDimQk`, `kIndexed`, ...) per value."""
    types = {"element": "Element", "kv_element": "KvElement"}
    lines = [f"  using {name} = {config[key]};" for key, name in types.items() if key in config]
    for name, value in config.items():
        if name in types:
            continue
        constant = "k" + "".join(map(str.capitalize, name.split("_")))
        c_type = "bool" if isinstance(value, bool) else "int"
        lines.append(f"  static constexpr {c_type} {constant} = {str(value).lower()};")
    return "\n".join(["struct Config {", *lines, "};"])


def _title(spec: AttentionSpec, tile: TileConfig, template: str) -> str:
    return "\n".join(
        (
            f"// {kernel_name(spec, tile, template)}: {spec.variant.name}, "
            f"{_dtypes(spec)}, head_dim {spec.head_dim_qk}/{spec.head_dim_v}",
            f"// {spec.kv_format}",
            f"// rendered by warploom from templates/{template}",
        )
    )
