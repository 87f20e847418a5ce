"""Worker processes that run specs: one that dies or hangs is a failure of its case."""

from __future__ import annotations

import json
import os
import selectors
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

TESTS = Path(__file__).resolve().parents[1]
RUNTIMES = ("libasan.so", "libstdc++.so.6")  # the second: ASan looks for its throw at the start


class NoSanitizer(Exception):
    """The host compiler has no library of AddressSanitizer."""


def sanitized() -> dict[str, str]:
    """Environment variables of a worker whose kernels are built with sanitizers.

    Raises:
        NoSanitizer: the compiler names none.
    """
    found = []
    for name in RUNTIMES:
        command = [*shlex.split(os.environ.get("CXX") or "c++"), f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        if not os.path.isabs(path):
            raise NoSanitizer(f"{command[0]} knows no {name}")
        found.append(path)
    return {
        "WARPLOOM_SANITIZE": "1",
        "LD_PRELOAD": " ".join(found),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }


class Worker:
    """A process that runs one spec at a time.

    Args:
        limit: seconds that a case may take, its compiles included.
        sanitize: build kernels and planners with AddressSanitizer and UBSan.
    """

    def __init__(self, limit: float = 300.0, sanitize: bool = False) -> None:
        self.limit = limit
        self.extra = sanitized() if sanitize else {}
        self.process: subprocess.Popen[str] | None = None
        self.errors: IO[str] | None = None

    def run(self, spec: dict[str, Any]) -> dict[str, Any]:
        """The outcome: `ok`, and either what was compared or `kind` and `text` of the failure."""
        process = self.process or self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(spec) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return self._died()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(self.limit):
                self.close()
                return {"ok": False, "kind": "Hang", "text": f"no answer in {self.limit} s"}
        line = process.stdout.readline()
        return json.loads(line) if line else self._died()

    def _start(self) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
        self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        settings = {"PYTHONPATH": path, "WARPLOOM_PROGRESS": "0", "WARPLOOM_VERIFY_PLANS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "fuzz.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env={**os.environ, **settings, **self.extra},
        )
        return self.process

    def _died(self) -> dict[str, Any]:
        assert self.process is not None and self.errors is not None
        code = self.process.wait()
        self.errors.seek(0)
        text = self.errors.read()
        self.close()
        return {"ok": False, "kind": f"Died({code})", "text": text[:2000] + text[2000:][-1500:]}

    def kill(self) -> None:
        """End the process from another thread; the one that waits for it sees it die."""
        if self.process is not None:
            self.process.kill()

    def close(self) -> None:
        """End the process."""
        if self.process is not None and self.errors is not None:
            self.process.kill()
            self.process.wait()
            self.errors.close()
            self.process = None
