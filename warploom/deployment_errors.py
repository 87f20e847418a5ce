"""Errors of kernels that were built elsewhere, or ahead; the others are in `warploom.errors`."""

from __future__ import annotations

from warploom.errors import NoHostCompiler, WarploomError


class WrongProcessor(NoHostCompiler):
    message = (
        "no C++ compiler was found, and the kernels in {root} were compiled for another processor. "
        "They need: {needs}. This one has: {has}. It lacks: {lacks}. Fill the cache on a machine "
        "of this kind, or install a compiler."
    )


class NotInCache(NoHostCompiler):
    message = (
        "{kernel} is not among the kernels in {root}, and there is no C++ compiler to make it. "
        "Build it where there is one (warploom build), and bring it here with warploom export and "
        "import; or install a compiler."
    )


class NowhereToWrite(WarploomError):
    message = (
        "neither the cache in {root} nor the folder of temporary files can be written ({reason}), "
        "and a compiled kernel must lie in one of them. Make room, or set WARPLOOM_CACHE_DIR to a "
        "folder of your own."
    )


class UnknownProcessor(WarploomError):
    message = (
        "{compiler} compiles for no processor {name!r}. Expected what it takes after {option}, "
        "such as x86-64-v3, or native for the processor of this machine."
    )


class BadBuildSpec(WarploomError):
    message = (
        "{spec!r} names nothing to build: {reason}. Expected module:object or path/to/file.py:"
        "object, where the object is a declaration (AttentionDeclaration, PageSelectionDeclaration,"
        " AppenderDeclaration), several of them in a list, or a function without arguments that "
        "returns one or several."
    )


class BrokenBuildSpec(WarploomError):
    message = (
        "{spec} names nothing to build yet: {where} raised {kind}: {reason}. Correct that first; "
        "warploom build reads declarations by importing what has them."
    )


class CacheNotWritable(WarploomError):
    message = (
        "the cache in {root} cannot be written ({reason}). Set WARPLOOM_CACHE_DIR to a folder that "
        "can, and that has room."
    )


# --- archives of kernels ------------------------------------------------------------------------


class ArchiveError(WarploomError):
    """Base of what can be wrong with an archive of kernels, or with making one."""

    message = "{path}: {reason}. {remedy}"


class CannotExport(ArchiveError):
    message = "{path} was not written: {reason}. {remedy}"


class DamagedArchive(ArchiveError):
    message = (
        "{path} is no intact archive of kernels: {reason}. Nothing was imported. Copy the file "
        "again, or make a new one with warploom export."
    )


class NoArchive(DamagedArchive):
    message = "{path} does not exist. Give the path of a file that warploom export wrote."


class UnsafeArchive(ArchiveError):
    message = (
        "{path} holds what no warploom export writes: {reason}. Nothing was imported. An archive is"
        " code that will run: take it from a source that you trust, or make a new one."
    )


class WrongArchive(ArchiveError):
    message = (
        "{path} has the SHA-256 {got}; expected {expected}. Nothing was imported. It is another "
        "archive, or it was changed: fetch the one that warploom export gave this digest."
    )


class NewerArchive(ArchiveError):
    message = (
        "{path} has format {got}, of warploom {warploom}; this version reads formats up to "
        "{known}. Nothing was imported. Install that version here, or export with this one."
    )


class OtherHeaders(ArchiveError):
    message = (
        "{path} holds kernels of warploom {warploom} with other headers, such as {kernel}, which "
        "this installation (warploom {here}) would never look for. Nothing was imported. Build and "
        "export with the version that serves."
    )


class ArchiveTooLarge(ArchiveError):
    message = (
        "{path} unpacks to {got} MiB; the cache holds {limit}. Nothing was imported. If you expect "
        "that much, raise WARPLOOM_CACHE_SIZE (in MiB)."
    )
