"""Runs specs, one a line of standard input, in a process that may die of them."""

from __future__ import annotations

import json
import os
import sys
import traceback

import torch

from fuzz import harness
from warploom import errors

# Errors that speak of a mistake of warploom's own; all others refuse a case by name
OWN = (errors.CompileError, errors.BuildFailed, errors.LaunchError)


def outcome(spec: dict[str, object]) -> dict[str, object]:
    """`ok` and what was compared; or `refused`; or `kind` and `text` of a failure."""
    os.environ["WARPLOOM_THREADS"] = str(spec["threads"])
    try:
        return {"ok": True, **harness.check(spec)}
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        name, text = type(error).__name__, traceback.format_exc()[-3000:]
        refused = isinstance(error, errors.WarploomError) and not isinstance(error, OWN)
        if refused and name != "PlanInvalid":
            return {"ok": True, "refused": name, "text": text}
        return {"ok": False, "kind": name, "text": text}


def main() -> None:
    torch.set_num_threads(1)  # the reference's; warploom's are WARPLOOM_THREADS
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print does not mix with answers
    for line in sys.stdin:
        print(json.dumps(outcome(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
