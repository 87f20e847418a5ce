"""The logger `warploom`: what is compiled, found, planned and copied, for those who ask.

An application that configures `logging` sees it as any library's. `WARPLOOM_LOG` writes it to
stderr without that, once this module is imported; the root logger is left alone.
"""

from __future__ import annotations

import logging

from warploom.env import log_level

log = logging.getLogger("warploom")
log.addHandler(logging.NullHandler())  # else Python writes warnings that nobody asked for


def _to_stderr(level: int) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
    log.addHandler(handler)
    log.setLevel(level)


if (_level := log_level()) is not None:
    _to_stderr(_level)
