"""vLLM in processes of its own, that find the plug-in by themselves: ranks, drafts, a server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-engines")

from support.tiny_models import prompts
from support.vllm_tokens import SMALL, tokens

Saved = Callable[..., Path]


@pytest.fixture(autouse=True)
def installed() -> None:
    """Processes find the plug-in in the metadata of an installed warploom."""
    found = [one.value for one in entry_points(group="vllm.general_plugins")]
    if "warploom.engines.vllm:load_plugin" not in found:
        pytest.skip("needs warploom installed, not only on the path: pip install -e .")


def test_drafts_are_verified_in_one_step(saved: Saved) -> None:
    """Speculation by n-grams: several rows for each request that decodes."""
    looped = [one * 6 for one in prompts((9, 7, 5))]
    how = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    expected = tokens(saved("Llama"), looped, "", speculative_config=how)
    assert tokens(saved("Llama"), looped, "warploom", speculative_config=how) == expected


def test_two_ranks_answer_as_one(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over gloo, each with half of the heads, in processes that vLLM spawns."""
    expected = tokens(saved("Llama"), prompts(), "")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else each rank wants a NUMA node
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    assert tokens(saved("Llama"), prompts(), "warploom", **ranks) == expected


@contextmanager
def serving(model: Path, plugins: str, log: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [
        part
        for name, value in SMALL.items()
        for part in (f"--{name}".replace("_", "-"), str(value))
    ]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--skip-tokenizer-init", "--enforce-eager", *flags,
    ]  # fmt: skip
    env = os.environ | {
        "VLLM_PLUGINS": plugins, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"
    }  # fmt: skip
    with log.open("wb") as out:
        server = subprocess.Popen(command, env=env, stdout=out, stderr=out)
    try:
        url = f"http://127.0.0.1:{port}"
        _await(f"{url}/health", server, log)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def _await(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 300
    while time.monotonic() < until:
        assert server.poll() is None, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise TimeoutError(url)


def _ask(url: str, prompt: list[int]) -> list[int]:
    body: dict[str, Any] = {
        "model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "detokenize": False,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["choices"][0]["token_ids"]


def test_a_server_answers_requests_that_come_together(saved: Saved, tmp_path: Path) -> None:
    """Twelve at once, of a server that takes eight in a step, and says who attends."""
    log = tmp_path / "log"
    given = prompts((5, 40, 1, 97, 33, 64, 80, 3, 17, 50, 2, 29))
    expected = tokens(saved("Llama"), given, "")
    with serving(saved("Llama"), "warploom", log) as url, ThreadPoolExecutor(12) as clients:
        assert list(clients.map(lambda prompt: _ask(url, prompt), given)) == expected
    assert "warploom attends in 2 layers" in log.read_text()
