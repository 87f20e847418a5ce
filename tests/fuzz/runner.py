"""Worker processes that run specs: one that dies or hangs is a failure of its case."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shlex
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

TESTS = Path(__file__).resolve().parents[1]
RUNTIMES = ("libasan.so", "libstdc++.so.6")  # the second: ASan looks for its throw at the start
MEMCHECK = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")
MEMCHECK += ("--target-processes", "application-only")  # not the processes that compile
MEMCHECK += ("--report-api-errors", "no")  # look-ups of driver functions that are not there
HEADS = ("========= COMPUTE-SANITIZER", "========= ERROR SUMMARY: 0 errors")
LAST_WORDS = 60.0  # seconds in which a process that is watched may end


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
        try:
            path = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        except OSError:
            path = ""
        if not os.path.isabs(path):
            raise NoSanitizer(f"{command[0]} knows no {name}")
        found.append(path)
    return {
        "WARPLOOM_SANITIZE": "1",
        "LD_PRELOAD": " ".join(found),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }


def on_gpu(number: int, count: int) -> dict[str, str]:
    """Environment variables of a worker that has one GPU, as worker `number` of all of them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = given.split(",") if given else [str(i) for i in range(count)]
    return {"CUDA_VISIBLE_DEVICES": names[number % len(names)]}


@dataclass(frozen=True)
class Settings:
    """How a worker runs.

    Attributes:
        limit: seconds that a case may take, its compiles included.
        sanitize: build kernels and planners for the CPU with AddressSanitizer and UBSan.
        memcheck: run under compute-sanitizer.
        jobs: workers that share the machine.
        gpus: GPUs that the workers share; 0 leaves out the question.
    """

    limit: float = 300.0
    sanitize: bool = False
    memcheck: bool = False
    jobs: int = 1
    gpus: int = 0

    def environment(self, number: int) -> dict[str, str]:
        """Variables of worker `number`."""
        path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
        builds = max(1, (os.cpu_count() or 1) // self.jobs)
        found = {"PYTHONPATH": path, "WARPLOOM_PROGRESS": "0", "WARPLOOM_VERIFY_PLANS": "1",
                 "OMP_NUM_THREADS": "1", "WARPLOOM_BUILD_JOBS": str(builds)}  # fmt: skip
        if self.memcheck:  # torch's pools would hide the ends of tensors
            found |= {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "WARPLOOM_LINE_INFO": "1"}
        found |= on_gpu(number, self.gpus) if self.gpus else {}
        return {**os.environ, **found, **(sanitized() if self.sanitize else {})}


class Worker:
    """A process that runs one spec at a time.

    Args:
        settings: how.
        number: which one of all.
    """

    def __init__(self, settings: Settings, number: int = 0) -> None:
        self.settings = settings
        self.environment = settings.environment(number)
        self.process: subprocess.Popen[str] | None = None
        self.errors: IO[str] | None = None
        self.log: IO[str] | None = None

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
            if not selector.select(self.settings.limit):
                self.close()
                return failed("Hang", f"no answer in {self.settings.limit} s")
        line = process.stdout.readline()
        if not line:
            return self._died()
        found: dict[str, Any] = json.loads(line)
        if report := self._reported():
            found = failed("Memcheck", report + "\n" + str(found.get("text", "")))
        if not found["ok"] and spec["device"] != "cpu":
            self.close()  # a device that failed once fails always
        return found

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-X", "faulthandler", "-m", "fuzz.worker"]
        if self.settings.memcheck:
            self.log = tempfile.NamedTemporaryFile("r", errors="replace")  # noqa: SIM115
            command = [*MEMCHECK, "--log-file", self.log.name, *command]
        self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=self.environment,
            start_new_session=True,  # what it starts ends with it
        )
        return self.process

    def _reported(self) -> str:
        """What compute-sanitizer has found so far."""
        if self.log is None:
            return ""
        self.log.seek(0)
        lines = [x for x in self.log.read().splitlines() if not x.startswith(HEADS)]
        return "\n".join(x for x in lines if x.strip("= "))[:3000]

    def _died(self) -> dict[str, Any]:
        assert self.process is not None and self.errors is not None
        code = self.process.wait()
        self.errors.seek(0)
        text = self.errors.read()
        report = self._reported()
        self.close()
        return failed(f"Died({code})", report + text[:2000] + text[2000:][-1500:])

    def finish(self) -> dict[str, Any] | None:
        """Let the process end by itself; a failure that only its end tells, if there is one."""
        process, found = self.process, None
        if process is not None and self.settings.memcheck:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                if process.wait(LAST_WORDS) != 0:
                    found = failed(f"Memcheck({process.returncode})", self._reported())
        self.close()
        return found

    def kill(self) -> None:
        """End the process from another thread; the one that waits for it sees it die."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process."""
        self.kill()
        if self.process is not None:
            self.process.wait()
            for stream in (self.process.stdin, self.process.stdout, self.errors, self.log):
                with contextlib.suppress(BrokenPipeError):
                    if stream is not None:
                        stream.close()
        self.process = self.errors = self.log = None


def failed(kind: str, text: str) -> dict[str, Any]:
    return {"ok": False, "kind": kind, "text": text}
