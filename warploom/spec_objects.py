"""What the command line names to build: an object of a module or of a file."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from warploom.deployment_errors import BadBuildSpec

if TYPE_CHECKING:
    from warploom.runtime.wrappers.declaration import Declaration


def declared(spec: str) -> list[Declaration]:
    """The declarations that a text such as `server.kernels:DECODE` names.

    Modules are looked for in the current folder too, and a file's neighbours can be imported.

    Raises:
        BadBuildSpec: it names none. What a module or function raises is passed on.
    """
    from warploom.runtime.wrappers.declaration import Declaration

    where, colon, path = spec.rpartition(":")
    if not (where and colon and path):
        raise BadBuildSpec(spec=spec, reason="it is no pair with a colon")
    found: Any = _module(spec, where)
    for name in path.split("."):
        if not hasattr(found, name):
            raise BadBuildSpec(spec=spec, reason=f"{where} has no {path!r}")
        found = getattr(found, name)
    if callable(found) and not isinstance(found, type):
        found = found()
    several = [found] if isinstance(found, Declaration) else found
    if not isinstance(several, Iterable) or isinstance(several, (str, bytes)):
        raise BadBuildSpec(spec=spec, reason=f"it is {_kind(found)}")
    listed = list(several)
    for one in listed:
        if not isinstance(one, Declaration):
            raise BadBuildSpec(spec=spec, reason=f"it holds {_kind(one)}")
    if not listed:
        raise BadBuildSpec(spec=spec, reason="it holds no declaration")
    return listed


def _module(spec: str, where: str) -> ModuleType:
    if where.endswith(".py"):
        return _of_file(spec, Path(where).resolve())
    if not _is_safe():  # as `python -m` finds modules
        _look_in(Path.cwd())
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is not None and (where == error.name or where.startswith(f"{error.name}.")):
            reason = f"there is no module {where}"
            if _is_safe():
                reason += " (PYTHONSAFEPATH and -P keep the current folder out of the search)"
            raise BadBuildSpec(spec=spec, reason=reason) from error
        raise  # of something that the module imports


def _is_safe() -> bool:
    return bool(getattr(sys.flags, "safe_path", False))


def _of_file(spec: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise BadBuildSpec(spec=spec, reason=f"there is no file {path}")
    _look_in(path.parent)
    made = importlib.util.spec_from_file_location(path.stem, path)
    assert made is not None and made.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(made)
    sys.modules[path.stem] = module  # where dataclasses and pickle look for its classes
    made.loader.exec_module(module)
    return module


def _look_in(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _kind(found: object) -> str:
    return f"the class {found.__name__}" if isinstance(found, type) else repr(found)
