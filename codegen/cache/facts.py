"""What `key.json` tells of a kernel: written with its own digest, and read if that is right."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

# The names of an entry's files are fixed: binary -> source.
SOURCE_OF = {"kernel.cubin": "kernel.cu", "kernel.so": "kernel.cpp"}
_SEAL = "seal"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_texts(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(map(_is_text, value))


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def _is_table(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_text, (*value, *value.values())))


def _are_resources(value: object) -> bool:
    if value is None:  # of a kernel for a host
        return True
    names = ("registers", "local_bytes", "shared_bytes")
    more = ("max_threads", "spill_bytes")
    return (
        isinstance(value, dict)
        and set(names) <= set(value) <= {*names, *more}
        and all(_is_count(value[name]) for name in value if name != "spill_bytes")
        and (value.get("spill_bytes") is None or _is_count(value["spill_bytes"]))
    )


def _is_host(value: object) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == {"features", "needs"}
        and all(map(_are_texts, value.values()))
    )


_Check = Callable[[object], bool]
_REQUIRED: dict[str, _Check] = {
    "name": _is_text,
    "digest": _is_digest,
    "binary": lambda value: isinstance(value, str) and value in SOURCE_OF,
    "sha256": _is_digest,
    "source_sha256": _is_digest,
    "bytes": _is_count,
    "created": _is_number,
    "parts": _is_table,
}
_OPTIONAL: dict[str, _Check] = {
    "compile_seconds": _is_number,
    "resources": _are_resources,
    "labels": _is_table,
    "warploom": _is_text,
    "pch": _is_text,
    "host": _is_host,
}


def sealed(facts: Mapping[str, Any]) -> bytes:
    """The text of `key.json`.

    Raises:
        ValueError: a fact is missing or of the wrong kind.
    """
    check(facts)
    return json.dumps({**facts, _SEAL: _seal(facts)}, indent=2).encode()


def unsealed(text: bytes) -> dict[str, Any]:
    """The facts that a `key.json` tells.

    Raises:
        ValueError: it was not written by `sealed`, or is not as it was then.
    """
    facts = json.loads(text)
    if not isinstance(facts, dict):
        raise ValueError("no table of facts")
    if facts.pop(_SEAL, None) != _seal(facts):
        raise ValueError("its digest is not that of what it tells")
    check(facts)
    return facts


def check(facts: Mapping[str, Any]) -> None:
    """Raise ValueError if a fact is missing or of the wrong kind; unknown ones may be there."""
    for name, is_right in _REQUIRED.items():
        if name not in facts:
            raise ValueError(f"it tells no {name!r}")
        if not is_right(facts[name]):
            raise ValueError(f"its {name!r} is of the wrong kind")
    for name, is_right in _OPTIONAL.items():
        if name in facts and not is_right(facts[name]):
            raise ValueError(f"its {name!r} is of the wrong kind")


def _seal(facts: Mapping[str, Any]) -> str:
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
