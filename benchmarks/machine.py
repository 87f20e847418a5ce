"""What a recorded figure was measured with: the machine, versions, and the sources of kernels."""

from __future__ import annotations

import hashlib
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
# what kernels, plans and their launches are made of
FOLDERS = ("dsl", "templates", "codegen", "scheduler", "runtime")
SUFFIXES = {".py", ".cuh", ".hpp", ".h", ".j2"}
DIGITS = 12


def machine_facts(device: torch.device) -> dict[str, Any]:
    """What a reader needs to judge the figures."""
    facts: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _commit(),
        "sources": _sources(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    else:
        facts |= {"device": platform.processor() or "CPU", "threads": torch.get_num_threads()}
    return facts


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _sources() -> str:
    """The begin of a digest of these sources: a commit says too little of a tree that is edited."""
    found = hashlib.sha256()
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES:
                for piece in (path.relative_to(ROOT).as_posix().encode(), path.read_bytes()):
                    found.update(b"%d:" % len(piece) + piece)
    return found.hexdigest()[:DIGITS]
