"""A spec as a script of its own: torch, NumPy and warploom are all that it needs."""

from __future__ import annotations

import ast
import pprint
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FILES = ("reference.py", "attention.py", "eager.py", "batches.py", "outputs.py", "harness.py")


def standing_alone(path: Path) -> str:
    """The text of a file without its docstring and without imports of files beside it."""
    lines = path.read_text().splitlines()
    body = ast.parse("\n".join(lines)).body
    away = [body[0]]
    away += [x for x in body if isinstance(x, ast.ImportFrom) and (x.module or "")[:4] == "fuzz"]
    for item in away:
        for n in range(item.lineno - 1, item.end_lineno or item.lineno):
            lines[n] = ""
    return "\n".join(lines).strip() + "\n"


def script(spec: dict[str, Any], failure: str) -> str:
    """The text of a script that runs the spec and fails as it failed here."""
    texts = [spec["variant"], spec["reference"]]
    plain = {name: x for name, x in spec.items() if name not in ("variant", "reference")}
    head = failure.strip().replace('"""', "'''").replace("\\", "/")
    parts = [
        f'"""{head}"""',
        "import os",
        f'os.environ.setdefault("WARPLOOM_THREADS", "{spec["threads"]}")',
        'os.environ.setdefault("WARPLOOM_VERIFY_PLANS", "1")',
        *(standing_alone(HERE / name) for name in FILES),
        f"SPEC = {pprint.pformat(plain, width=100, sort_dicts=False)}",
        f"SPEC['variant'] = '''\n{texts[0]}'''",
        f"SPEC['reference'] = '''\n{texts[1]}'''",
        'if __name__ == "__main__":\n    print("no fault:", check(SPEC))',
    ]
    return "\n".join(parts) + "\n"
