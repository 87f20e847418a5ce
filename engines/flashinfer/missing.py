"""Names and modules of FlashInfer's that are not here: whoever asks is told what is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

from warploom.hints import elsewhere


class Refusals(MetaPathFinder):
    """Answers imports beneath a package, and its modules, that no finder before it knows.

    Where a name is not there, `from module import name` drops what `__getattr__` of the module
    says, and tries a module of that name if the first one has a `__path__`: so all have one here,
    empty but for the package's.

    Attributes:
        package: its name.
        modules: names that each of its modules has, by the module's own name; those of the package
            by "".
    """

    def __init__(self, package: str, modules: dict[str, Sequence[str]]) -> None:
        self.package = package
        self.modules = modules

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Raises ModuleNotFoundError for what is beneath the package and was not found before."""
        parent, _, name = fullname.rpartition(".")
        home = parent.removeprefix(self.package).removeprefix(".")
        if parent.startswith(self.package) and home in self.modules:
            # without a name, as `from` takes errors that have it for its own
            raise ModuleNotFoundError(self.text(home, name))

    def attribute(self, home: str, name: str) -> object:
        """`__getattr__` of a module; raises AttributeError."""
        raise AttributeError(self.text(home, name), name=name)

    def text(self, home: str, name: str) -> str:
        """What is said about a name that the module `home` does not have."""
        where = f"{self.package}.{home}".removesuffix(".")
        return f"module {where!r} has no attribute {name!r}.{self._instead(home, name)}"

    def _instead(self, home: str, name: str) -> str:
        others = [other for other, names in self.modules.items() if name in names]
        if others:
            return f" It is in {self.package}.{others[0]}".removesuffix(".") + "."
        known = list(self.modules[home])
        near = get_close_matches(name, known, n=1, cutoff=0.8)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        kept = " It has attention's calls alone: keep FlashInfer's others."
        has = known if home else [f"the modules {', '.join(filter(None, self.modules))}"]
        return f"{elsewhere(name) or meant or kept} There are {', '.join(has)}."


def refuse_others(package: ModuleType, modules: Sequence[ModuleType]) -> None:
    """Have what is not in a package, and in modules of it, refused with what is there.

    Args:
        package: whose public names are its own.
        modules: each with `__all__`.
    """
    public = {name: x for name, x in vars(package).items() if name[0] != "_"}
    own = [name for name, x in public.items() if not isinstance(x, ModuleType)]
    names: dict[str, Sequence[str]] = {"": own}
    for module in modules:
        names[module.__name__.rpartition(".")[2]] = module.__all__
    refusals = Refusals(package.__name__, names)
    others = [one for one in sys.meta_path if getattr(one, "package", None) != package.__name__]
    sys.meta_path[:] = [*others, refusals]  # once, if the package is loaded anew
    _answer(package, partial(refusals.attribute, ""))
    for module in modules:
        module.__path__ = []
        _answer(module, partial(refusals.attribute, module.__name__.rpartition(".")[2]))


def _answer(module: ModuleType, answer: Callable[[str], object]) -> None:
    given: Any = module
    given.__getattr__ = answer
