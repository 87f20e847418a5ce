"""Two processes of `tensor_parallel.py`, and what both must have found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent / "tensor_parallel.py"
WEIGHT = 64 * 64 * 4  # bytes of a rank's part


def check_two_ranks(folder: Path, device: str) -> None:
    """The same bits with prefetches and without, and operators where they belong."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, str(SCRIPT), str(rank), str(folder), device],
                         env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]  # fmt: skip
    try:
        errors = [rank.communicate(timeout=400)[1] for rank in ranks]
    finally:  # one whose peer has failed may wait for it longer than that
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    for rank in range(2):
        found = json.loads((folder / f"{rank}.json").read_text())
        assert found["inductor"] == {
            "same": True,
            "bytes": [WEIGHT + WEIGHT // 2],
            "calls": ["all_reduce_", "prefetch", "wait_tensor", "all_reduce_", "wait_tensor"],
        }
        # both weights of each layer behind its gather, and nothing behind a scatter
        assert found["gathers"]["same"] and found["gathers"]["bytes"] == [2 * WEIGHT] * 2
        rows = 2 * 4 * 64 * 4  # bytes of all rows
        moved = [["all_gather_into_tensor", rows], ["reduce_scatter_tensor", rows]] * 2
        assert found["gathers"]["asked"] == moved
        assert found["dtensor"]["same"]
        # up, its bias and down; queries, keys, values and out; nothing behind the last
        assert found["dtensor"]["counts"] == [3, 4, 3]
        order = [x for x in found["dtensor"]["graph"].split() if "all_red" in x or "loom" in x
                 or "wait" in x]  # fmt: skip
        names = [x.split(".")[1] for x in order]
        assert names == ["all_reduce", "prefetch", "wait_tensor"] * 3 + [
            "all_reduce",
            "wait_tensor",
        ]
