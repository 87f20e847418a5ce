"""Declarations without a device: wrappers are made from them, and kernels are built ahead of time.

A declaration describes the attention that a deployment will run. `on(device)` makes its wrapper, so
that the kernels built ahead cannot differ from those that serve; `jobs` lists every kernel that the
wrapper can request on any device of one kind, for any batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch

from warploom.codegen.build import Job
from warploom.codegen.compilers.arch import Arch, arch_named
from warploom.codegen.compilers.hostcc import HostTarget
from warploom.codegen.planner_source import PlannerSpec
from warploom.codegen.pretransform import PretransformSpec
from warploom.codegen.source import TileChoice, TileConfig
from warploom.dsl.types.dtypes import DType
from warploom.dsl.types.formats import KVFormat, Paged
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.variant import Variant, as_variant
from warploom.errors import ArgumentError
from warploom.runtime.declaring.append_spec import append_spec, check_format, transforms_of
from warploom.runtime.declaring.declare import as_format
from warploom.runtime.declaring.declared import DeclaredAttention
from warploom.runtime.declaring.wrapper_options import kernel_parts
from warploom.runtime.launching.kernel_choice import KernelChoice
from warploom.runtime.launching.pretransformed_keys import Way
from warploom.runtime.planning.composed import rules_of
from warploom.runtime.planning.planner_kinds import planner_kinds
from warploom.runtime.planning.rules import Options
from warploom.runtime.planning.visibility import Heads
from warploom.runtime.wrappers.append import Appender
from warploom.runtime.wrappers.selection import PageSelectionWrapper
from warploom.runtime.wrappers.wrapper import AttentionWrapper
from warploom.scheduler.model.bounds import Bounds
from warploom.scheduler.model.layout import c_planning

# SM counts that a GPU, or a part of one (MIG), can have. A tile that bounds fix depends on this
# count, which differs between GPUs of one architecture; the largest so far has 192 SMs.
_SM_COUNTS = range(1, 257)


Target: TypeAlias = Arch | HostTarget | str
_Parts: TypeAlias = tuple[AttentionSpec, PretransformSpec | None, bool]  # of `kernel_parts`


class Declaration(ABC):
    """A declaration that kernels can be built for."""

    @abstractmethod
    def jobs(self, target: Target, hosts: Sequence[HostTarget]) -> Iterator[Job]:
        """All kernels that it can request; see `AttentionDeclaration.jobs`."""


@dataclass(frozen=True)
class AttentionDeclaration(Declaration):
    """Arguments of an `AttentionWrapper` except the device; its constructor documents the fields.

    `wl.attention` uses the kernels of `kv_format=Dense()` without bounds.
    """

    variant: Variant | type[Variant] | None = None
    _: KW_ONLY
    kv_format: KVFormat | None = None
    num_q_heads: int
    num_kv_heads: int | None = None
    head_dim: int
    head_dim_v: int | None = None
    dtype: str | DType | torch.dtype = "float16"
    kv_dtype: str | DType | torch.dtype | None = None
    sm_scale: float | None = None
    lse_base: str = "e"
    bounds: Bounds | None = None
    cuda_graph: bool = False
    sm_limit: int | None = None
    batch_invariant: bool = False
    tile: TileConfig | None = None
    key_transform: Way = "auto"
    max_scores: bool = False

    _wrapper: ClassVar[type[AttentionWrapper]] = AttentionWrapper

    def __post_init__(self) -> None:
        """Raises ArgumentError for a format without wrapper support; the rest is not checked."""
        self._wrapper.planned_format(as_format(self.kv_format))

    def on(
        self,
        device: torch.device | str | int | None = None,
        *,
        backend: str | None = None,
        workspace: Any = None,
    ) -> AttentionWrapper:
        """The wrapper for a device; raises as `AttentionWrapper` does.

        Args:
            device: the current CUDA device by default, or the CPU.
            backend: "reference" evaluates the variant with NumPy; None is the device's own.
            workspace: contiguous uint8 tensor to use instead of the wrapper's own memory.
        """
        where: dict[str, Any] = {"device": device, "backend": backend, "workspace": workspace}
        return self._wrapper(**_given(self), **where)

    def jobs(self, target: Target, hosts: Sequence[HostTarget]) -> Iterator[Job]:
        """All kernels that plans, runs and `warm_up` can request.

        Args:
            target: what kernels are compiled for; for a GPU its architecture or the architecture's
                name, such as "sm_90a".
            hosts: hosts that the native planner is compiled for.

        Raises:
            VariantError, UnsupportedSpec, BadHeadDim, ArgumentError: as the wrapper would.
            UnknownArchitecture: no architecture has this name.
            ArgumentError: `target` is no target.
        """
        target = _named(target)
        spec, heads, options, parts = self._checked(target)
        kernels = KernelChoice(parts[0], target, *parts[1:])
        choices = list(_choices(kernels, parts, heads, options))
        for one in choices:
            yield from ((source, target) for source in kernels.sources(one))
        if not options.may_plan_natively:
            return
        stored = self._wrapper.planned_format(spec.kv_format)
        declared = options.bounds is not None
        tiles = [one.tile for one in choices]
        for kind in planner_kinds(tiles, options, heads.group_size):
            planner = PlannerSpec(spec.variant, kind.has_roles, longest_first=kind.deals)
            source = planner.render("cpp", c_planning(kind.has_roles))
            yield from ((source, host) for host in hosts)
        if isinstance(target, Arch) and declared and stored.plans_on_device:
            for has_roles in sorted({bool(tile.of_roles) for tile in tiles}):
                planner = PlannerSpec(spec.variant, has_roles)
                yield planner.render("cuda", c_planning(has_roles)), target

    def _checked(self, target: Arch | HostTarget) -> tuple[AttentionSpec, Heads, Options, _Parts]:
        device = torch.device("cuda" if isinstance(target, Arch) else "cpu")
        found = DeclaredAttention.of(
            device=lambda: device, backend=None, planned_format=self._wrapper.planned_format,
            **_given(self),
        )  # fmt: skip
        spec, heads = found.spec, found.heads
        return spec, heads, found.options, kernel_parts(spec, heads, found.key_transform)


@dataclass(frozen=True)
class PageSelectionDeclaration(AttentionDeclaration):
    """Arguments of a `PageSelectionWrapper` except the device."""

    _wrapper: ClassVar[type[AttentionWrapper]] = PageSelectionWrapper

    if TYPE_CHECKING:  # the class that `on` returns

        def on(
            self,
            device: torch.device | str | int | None = None,
            *,
            backend: str | None = None,
            workspace: Any = None,
        ) -> PageSelectionWrapper: ...


@dataclass(frozen=True)
class AppenderDeclaration(Declaration):
    """Arguments of an `Appender` except the device; its constructor documents the fields.

    `wl.append` uses the same kernel.
    """

    variant: Variant | type[Variant] | None = None
    _: KW_ONLY
    kv_format: Paged
    num_kv_heads: int
    num_q_heads: int | None = None
    head_dim: int
    head_dim_v: int | None = None
    dtype: str | DType | torch.dtype = "float16"
    kv_dtype: str | DType | torch.dtype | None = None

    def __post_init__(self) -> None:
        """Raises ArgumentError for a cache that appends do not support; the rest is not checked."""
        check_format(self.kv_format)

    def on(self, device: torch.device | str | int | None = None) -> Appender:
        """The appender for a device: the current CUDA device by default, or the CPU."""
        return Appender(**_given(self), device=device)

    def jobs(self, target: Target, hosts: Sequence[HostTarget]) -> Iterator[Job]:
        """The appender's one kernel; raises VariantError, BadHeadDim and ArgumentError."""
        target = _named(target)
        given = _given(self)
        spec = append_spec(transforms_of(as_variant(given.pop("variant"))), **given)
        yield spec.render("cuda" if isinstance(target, Arch) else "cpp"), target


def _named(target: Target) -> Arch | HostTarget:
    """The target, or the architecture of this name; other types raise ArgumentError."""
    if isinstance(target, str):
        return arch_named(target)
    if not isinstance(target, (Arch, HostTarget)):
        reason = f"is {target!r}; expected an architecture or its name, or a HostTarget"
        raise ArgumentError(name="target", reason=reason)
    return target


def _given(declaration: Any) -> dict[str, Any]:
    """The declaration's fields by name; values are not copied."""
    return {field.name: getattr(declaration, field.name) for field in fields(declaration)}


def _choices(
    kernels: KernelChoice, parts: _Parts, heads: Heads, options: Options
) -> Iterator[TileChoice]:
    """Every tile choice that a plan can make on any device of the target's kind."""
    is_gpu = isinstance(kernels.target, Arch)
    nowhere = torch.device("meta")
    rules = rules_of(parts[0], kernels, heads, options, nowhere)
    if rules.fixed is None or not is_gpu:
        yield from rules.choices()
        return
    found = dict[TileChoice, None]()
    in_given_memory = replace(options, may_mix=False)  # a caller's workspace may hold one tile only
    for num_sms, either in product(_SM_COUNTS, (options, in_given_memory)):
        there = KernelChoice(parts[0], kernels.target, *parts[1:], num_sms)
        found |= dict.fromkeys(rules_of(parts[0], there, heads, either, nowhere).choices())
    yield from found
