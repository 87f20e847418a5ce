"""The interface of templates of the attention kernel: their source, and what Python must know."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from warploom.codegen.abi import ParamField, param_fields
from warploom.codegen.attention.rates import ComposedRates, Rates, Recorded, TileSizes
from warploom.codegen.attention.shared_memory import SharedMemory
from warploom.codegen.attention.tensor_boxes import Box
from warploom.codegen.compilers.arch import THREADS_PER_CTA, Arch
from warploom.codegen.kinds import KernelSpec, Language
from warploom.codegen.launch_shape import LaunchShape
from warploom.codegen.lowering.functors import variant_struct
from warploom.codegen.render import Config, config_struct, short_dims, short_dtypes
from warploom.codegen.source import LABELS, KernelSource, TileConfig
from warploom.dsl.types.formats import KVFormat
from warploom.dsl.types.spec import AttentionSpec, TracedVariant
from warploom.errors import UnsupportedSpec

# Limits of the recorded sweeps (rates.py).
MOST_TILES = 16  # query tiles of one request; the cost of more is unknown
SMALL_HEADS = 64  # lanes; heads up to this size have rates of their own


@dataclass(frozen=True)
class Work:
    """The sizes of a batch that the choice of a tile depends on.

    Attributes:
        rows: mean fused query rows of a request: query rows x query heads per key/value head.
        items: pairs of a request and a key/value head per SM.
        keys: keys of a request. An estimate that is too high costs less than one that is too low,
            since tiles of few rows read the keys again and again.
    """

    rows: float
    items: float = 8.0
    keys: float = 2048.0

    @property
    def has_few_items(self) -> bool:
        """Whether there are no more items than SMs."""
        return self.items <= 1

    def __str__(self) -> str:
        return f"{self.rows:.4g} fused query rows per request on average"


class Template(ABC):
    """One implementation of the kernel. Objects are immutable.

    Attributes:
        name: name of its source and its kernels, and on a GPU its name in `TileConfig.template`.
        language: language of its source, which determines the compiler.
        remedy: advice for errors that report an obstacle.
        takes_roles: whether one launch may have several roles with separate tiles.
    """

    name: ClassVar[str]
    language: ClassVar[Language]
    remedy: ClassVar[str] = ""
    takes_roles: ClassVar[bool] = False

    def compiles_for(self, arch: Arch) -> bool:
        """Whether the architecture has the instructions that the source uses."""
        return True

    def tensor_maps(self, tile: TileConfig) -> int:
        """Number of tensor maps at the end of `Params`, see `codegen.abi.TENSOR_MAPS`."""
        return 0

    def obstacle(self, spec: AttentionSpec, tile: TileConfig) -> str | None:
        """Why the template cannot compute `spec` with this tile, or None."""
        return None

    def check(self, spec: AttentionSpec, tile: TileConfig) -> None:
        """Raise UnsupportedSpec if there is an obstacle."""
        if tile.of_roles and not self.takes_roles:
            raise UnsupportedSpec(
                what=self.called(tile),
                reason=f"tiles of {tile.rows} rows are the one tile for all requests",
                remedy="Give it without `decode`, or as the `decode` of a tile of 64 rows or more.",
            )
        obstacle = self.obstacle(spec, tile)
        if obstacle:
            raise UnsupportedSpec(what=self.called(tile), reason=obstacle, remedy=self.remedy)

    def called(self, tile: TileConfig) -> str:
        """The name of a tile in error messages."""
        return f"the tile {tile.label}"

    def launch_bounds(self, spec: AttentionSpec, tile: TileConfig) -> str:
        """Arguments of `__launch_bounds__`: threads, and the least CTAs per SM."""
        return ""

    def constants(self, spec: AttentionSpec, tile: TileConfig) -> Config:
        """Members of `Config` besides the sizes that all templates have."""
        return {}

    def table(self, spec: AttentionSpec, tile: TileConfig) -> str:
        """C++ source of the part of `Config` that describes shared memory."""
        return ""

    def of_role(self, tile: TileConfig) -> Template:
        """The template of a role's tile, in a launch with several roles."""
        return self

    def role_context(self, spec: AttentionSpec, tile: TileConfig) -> Config:
        """Additional variables of the Jinja template if a launch has several roles."""
        return {}

    def has_sine_recurrence(self, spec: AttentionSpec, tile: TileConfig) -> bool:
        """Whether sines of staged rows are computed from those of other rows (decision 0019)."""
        return False

    def keeps_bytes(self, spec: AttentionSpec) -> bool:
        """Whether booleans of columns are staged as bytes."""
        return False

    def shifts_rows(self, spec: AttentionSpec) -> bool:
        """Whether the softmax can add a bias that is linear in the key (decision 0026)."""
        return False

    def joins_keys(self, tile: TileConfig) -> bool:
        """Whether masks made of bounds are computed for many keys at once (decision 0060).

        CPU kernels test vectors of keys instead.
        """
        return False

    def launch(self, spec: AttentionSpec, tile: TileConfig, arch: Arch) -> LaunchShape:
        """The launch shape on a GPU.

        Raises:
            UnsupportedSpec: there is an obstacle.
        """
        raise NotImplementedError(f"no GPU runs the template {self.name}")

    def box(self, kv_format: KVFormat, tile: TileConfig, dims: tuple[int, int]) -> Box | None:
        """The box of a tensor copy of keys or values with these lanes; None without such copies."""
        return None

    def render(self, spec: AttentionSpec, tile: TileConfig, plan_structs: str) -> KernelSource:
        """Source of a kernel.

        Args:
            spec: what to compute.
            tile: sizes to compile for.
            plan_structs: C source of the plan records (`scheduler.model.layout.c_structs()`).

        Raises:
            UnsupportedSpec: there is an obstacle, or for the CPU, the variant calls a custom
                function without C++ source.
        """
        return self.kernel(spec, tile).render(self.language, plan_structs)

    def kernel(self, spec: AttentionSpec, tile: TileConfig) -> AttentionKernel:
        """The kernel of a tile; raises UnsupportedSpec if there is an obstacle."""
        self.check(spec, tile)
        return AttentionKernel(self, spec, tile)


class CudaTemplate(Template):
    """A template for GPUs, which has tiles to choose from.

    Attributes:
        overlaps: whether its kernels may begin while the previous kernel ends (decision 0022).
        streams: whether items follow each other without a pause, so that the cost of an item beside
            its keys shows only once.
        recorded: rates of its tiles from sweeps, by the architecture's name.
    """

    language = "cuda"
    overlaps: ClassVar[bool] = True
    streams: ClassVar[bool] = False
    recorded: ClassVar[Mapping[str, Recorded]] = MappingProxyType({})

    def has(self, tile: TileConfig) -> bool:
        """Whether a tile belongs to this template."""
        return tile.template == self.name

    def joins_keys(self, tile: TileConfig) -> bool:
        return True

    def shifts_rows(self, spec: AttentionSpec) -> bool:
        """True with a softmax if columns have consecutive positions, and rows share one request."""
        listed = spec.kv_format.composed or spec.kv_format.column_positions
        return spec.variant.softmax and not listed

    @abstractmethod
    def memory(self, spec: AttentionSpec, tile: TileConfig) -> SharedMemory:
        """The layout of a CTA's shared memory."""

    def table(self, spec: AttentionSpec, tile: TileConfig) -> str:
        return self.memory(spec, tile).struct()

    @abstractmethod
    def candidates(self, spec: AttentionSpec, arch: Arch, work: Work) -> Iterable[TileConfig]:
        """Tiles to try for a batch, the best first; none if its rows do not suit them."""

    def tiles(self, spec: AttentionSpec, arch: Arch, work: Work) -> list[TileConfig]:
        """The candidates that fit the architecture, the best first."""
        return self.fitting(spec, arch, self.candidates(spec, arch, work))

    def fitting(
        self, spec: AttentionSpec, arch: Arch, tiles: Iterable[TileConfig]
    ) -> list[TileConfig]:
        """The tiles that fit the shared memory of the architecture."""
        if not self.compiles_for(arch):
            return []
        most = arch.shared_per_cta
        return [tile for tile in tiles if self.launch(spec, tile, arch).shared_bytes <= most]

    def passed_over(self, spec: AttentionSpec, arch: Arch, work: Work) -> str | None:
        """Why a batch whose rows suit this template gets none of its tiles, or None."""
        return None

    def weighed(self, spec: AttentionSpec, arch: Arch) -> list[TileConfig]:
        """Tiles that have recorded rates, for the cost model, the fewest rows first."""
        return []

    def kind(self, tile: TileConfig) -> str:
        """The name under which a weighed tile's rates are recorded."""
        return self.name

    def rates(self, spec: AttentionSpec, tile: TileConfig, arch: Arch) -> Rates:
        """Rates of a weighed tile."""
        found, widest = self.recorded[arch.name], max(spec.head_dim_qk, spec.head_dim_v)
        return (found.small_heads if widest <= SMALL_HEADS else found.wide_heads)[self.kind(tile)]

    def composed_rates(self, tile: TileConfig, arch: Arch) -> ComposedRates | None:
        """Rates of a tile in composed plans; None if no sweep measured it."""
        found = self.recorded.get(arch.name, Recorded())
        return found.composed.get(TileSizes(tile.rows, tile.keys, tile.warps))

    def is_known(self, tile: TileConfig, work: Work) -> bool:
        """Whether the cost model is valid for a tile and a batch."""
        return work.rows <= MOST_TILES * tile.rows

    @abstractmethod
    def reason(self, spec: AttentionSpec, tile: TileConfig, arch: Arch, work: Work) -> str:
        """The reason for choosing a tile, in words."""

    def rule(self, work: Work) -> str:
        """Words to add to a reason: what else chose the tile if no cost model did."""
        return ""


@dataclass(frozen=True)
class AttentionKernel(KernelSpec):
    """A template, what it computes, and the sizes to compile for."""

    of: Template
    spec: AttentionSpec
    tile: TileConfig

    @property
    def kind(self) -> str:  # type: ignore[override]
        """The name of its template."""
        return self.of.name

    @property
    def variant(self) -> TracedVariant:  # type: ignore[override]
        return self.spec.variant

    @property
    def tensor_maps(self) -> int:
        return self.of.tensor_maps(self.tile)

    @property
    def name(self) -> str:
        """Readable name such as `portable_SoftCap_Causal_bf16_d128_paged16_r128k64`."""
        dims = "d" + self.labels["head_dim"].replace("/", "v")
        parts = {**self.labels, "head_dim": dims}.values()
        return "_".join(re.sub(r"\W+", "_", part).strip("_") for part in parts)

    @property
    def fields(self) -> tuple[ParamField, ...]:
        return param_fields(self.spec)

    @property
    def labels(self) -> Mapping[str, str]:
        spec = self.spec
        labels = (
            self.of.name,
            spec.variant.name,
            short_dtypes(spec.dtype, spec.stored_dtype),
            short_dims(spec.head_dim_qk, spec.head_dim_v),
            spec.kv_format.label,
            "+".join(
                f"r{own.rows}k{own.keys}" for own in self.tile.of_roles.values() or (self.tile,)
            ),
        )
        return dict(zip(LABELS, labels, strict=True))

    @property
    def about(self) -> str:
        spec = self.spec
        stored = "" if spec.kv_dtype is None else f" with {spec.kv_dtype.name} keys and values"
        dims = f"head_dim {spec.head_dim_qk}/{spec.head_dim_v}"
        return f"{spec.variant.name}, {spec.dtype.name}{stored}, {dims}\n// {spec.kv_format}\n// "

    def context(self) -> Mapping[str, Any]:
        of, spec, tile = self.of, self.spec, self.tile
        config = _sizes(spec, tile) | dict(of.constants(spec, tile))
        return {
            "config_struct": _config_text(of, spec, tile),
            "config": config,  # as values, for conditions in a template
            "roles": [_config_name(role) for role in tile.of_roles],
            **of.role_context(spec, tile),
            "launch_bounds": of.launch_bounds(spec, tile),
        }

    def variant_struct(self, language: Language) -> str:
        of, spec = self.of, self.spec
        return variant_struct(
            spec.variant,
            language,
            sine_recurrence=of.has_sine_recurrence(spec, self.tile),
            bytes_of_columns=of.keeps_bytes(spec),
            shifts_rows=of.shifts_rows(spec),
            joins_keys=of.joins_keys(self.tile),
        )

    def launch(self, arch: Arch) -> LaunchShape:
        """The launch shape; raises UnsupportedSpec if the architecture cannot have the tile."""
        if not self.of.compiles_for(arch):
            raise UnsupportedSpec(
                what=f"the tile {self.tile.label} on {arch.name}",
                reason=f"the {self.of.name} template is written for another architecture",
                remedy="Give a portable tile, or none.",
            )
        shape = self.of.launch(self.spec, self.tile, arch)
        if shape.threads > THREADS_PER_CTA:
            raise UnsupportedSpec(
                what=f"the tile {self.tile.label} on {arch.name}",
                reason=f"a CTA has {THREADS_PER_CTA} threads at most, and it takes {shape.threads}",
                remedy="Give one of fewer warps.",
            )
        if shape.shared_bytes > arch.shared_per_cta:
            takes, has = (n / 1024 for n in (shape.shared_bytes, arch.shared_per_cta))
            raise UnsupportedSpec(
                what=f"the tile {self.tile.label} on {arch.name}",
                reason=f"it takes {takes:.4g} KiB of shared memory, of {has:.4g}",
                remedy="Give one of fewer keys or stages.",
            )
        return shape


def _config_text(of: Template, spec: AttentionSpec, tile: TileConfig) -> str:
    """`struct Config`, or one struct per role; a slot has room for the rows of the largest tile."""

    def text(own: TileConfig, struct: str = "Config", **more: int) -> str:
        template = of.of_role(own)
        config = _sizes(spec, own) | dict(template.constants(spec, own)) | more
        return config_struct(config, template.table(spec, own), struct)

    if not tile.of_roles:
        return text(tile)
    return "\n\n".join(
        text(own, _config_name(role), slot_rows=tile.rows) for role, own in tile.of_roles.items()
    )


def _config_name(role: str) -> str:
    return f"{role.capitalize()}Config"


def _sizes(spec: AttentionSpec, tile: TileConfig) -> dict[str, str | int | bool]:
    block_kv = spec.kv_format.block_kv
    return {
        "element": spec.dtype.c_name,
        "kv_element": spec.stored_dtype.c_name,
        "head_dim_qk": spec.head_dim_qk,
        "head_dim_v": spec.head_dim_v,
        "rows": tile.rows,
        "keys": tile.keys,
        "warps": tile.warps,
        "stages": tile.stages,
        "block_kv": block_kv,  # tokens per indexed block; 0 if affine
        "indexed": block_kv > 0,
        "column_positions": spec.kv_format.column_positions,
        "composed": spec.kv_format.composed,  # a tile may hold rows of several requests
        **spec.kv_format.constants,
    }
