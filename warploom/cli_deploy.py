"""The commands that bring kernels to where they serve: build, export and import."""

from __future__ import annotations

from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING

import click

from warploom.deployment_errors import BrokenBuildSpec
from warploom.errors import WarploomError
from warploom.tables import in_bytes, new_table, show

if TYPE_CHECKING:
    from warploom.runtime.calls.ahead import BuildReport
    from warploom.runtime.wrappers.declaration import Declaration

_COLUMNS = ("variant", "kind", "dtype", "head_dim", "format", "tile")
_COLORS = {"built": "green", "present": "dim", "failed": "red"}


@click.command(short_help="Build ahead all kernels that a deployment can ask for.")
@click.argument("specs", nargs=-1, required=True, metavar="SPEC...")
@click.option(
    "--arch", "archs", multiple=True, required=True, metavar="ARCH",
    help="A back end to build for: sm_80, sm_90a, ..., or cpu. May be repeated.",
)  # fmt: skip
@click.option(
    "--cpu", "processors", multiple=True, metavar="PROCESSOR",
    help="A processor that host code is for, as the compiler names it (x86-64-v3). May be "
    "repeated; this machine's own without it.",
)  # fmt: skip
def build(specs: tuple[str, ...], archs: tuple[str, ...], processors: tuple[str, ...]) -> None:
    """Build ahead all kernels that a deployment can ask for; no GPU is needed.

    A SPEC is module:object or path/to/file.py:object. The object is a declaration
    (warploom.AttentionDeclaration and the like), several of them, or a function that returns them.
    Exits with 1 if a kernel could not be built; all others are.
    """
    from warploom.runtime.calls.ahead import build_ahead

    declarations = [one for spec in specs for one in _declared(spec)]
    report = build_ahead(declarations, archs, processors or ("native",))
    _tell(report)
    failed = report.of("failed")
    for text in dict.fromkeys(str(kernel.error) for kernel in failed):
        click.echo(f"Error: {text}", err=True)
    if failed:
        raise SystemExit(1)


@click.command(short_help="Write the cache's kernels to one file.")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--arch", "archs", multiple=True, metavar="ARCH",
    help="Only kernels of this back end: sm_80, ..., or cpu. May be repeated.",
)  # fmt: skip
def export(file: Path, archs: tuple[str, ...]) -> None:
    """Write the cache's kernels to one FILE, for `warploom import` elsewhere."""
    from warploom.codegen.archives.archive import export_kernels
    from warploom.codegen.compilers.arch import ARCHS
    from warploom.errors import UnknownArchitecture

    for name in archs:
        if name not in (*ARCHS, "cpu"):
            raise UnknownArchitecture(name=name, known=", ".join((*ARCHS, "cpu")))
    made = export_kernels(file, archs=archs or None)
    click.echo(f"{made.kernels} kernels in {made.path}, {in_bytes(made.bytes)}")
    if made.left_out:
        click.echo(f"left out: {made.left_out} kernels of other versions of warploom")
    click.echo(f"sha256 {made.sha256}")


@click.command("import", short_help="Bring the kernels of such a file into the cache.")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--sha256", metavar="DIGEST", help="Take no other file than the one with it.")
def import_(file: Path, sha256: str | None) -> None:
    """Bring the kernels of a FILE that `warploom export` wrote into the cache.

    The whole file is checked first. It is code that will run: take it from where you trust.
    """
    from warploom import env
    from warploom.codegen.archives.archive_import import import_kernels

    brought = import_kernels(file, sha256=sha256)
    click.echo(
        f"{brought.imported} kernels imported into {env.cache_dir()}, {in_bytes(brought.bytes)}; "
        f"{brought.present} were there"
    )


def _declared(spec: str) -> list[Declaration]:
    """What a SPEC names; mistakes in the user's file are told by their place, without a trace."""
    from warploom.spec_objects import declared

    try:
        return declared(spec)
    except WarploomError:
        raise
    except Exception as error:
        if isinstance(error, SyntaxError):
            where, reason = f"{error.filename}, line {error.lineno},", error.msg
        else:
            frames = extract_tb(error.__traceback__)
            last = [one for one in frames if not one.filename.startswith("<frozen")][-1]
            where, reason = f"{last.filename}, line {last.lineno},", str(error)
        kind = type(error).__name__
        raise BrokenBuildSpec(spec=spec, where=where, kind=kind, reason=reason) from error


def _tell(report: BuildReport) -> None:
    """A line for each kernel, and one for all of them."""
    shown = new_table(*_COLUMNS, "target", "state", "compiled", "size")
    for column in shown.columns:
        column.justify = "right" if column.header in ("compiled", "size") else "left"
    for kernel in report.kernels:
        done = kernel.error is None
        color = _COLORS[kernel.state]
        shown.add_row(
            *(kernel.labels.get(label, "") for label in _COLUMNS),
            kernel.target,
            f"[{color}]{kernel.state}[/]",
            f"{kernel.seconds:.1f} s" if done else "",
            in_bytes(kernel.bytes) if done else "",
        )
    show(shown)
    built, present, failed = (report.of(state) for state in ("built", "present", "failed"))
    size = in_bytes(sum(kernel.bytes for kernel in report.kernels))
    click.echo(
        f"{len(built)} kernels built in {sum(kernel.seconds for kernel in built):.1f} s of "
        f"compiling, {len(present)} already there, {len(failed)} failed: {size}"
    )
