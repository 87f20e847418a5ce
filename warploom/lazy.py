"""Names of a module that are imported when they are first asked for (PEP 562).

`import warploom` takes no longer than its user's first name needs, and a room of `serving` that
nobody uses is never read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

_explained: set[tuple[str, str]] = set()  # homes and names that were asked for


def lazy_names(
    module: str, room: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a module.

    Args:
        module: its `__name__`.
        room: package of the modules where its names live.
        homes: the module of each name there; "" if it is a module itself.
    """

    def find(name: str) -> object:
        home = homes.get(name)
        if home:
            return look_up(f"{room}.{home}", name)
        if home is not None:
            return import_module(f"{room}.{name}")
        raise no_attribute(module, name, homes)

    return find, lambda: sorted(homes)


def look_up(home: str, name: str) -> object:
    """A public name of the module `home`; its calls are explained from the first time on."""
    if (home, name) not in _explained:
        from warploom.calls import explain

        explain(home, name)
        _explained.add((home, name))
    return getattr(import_module(home), name)


def no_attribute(module: str, name: str, homes: Mapping[str, str]) -> AttributeError:
    """What a module raises for a name that it does not have.

    It says what stands for a name of another library, or which name is nearly the same.
    """
    from difflib import get_close_matches

    from warploom.hints import elsewhere

    same = [known for known in homes if known.lower() == name.lower()]  # as RoPE for Rope
    near = same or get_close_matches(name, homes, n=1)
    hint = f". Did you mean {near[0]!r}?" if near else ""
    if found := elsewhere(name):
        hint = f".{found}"
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}")


def not_installed(error: ModuleNotFoundError, face: str) -> ModuleNotFoundError:
    """What stands for the error where parts of warploom itself are missing, as in a bare checkout.

    Args:
        error: names what was not found.
        face: file of the package, which lies alone in a checkout, beside `dsl` and the others.
    """
    folder = Path(face).resolve().parent
    if not (error.name or "").startswith("warploom.") or not (folder.parent / "dsl").is_dir():
        return error
    return ModuleNotFoundError(
        f"warploom was imported from its sources in {folder.parent}, where it is not installed "
        "whole: Python looks into the current folder first. Install it (pip install . there, or "
        "make demo) and start Python in another folder, or install it with pip install -e .",
        name=error.name,
    )
