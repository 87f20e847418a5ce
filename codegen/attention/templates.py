"""All templates of the attention kernel, and the choice of a tile's template."""

from __future__ import annotations

from warploom.codegen.attention.cpu import Cpu
from warploom.codegen.attention.hopper import Hopper
from warploom.codegen.attention.single import SingleRow
from warploom.codegen.attention.streamed import Streamed
from warploom.codegen.attention.tall import Tall
from warploom.codegen.attention.template import CudaTemplate
from warploom.codegen.compilers.arch import Arch
from warploom.codegen.launch_shape import LaunchShape
from warploom.codegen.source import KernelSource, TileConfig
from warploom.dsl.types.spec import AttentionSpec
from warploom.errors import ArgumentError

CPU, SINGLE_ROW, STREAMED, HOPPER, TALL = Cpu(), SingleRow(), Streamed(), Hopper(), Tall()

# In the order in which their tiles are tried for a batch.
CUDA: tuple[CudaTemplate, ...] = (SINGLE_ROW, STREAMED, HOPPER, TALL)


def template_of(tile: TileConfig) -> CudaTemplate:
    """The template of a CUDA kernel's tile.

    Raises:
        ArgumentError: the tile names no template.
    """
    for template in CUDA:
        if template.has(tile):
            return template
    known = ", ".join(sorted({repr(template.name) for template in CUDA}))
    reason = f"names the template {tile.template!r}; expected one of {known}"
    raise ArgumentError(name="tile", reason=reason)


def render_cuda(spec: AttentionSpec, tile: TileConfig, plan_structs: str) -> KernelSource:
    """Source of the CUDA kernel that a tile names; see `Template.render`."""
    return template_of(tile).render(spec, tile, plan_structs)


def render_cpu(spec: AttentionSpec, tile: TileConfig, plan_structs: str) -> KernelSource:
    """Source of the host kernel; see `Template.render`."""
    return CPU.render(spec, tile, plan_structs)


def cuda_launch(spec: AttentionSpec, tile: TileConfig, arch: Arch) -> LaunchShape:
    """Launch shape of the CUDA kernel that a tile names.

    Raises:
        UnsupportedSpec: the tile's template cannot compute `spec` with this tile.
    """
    return template_of(tile).launch(spec, tile, arch)
