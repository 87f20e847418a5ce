"""Kernels that walk over vectors of keys and values, each on its own: what their kinds share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from warploom.codegen.abi import ParamField, input_fields, ordered
from warploom.codegen.compilers.arch import Arch
from warploom.codegen.kinds import KernelSpec
from warploom.codegen.launch_shape import LaunchShape
from warploom.codegen.render import Config, config_struct, short_dims, short_dtypes
from warploom.dsl.types.dtypes import DType

_THREADS = 128  # of a CTA


class VectorSpec(KernelSpec):
    """All that such a kernel is compiled for.

    Attributes:
        own_fields: members of its `Params` besides the inputs of the variant.
        dtype: of the vectors that it reads.
    """

    own_fields: ClassVar[tuple[ParamField, ...]]

    dtype: DType

    @property
    def stored_dtype(self) -> DType:
        """Of the vectors that it writes."""
        return self.dtype

    @property
    @abstractmethod
    def head_dims(self) -> tuple[int, int]:
        """Lengths of key and value vectors."""

    @property
    @abstractmethod
    def config(self) -> Config:
        """What its `Config` has."""

    @property
    def fields(self) -> tuple[ParamField, ...]:
        return ordered([*self.own_fields, *input_fields(self.variant)])

    @property
    def labels(self) -> Mapping[str, str]:
        return {
            "kind": self.kind,
            "variant": self.variant.name,
            "dtype": short_dtypes(self.dtype, self.stored_dtype),
            "head_dim": short_dims(*self.head_dims),
        }

    def context(self) -> Mapping[str, Any]:
        return {"config_struct": config_struct(self.config), "threads": _THREADS}

    def launch(self, arch: Arch) -> LaunchShape:
        return LaunchShape(_THREADS, 0, 0)


def vector_fields(
    pointers: Iterable[tuple[str, str, str]],
    strides: Iterable[str],
    numbers: Iterable[tuple[str, str]],
) -> tuple[ParamField, ...]:
    """Members of `Params`: pointers, then strides in elements, then numbers."""
    fields = [ParamField(*row) for row in pointers]
    fields += [ParamField("long long", name, "elements") for name in strides]
    fields += [ParamField("int", name, meaning) for name, meaning in numbers]
    return tuple(fields)
