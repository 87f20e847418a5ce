"""Names of FlashInfer's that are not here: code that asks for one is told what is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

from warploom.hints import elsewhere

Names = Mapping[str, Sequence[str]]  # of each module, by its own name; the package's by ""


def refuse_others(package: ModuleType, modules: Sequence[ModuleType]) -> None:
    """Give a package and its modules a `__getattr__` that says what is there.

    Args:
        package: whose public names are its own.
        modules: each with `__all__`.
    """
    public = {name: x for name, x in vars(package).items() if name[0] != "_"}
    names: dict[str, Sequence[str]] = {
        "": [name for name, x in public.items() if not isinstance(x, ModuleType)]
    }
    for module in modules:
        names[module.__name__.rpartition(".")[2]] = module.__all__
    for home, module in zip(names, (package, *modules), strict=True):
        given: Any = module
        given.__getattr__ = partial(_refuse, package.__name__, names, home)


def _refuse(package: str, names: Names, home: str, name: str) -> NoReturn:
    where = f"{package}.{home}".removesuffix(".")
    text = f"module {where!r} has no attribute {name!r}.{_instead(package, names, home, name)}"
    raise AttributeError(text, name=name)


def _instead(package: str, names: Names, home: str, name: str) -> str:
    others = [other for other, known in names.items() if name in known]
    if others:
        return f" It is in {package}.{others[0]}".removesuffix(".") + "."
    near = get_close_matches(name, names[home], n=1, cutoff=0.8)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    kept = " It has attention's calls alone: keep FlashInfer's others."
    has = names[home] if home else [f"the modules {', '.join(filter(None, names))}"]
    return f"{elsewhere(name) or meant or kept} There are {', '.join(has)}."
