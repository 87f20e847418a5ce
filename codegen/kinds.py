"""What a kernel of any kind tells of itself, and how its source is made: one protocol.

A kind is a frozen class: attention, key preparation, append, planner. Its objects hold all that one
kernel is compiled for, so that equal ones are the same kernel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeAlias

from warploom.codegen.abi import ParamField, struct_text
from warploom.codegen.compilers.arch import Arch
from warploom.codegen.launch_shape import LaunchShape
from warploom.codegen.lowering.functors import variant_struct
from warploom.codegen.render import environment
from warploom.codegen.source import KernelSource
from warploom.dsl.types.spec import TracedVariant

Language: TypeAlias = Literal["cuda", "cpp"]


class KernelSpec(ABC):
    """All that one kernel is compiled for.

    Attributes:
        kind: which of them it is: the first of its labels, and the name of its text.
        entry: its symbol.
        tensor_maps: with how many `Params` ends, see `abi.TENSOR_MAPS`.
    """

    kind: ClassVar[str]
    entry: ClassVar[str] = "warploom_kernel"

    variant: TracedVariant

    @property
    def tensor_maps(self) -> int:
        return 0

    @property
    @abstractmethod
    def name(self) -> str:
        """For the cache's folders and for messages."""

    @property
    @abstractmethod
    def fields(self) -> tuple[ParamField, ...]:
        """All members of its `Params`, in storage order."""

    @property
    @abstractmethod
    def labels(self) -> Mapping[str, str]:
        """What people tell it by, of `LABELS`."""

    @property
    def template(self) -> str:
        """The name of its text in templates/."""
        return self.kind

    @property
    def about(self) -> str:
        """What the text's first lines say between its name and where it comes from."""
        return f"{self.variant.name}\n// "

    @abstractmethod
    def context(self) -> Mapping[str, Any]:
        """What its text sees besides what the texts of all kinds do."""

    def variant_struct(self, language: Language) -> str:
        """C++ text of the functors."""
        return variant_struct(self.variant, language)

    @abstractmethod
    def launch(self, arch: Arch) -> LaunchShape:
        """What a launch takes on a GPU; without CTAs of its own the grid is what a device holds."""

    def render(self, language: Language, plan_structs: str = "") -> KernelSource:
        """Its source: what text may see is the one object that is made here.

        Args:
            language: for a device or for the host.
            plan_structs: C text of the plan records (`scheduler.model.layout.c_structs()`).

        Raises:
            UnsupportedSpec: the variant calls a custom function without text in this language.
        """
        file = f"{self.template}.{'cu' if language == 'cuda' else 'cpp'}.j2"
        context = {
            "title": f"// {self.name}: {self.about}rendered by warploom from templates/{file}",
            "plan_structs": plan_structs,
            "params_struct": struct_text(self.fields, self.tensor_maps),
            "variant_struct": self.variant_struct(language),
            "entry": self.entry,
            **self.context(),
        }
        text = environment().get_template(file).render(context)
        return KernelSource(self.name, text, language, self.entry, tuple(self.labels.items()))
