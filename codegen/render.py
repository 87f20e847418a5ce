"""What the texts of all kernels are rendered with: the template engine, `Config`, short names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TypeAlias

from jinja2 import Environment, PackageLoader, StrictUndefined

from warploom.dsl.types.dtypes import DType

Config: TypeAlias = Mapping[str, str | int | bool]

_TYPES = {"element": "Element", "kv_element": "KvElement"}
_SHORT_DTYPE = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "int8": "i8",
}


@lru_cache(maxsize=1)
def environment() -> Environment:
    return Environment(
        loader=PackageLoader("warploom.templates", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def config_struct(config: Config, table: str = "", struct: str = "Config") -> str:
    """A struct of types, a constant (`kHeadDimQk`, `kIndexed`, ...) per value, and a table."""
    lines = [f"  using {name} = {config[key]};" for key, name in _TYPES.items() if key in config]
    for name, value in config.items():
        if name in _TYPES:
            continue
        constant = "k" + "".join(map(str.capitalize, name.split("_")))
        c_type = "bool" if isinstance(value, bool) else "int"
        lines.append(f"  static constexpr {c_type} {constant} = {str(value).lower()};")
    return "\n".join([f"struct {struct} {{", *lines, *filter(None, [table]), "};"])


def short_dtypes(dtype: DType, stored: DType) -> str:
    """Of queries, and of keys and values if theirs is another."""
    names = [_SHORT_DTYPE[found.name] for found in (dtype, stored)]
    return "/".join(dict.fromkeys(names))


def short_dims(head_dim_qk: int, head_dim_v: int) -> str:
    return "/".join(dict.fromkeys((str(head_dim_qk), str(head_dim_v))))
