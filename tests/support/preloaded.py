"""Runs scripts in processes of their own that begin with slow imports done.

`python preloaded.py MODULE...` imports the modules, then takes lines of JSON, [script, folder,
log], and answers each with the exit status of the script, run in the folder. Importing torch and
transformers takes longer than what most examples do.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

LONGEST_SECONDS = 300


def main() -> None:
    for name in sys.argv[1:]:
        with suppress(ImportError):  # a script that needs it will say so
            import_module(name)
    for line in sys.stdin:
        script, folder, log = json.loads(line)
        child = os.fork()
        if child == 0:
            become(script, folder, log)
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def become(script: str, folder: str, log: str) -> None:
    """What `cd folder; python script &> log` would do from here on."""
    signal.alarm(LONGEST_SECONDS)
    written = os.open(log, os.O_WRONLY | os.O_CREAT)
    for stream, place in enumerate((os.open(os.devnull, os.O_RDONLY), written, written)):
        os.dup2(place, stream)
    os.chdir(folder)
    sys.argv = [script]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
