"""Fills a kernel template: spec and tile in, source text out."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from jinja2 import Environment, PackageLoader, StrictUndefined

from warploom.codegen.context import kernel_context, kernel_labels, kernel_name
from warploom.codegen.source import KernelSource, TileConfig
from warploom.dsl.spec import AttentionSpec

CPU_TEMPLATE = "cpu.cpp.j2"


def render_cuda(spec: AttentionSpec, tile: TileConfig, plan_structs: str) -> KernelSource:
    """Source of a CUDA kernel, from the template that the tile names.

    Args:
        spec: what to compute.
        tile: sizes to compile for.
        plan_structs: C text of the plan records (`scheduler.layout.c_structs()`).
    """
    return _render(spec, tile, plan_structs, f"{tile.template}.cu.j2", "cuda")


def render_cpu(spec: AttentionSpec, tile: TileConfig, plan_structs: str) -> KernelSource:
    """Source of the host kernel; arguments as for `render_cuda`.

    Raises:
        UnsupportedSpec: the variant calls a custom function without C++ text.
    """
    return _render(spec, tile, plan_structs, CPU_TEMPLATE, "cpp")


def _render(
    spec: AttentionSpec,
    tile: TileConfig,
    plan_structs: str,
    template: str,
    language: Literal["cuda", "cpp"],
) -> KernelSource:
    context = kernel_context(spec, tile, plan_structs, template, language)
    text = environment().get_template(template).render(context)
    name, labels = kernel_name(spec, tile, template), kernel_labels(spec, tile, template)
    return KernelSource(name, text, language, labels=labels)


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
