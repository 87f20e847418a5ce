"""The command `warploom`: look after the cache, show the settings, say what works here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from warploom import __version__, env
from warploom.cli_deploy import build, export, import_
from warploom.errors import WarploomError
from warploom.tables import ago, in_bytes, new_table, show

if TYPE_CHECKING:
    from warploom.codegen.cache.store import Store

_RESOURCES = ("registers", "local", "shared", "compiled")
_KEY_DIGITS = 8  # enough to find its folder


class _Commands(click.Group):
    """Commands that answer a mistake of the user's with its message alone, and exit with 1."""

    def invoke(self, ctx: click.Context) -> Any:
        from warploom.codegen.cache.folder import Untrusted

        try:
            return super().invoke(ctx)
        except (WarploomError, Untrusted) as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Commands)
@click.version_option(__version__, prog_name="warploom")
def main() -> None:
    """Attention variants in Python, compiled for the GPU and the CPU."""


@main.group()
def cache() -> None:
    """The compiled kernels on disk."""


@cache.command("path")
def cache_path() -> None:
    """Print the cache's folder."""
    click.echo(env.cache_dir())


@cache.command("list")
@click.option("--full", is_flag=True, help="Also what each one takes, and its whole key.")
def cache_list(full: bool) -> None:
    """List the compiled kernels, last used first."""
    from warploom.codegen.cache import upkeep
    from warploom.codegen.source import LABELS

    store = _store()
    table = new_table(*LABELS, "target", *(_RESOURCES if full else ()), "size", "used", "key")
    for column in table.columns:
        column.no_wrap = column.header not in ("variant", "key")
        column.justify = "right" if column.header in (*_RESOURCES, "size", "used") else "left"
    kernels = upkeep.kernels(store)
    for kernel in kernels:
        name, _, digest = kernel.item.path.name.rpartition("-")
        key = digest if full else digest[:_KEY_DIGITS]
        facts = kernel.facts or {"labels": {"kind": "[red]damaged[/]", "variant": name}}
        # a kernel compiled before there were labels has its name alone
        labels = facts.get("labels") or {"variant": facts.get("name", name)}
        table.add_row(
            *(labels.get(label, "") for label in LABELS),
            facts.get("parts", {}).get("target", ""),
            *(_resources(facts) if full else ()),
            in_bytes(kernel.item.size),
            ago(kernel.item.used),
            key,
        )
    items = upkeep.items(store)
    images = len([item for item in items if item.path.suffix == ".pch"])
    show(table)
    click.echo(
        f"{len(kernels)} kernels and {images} precompiled headers in {store.root}: "
        f"{in_bytes(sum(item.size for item in items))} of {in_bytes(env.cache_size_bytes())}"
    )


def _resources(facts: Mapping[str, Any]) -> list[str]:
    """What a kernel takes, in the order of `_RESOURCES`; empty where it is not known."""
    used = facts.get("resources") or {}
    memory = (used.get(name) for name in ("local_bytes", "shared_bytes"))
    seconds = facts.get("compile_seconds")
    return [
        str(used.get("registers", "")),
        *("" if size is None else in_bytes(size) for size in memory),
        "" if seconds is None else f"{seconds:.1f} s",
    ]


@cache.command("verify")
def cache_verify() -> None:
    """Check every kernel against its checksum; exit with 1 if one is damaged."""
    from warploom.codegen.cache import upkeep

    kernels = upkeep.kernels(_store())
    damaged = [kernel for kernel in kernels if kernel.problem]
    for kernel in damaged:
        click.echo(kernel.problem)
    click.echo(f"{len(kernels) - len(damaged)} of {len(kernels)} kernels are intact")
    if damaged:
        click.echo("damaged kernels are built again when they are next needed")
        raise SystemExit(1)


@cache.command("clear")
@click.option("--yes", is_flag=True, help="Do not ask.")
def cache_clear(yes: bool) -> None:
    """Remove every kernel and precompiled header."""
    from warploom.codegen.cache import upkeep

    store = _store()
    if not yes:
        click.confirm(f"Remove all compiled kernels in {store.root}?", abort=True)
    count, size = upkeep.clear(store)
    click.echo(f"removed {count} items, {in_bytes(size)}")


@main.command("env", short_help="Show every environment variable that warploom reads.")
def show_env() -> None:
    """Show every environment variable that warploom reads, and what is wrong with those given."""
    from rich.markup import escape

    table = new_table("variable", "value", "without it", "meaning", whole=1)
    for setting in env.SETTINGS:
        value = env.given(setting.name)
        shown = "[dim]not set[/]" if value is None else f"[green]{escape(value)}[/]"
        if problem := env.problem(setting.name):
            shown = f"[red]{escape(value or '')}[/] ({problem})"
        table.add_row(setting.name, shown, setting.default, setting.meaning)
    for name, problem in env.unknown().items():
        value = escape(env.given(name) or "")
        table.add_row(escape(name), f"[red]{value}[/]", "", problem)
    show(table)


@main.command(short_help="Say what works on this machine, by trying it.")
def doctor() -> None:
    """Say what works on this machine, by trying it; exit with 1 if no back end does."""
    from rich.markup import escape

    from warploom.doctor import examine, working_back_ends

    table = new_table("part", "state", "what was found, or what to do", whole=2)
    findings = examine()
    for finding in findings:
        color = "green" if finding.state == "works" else "yellow"
        state = f"[{color}]{finding.state}[/]"
        table.add_row(finding.part, state, escape(finding.detail))  # [cu13] is no markup
    show(table)
    working = working_back_ends(findings)
    click.echo(f"back ends that work here: {', '.join([*working, 'reference (NumPy, slow)'])}")
    if not working:
        raise SystemExit(1)


def _store() -> Store:
    from warploom.codegen.cache.store import Store

    return Store(env.cache_dir())


for command in (build, export, import_):
    main.add_command(command)
