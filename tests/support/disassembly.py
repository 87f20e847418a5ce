"""Machine code of a cubin, as text."""

from __future__ import annotations

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest


def disassembled(cubin: Path) -> str:
    """What nvdisasm prints; without it the test is skipped."""
    tool = shutil.which("nvdisasm") or _wheel_tool("nvdisasm")
    if tool is None:
        pytest.skip("needs nvdisasm (package nvidia-cuda-nvdisasm)")
    return subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout


def _wheel_tool(name: str) -> str | None:
    spec = find_spec("nvidia")
    places = list(spec.submodule_search_locations or []) if spec else []
    found = [tool for place in places for tool in Path(place).glob(f"*/bin/{name}")]
    return str(found[0]) if found else None
