"""The Hopper kernels that need the most registers keep nothing in local memory.

`benchmarks/spills.py` compiles 621 kernels; these are the ones that spilled once.
"""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
TIGHT = [
    ("norms, rope", 160, "ragged"),
    ("norms, rope", 160, "pages of 1"),
    ("norms, rope", 192, "pages of 1"),
    ("norms, rope", 256, "ragged"),
    ("norms, rope, bias", 128, "pages of 1"),
    ("rope, window, cap", 72, "ragged"),
    ("rope, window, cap", 80, "ragged"),
    ("rope", 192, "pages of 16"),
    ("rope", 256, "pages of 1"),
    ("norms", 256, "ragged"),
    ("layer norm", 256, "pages of 16"),
    ("all norms", 128, "ragged"),
    ("all norms", 192, "pages of 1"),
    ("values' norms", 128, "ragged"),
    ("values' norms", 256, "ragged"),
    ("causal bias", 128, "ragged"),
    ("mask", 128, "pages of 1"),
    ("prefix", 160, "pages of 1"),
    ("prefix", 192, "ragged"),
    ("documents", 160, "pages of 1"),
]


@pytest.mark.some(3)
@pytest.mark.nvrtc
@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize(("variant", "dim", "kv_format"), TIGHT)
def test_what_needs_the_most_registers_spills_nothing(
    variant: str, dim: int, kv_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    from spills import used  # pyright: ignore[reportMissingImports]

    found = used((variant, (dim, dim), kv_format))
    assert found.tile.startswith("hopper")
    assert found.local_bytes == 0, found
