"""The cache key of a kernel: everything its binary depends on, each part under its label."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from warploom.codegen.source import KernelSource

SCHEMA = 2  # raise it when the meaning of an entry changes; older entries are then not found
_DIGITS = 24  # of the digest in a folder's name: 96 bits
_LONGEST_NAME = 80


class Target(Protocol):
    """What a kernel is compiled for: an `Arch`, or a host."""

    @property
    def name(self) -> str: ...

    def key_parts(self) -> dict[str, str]:
        """What of the target decides about the binary: architecture, compiler, flags, ..."""
        ...


@dataclass(frozen=True)
class CacheKey:
    """Name and labelled parts of one kernel.

    Attributes:
        name: the kernel's readable name; in the folder's name, but not in the digest.
        parts: (label, value) in order of label.
    """

    name: str
    parts: tuple[tuple[str, str], ...]

    @cached_property
    def digest(self) -> str:
        """SHA-256 over labels and values, each with its length: no two keys run together."""
        digest = hashlib.sha256()
        for part in self.parts:
            for text in part:
                data = text.encode()
                digest.update(b"%d:" % len(data))
                digest.update(data)
        return digest.hexdigest()

    @property
    def folder(self) -> str:
        """Name of the entry's folder."""
        readable = re.sub(r"[^A-Za-z0-9_.-]+", "_", self.name)[:_LONGEST_NAME].lstrip(".")
        return f"{readable}-{self.digest[:_DIGITS]}"

    def facts(self) -> dict[str, str]:
        """The parts for `key.json`; the source, which lies beside it, only as its digest."""
        return {
            label: value if label != "source" else "sha256:" + _sha256(value)
            for label, value in self.parts
        }


def make_key(source: KernelSource, target: Target, tools: Mapping[str, str]) -> CacheKey:
    """Key of `source` for `target`.

    Args:
        source: the rendered kernel; comments that name places in users' files do not count.
        target: architecture or host.
        tools: compiler, flags and header versions that the target does not name itself.
    """
    parts = {
        **tools,
        **target.key_parts(),
        "schema": str(SCHEMA),
        "language": source.language,
        "entry": source.entry,
        "target": target.name,
        "source": source.code,
    }
    return CacheKey(source.name, tuple(sorted(parts.items())))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
