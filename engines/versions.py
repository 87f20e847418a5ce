"""Which versions of an engine a back end was tested with."""

from __future__ import annotations

from warploom.engine_errors import WrongEngineVersion


def check_version(engine: str, package: str, got: str, tested: str, without: str) -> None:
    """Refuse a version that nobody has tried.

    Hooks of engines are no promise of theirs: another version may call them otherwise, or not at
    all, and then a model would answer wrongly or run without warploom.

    Args:
        engine: what people call it.
        package: what pip calls it.
        got: the installed version.
        tested: the range, as in a requirement.
        without: how to go on without warploom.

    Raises:
        WrongEngineVersion: `got` is outside of the range.
    """
    from packaging.specifiers import SpecifierSet  # all engines bring it; warploom does not need it

    if not SpecifierSet(tested).contains(got, prereleases=True):
        raise WrongEngineVersion(
            engine=engine,
            got=got,
            tested=tested.replace(",", ", "),
            requirement=f"{package}{tested}",
            without=without,
        )
