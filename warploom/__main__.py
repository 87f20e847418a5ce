"""`python -m warploom`: the command `warploom`."""

from __future__ import annotations

from warploom.cli import main

if __name__ == "__main__":
    main(prog_name="warploom")
