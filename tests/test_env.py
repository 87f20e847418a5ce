"""Environment variables that hold nonsense are named."""

from __future__ import annotations

import pytest

from warploom import env
from warploom.errors import BadSetting


def test_numbers_are_read_and_other_text_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WARPLOOM_THREADS", " 3 ")
    assert env.cpu_threads(1) == 3
    monkeypatch.setenv("WARPLOOM_THREADS", "two")
    expected = "WARPLOOM_THREADS is 'two'; expected a whole number"
    with pytest.raises(BadSetting, match=expected):
        env.cpu_threads(1)
