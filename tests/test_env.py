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


FLAGS = {
    "WARPLOOM_FORBID_COMPILE": env.forbid_compile,
    "WARPLOOM_PCH": env.use_pch,
    "WARPLOOM_LINE_INFO": env.line_info,
    "WARPLOOM_RACECHECK": env.racecheck,
    "WARPLOOM_SANITIZE": env.sanitize,
    "WARPLOOM_VERIFY_PLANS": env.verify_plans,
    "WARPLOOM_MIXED_ROLES": env.mixed_roles,
    "WARPLOOM_TRACE": env.trace,
    "WARPLOOM_PROGRESS": env.show_progress,
}


@pytest.mark.parametrize("name", FLAGS)
def test_flags_have_words_and_others_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    read = FLAGS[name]
    for word in ("1", "true", "YES", " On "):
        monkeypatch.setenv(name, word)
        assert read() is True
    for word in ("", "0", "False", "no", "OFF"):
        monkeypatch.setenv(name, word)
        assert read() is False
        assert env.problem(name) is None
    for word in ("None", "2", "maybe"):
        monkeypatch.setenv(name, word)
        with pytest.raises(BadSetting, match=f"{name} is '{word}'; expected 1, true, yes or on"):
            read()
        assert str(env.problem(name)).startswith("refused: expected 1, true")


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
