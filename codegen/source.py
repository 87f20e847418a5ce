"""What the renderer takes and makes: a tile, as it was chosen, and a kernel's source text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Literal

PLACE = "//@"  # begins a comment that names a line of the user's file

_PLACE_COMMENT = re.compile(rf"[ \t]*{PLACE}[^\n]*")


@dataclass(frozen=True, repr=False)
class TileConfig:
    """Sizes a kernel is compiled for.

    Attributes:
        rows: fused query rows per tile (query row x query head of the group).
        keys: keys per tile.
        warps: CUDA warps that compute. Kernels of the CPU have neither warps nor stages: they read
            rows and keys alone.
        stages: tiles of keys in flight.
        template: which CUDA template: "portable", or "hopper", whose blocks have more warps, which
            copy and transform.
        query_stages: tiles of queries in flight; Hopper only.
        decode: tile of requests whose fused rows it holds all, in the same launch: of fewer rows
            than this one, and of one for each query head of a group at least. The CPU, and CUDA
            tiles of 64 rows and more, can have one. None: all requests have the one tile.
    """

    rows: int
    keys: int
    warps: int = 4
    stages: int = 2
    template: Literal["portable", "hopper"] = "portable"
    query_stages: int = 1
    decode: TileConfig | None = None

    def __repr__(self) -> str:
        """As it would be written: without what nobody has to give."""
        named = ((one, getattr(self, one.name)) for one in fields(self))
        given = [f"{one.name}={value!r}" for one, value in named if value != one.default]
        return f"{type(self).__name__}({', '.join(given)})"

    @property
    def label(self) -> str:
        own = f"{self.template} {self.rows}x{self.keys}, {self.warps} warps"
        return own if self.decode is None else f"{own}; decodes {self.decode.label}"

    @property
    def of_roles(self) -> dict[str, TileConfig]:
        """Name of each role -> its tile; none where all requests have one tile."""
        return {} if self.decode is None else {"prefill": self, "decode": self.decode}


@dataclass(frozen=True)
class TileChoice:
    """Which kernels a plan takes, and what spoke for them, for `explain()`.

    Choices of the same kernels are equal, whatever spoke for them.

    Attributes:
        tile: the sizes of attention.
        reason: in words; empty if the caller gave them.
        costs: microseconds that a model predicts for each tile it weighed, the best first.
        pretransformed_keys: another kernel transforms keys before attention (decision 0027).
    """

    tile: TileConfig
    reason: str = field(default="", compare=False)
    costs: tuple[tuple[str, float], ...] = field(default=(), compare=False)
    pretransformed_keys: bool = False


# What a kernel can be given by, in the order in which lists of kernels show it.
LABELS = ("kind", "variant", "dtype", "head_dim", "format", "tile")


@dataclass(frozen=True)
class KernelSource:
    """One translation unit.

    Attributes:
        name: readable name, for the cache folder and messages.
        text: full source; begins with a comment that names the spec and the template.
        language: which compiler takes it.
        entry: the `extern "C"` symbol to launch.
        labels: (what, value) pairs that tell people what the kernel is, named as in `LABELS`.
    """

    name: str
    text: str = field(repr=False)
    language: Literal["cuda", "cpp"]
    entry: str = "warploom_kernel"
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def code(self) -> str:
        """The text without comments that name places in users' files.

        Cache keys are made of this, so that moving a functor to another line compiles nothing.
        """
        return _PLACE_COMMENT.sub("", self.text)
