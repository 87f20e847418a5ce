"""Runs scripts in processes of their own that begin with slow imports done.

`python preloaded.py MODULE...` imports the modules, then takes lines of JSON, [script, folder,
log, arguments...], and answers each with the exit status of the script, run in the folder.
Importing torch and transformers takes longer than what most examples do.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

LONGEST_SECONDS = 300


class Runner:
    """A process that runs scripts."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, script: Path, folder: Path, *arguments: str) -> tuple[int, str]:
        """Exit status and output of a script that is run in the folder, where a log is kept."""
        log = folder / "log"
        assert self._process.stdin is not None and self._process.stdout is not None
        request = json.dumps([str(script), str(folder), str(log), *arguments])
        print(request, file=self._process.stdin, flush=True)
        status = int(self._process.stdout.readline())
        return status, log.read_text()


@contextmanager
def preloaded(*modules: str, variables: Mapping[str, str]) -> Iterator[Runner]:
    """A process with these modules imported, if they are there, and with more variables."""
    with subprocess.Popen(
        [sys.executable, __file__, *modules],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Runner(process)  # its input ends at the end of the block, and so does it


def main() -> None:
    for name in sys.argv[1:]:
        with suppress(ImportError):  # a script that needs it will say so
            import_module(name)
    for line in sys.stdin:
        script, folder, log, *arguments = json.loads(line)
        child = os.fork()
        if child == 0:
            become(script, folder, log, arguments)
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def become(script: str, folder: str, log: str, arguments: list[str]) -> None:
    """What `cd folder; python script arguments &> log` would do from here on."""
    signal.alarm(LONGEST_SECONDS)
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream, place in enumerate((os.open(os.devnull, os.O_RDONLY), written, written)):
        os.dup2(place, stream)
    os.chdir(folder)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
