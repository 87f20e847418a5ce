"""The launches of a run: an ordered list of passes, each with the reason for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from warploom.codegen.source import TileChoice
from warploom.runtime.devices.loaded import Kernel
from warploom.runtime.devices.params import Block


@dataclass(frozen=True)
class Pass:
    """One launch.

    Attributes:
        kernel: the loaded kernel, with its grid.
        params: the bytes of the kernel's argument.
        choice: the kernel's tile with the reason for it, which is never part of the tile itself;
            None if the kernel has no tile.
    """

    kernel: Kernel
    params: Block
    choice: TileChoice | None = None

    @property
    def kind(self) -> str:
        """The first label of the kernel: "pretransform", or the template of attention."""
        return self.kernel.source.labels[0][1]

    def bind(self) -> Callable[[int], None]:
        """A function that enqueues the kernel on a stream, given the stream's handle."""
        return self.kernel.bind(self.params)


@dataclass(frozen=True)
class Program:
    """The launches of a run, in their order; attention is the last.

    Attributes:
        passes: at least one.
    """

    passes: tuple[Pass, ...]

    @property
    def attention(self) -> Pass:
        return self.passes[-1]

    def with_choice(self, choice: TileChoice | None) -> Program:
        """The same program, with the choice of attention's tile."""
        return Program((*self.before, replace(self.attention, choice=choice)))

    @property
    def before(self) -> tuple[Pass, ...]:
        """The passes that attention waits for."""
        return self.passes[:-1]
