"""Environment variables that hold nonsense are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from warploom import env
from warploom.codegen.cache.store import Store
from warploom.codegen.cache.upkeep import sweep_daily
from warploom.errors import BadSetting


def test_numbers_are_read_and_other_text_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WARPLOOM_THREADS", " 3 ")
    assert env.cpu_threads(1) == 3
    for wrong in ("two", "0", "-4", "1.5"):
        monkeypatch.setenv("WARPLOOM_THREADS", wrong)
        expected = f"WARPLOOM_THREADS is '{wrong}'; expected a whole number, 1 or more. .*unset it"
        with pytest.raises(BadSetting, match=expected):
            env.cpu_threads(1)
    monkeypatch.setenv("WARPLOOM_BUILD_JOBS", "0")
    with pytest.raises(BadSetting, match="1 or more"):
        env.build_jobs()


@pytest.mark.parametrize("name", ["WARPLOOM_CACHE_SIZE", "WARPLOOM_CACHE_AGE"])
def test_limits_of_the_cache_are_read_where_no_sweep_is_due(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    store = Store(tmp_path)
    sweep_daily(store)
    for wrong in ("lots", "-1"):
        monkeypatch.setenv(name, wrong)
        with pytest.raises(BadSetting, match=f"{name} is '{wrong}'; .* 0 or more"):
            sweep_daily(store)
