"""Hits in L2 of what was prefetched, as ncu counts them: products and attention, by bytes.

    python benchmarks/prefetch_hits.py [--sms 8] [--readers NAME ...] [--out FOLDER]
    python benchmarks/prefetch_hits.py --tiny            # small, on the CPU, with an ncu there

A figure is the hits that a prefetch adds, in parts of the bytes that were asked for. ncu waits for
all earlier work before a kernel, so that these are the hits behind a collective that lasts long
enough: they say what L2 keeps, and that nothing of it is lost. Two metrics of one kernel may take
two passes; then the whole script runs again (`--replay-mode application`), since ncu's own replay
of a kernel would find in L2 what the first pass read.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from harness import Report, Row, placed
from prefetch_readers import Reader, keepers, readers, step
from stand_in import StandIn

NAME = "prefetch_hits"
# of 235, 117 and 134 MB: more than is asked for
PRODUCTS = "8B gate, up", "70B/TP8 gate, up"
READERS = *(f"{name}{mark}" for name in PRODUCTS for mark in ("", ", kept")), "8B keys"
TINY_READERS = "tiny", "tiny, kept", "tiny keys"
BUDGETS = (4, 8, 12, 16, 24, 30, 40, 50, 60)  # MB
TINY_BUDGETS = (0.03,)
HITS, READS = "lts__t_sectors_op_read_lookup_hit.sum", "lts__t_sectors_op_read.sum"
SECTOR = 32  # bytes
SECONDS, COLLECTIVE_SMS = 40e-6, 16
RANGE = "read"
MB = 10**6


def read_each(
    make: Callable[[], Reader], device: torch.device, budgets: Sequence[float], sms: int
) -> None:
    """Under ncu: one step without a prefetch and one for each budget; prints what was asked for.

    Each has memory of its own, of which nothing that was marked in an earlier step is left in L2.
    """
    stand_in = StandIn(device, COLLECTIVE_SMS)
    first = make()
    step(stand_in, first, SECONDS, first.least, sms)  # what is compiled at first use
    made, asked = [first], []
    for budget in (0, *budgets):
        reader = make()
        made.append(reader)  # so that no memory is used again
        if device.type == "cuda":
            torch.empty(1 << 28, device=device).zero_()  # nothing of the last step stays in L2
        size = round(budget * MB)
        with reader.fetch(size, sms) if size else nullcontext(0) as bytes_asked:
            stand_in(SECONDS)
        _finish(device)
        with _named(device):
            reader.read()
        _finish(device)
        asked.append(bytes_asked)
    print(json.dumps(asked))


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _named(device: torch.device) -> AbstractContextManager[object]:
    """The range whose kernels ncu looks at."""
    return torch.cuda.nvtx.range(RANGE) if device.type == "cuda" else nullcontext()


def counted(text: str) -> list[dict[str, int]]:
    """Each kernel's metrics, in the order of launches, from what ncu writes with `--csv`."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    kernels: dict[int, dict[str, int]] = {}
    for line in csv.DictReader(lines):
        value = round(float(line["Metric Value"].replace(",", "")))
        kernels.setdefault(int(line["ID"]), {})[line["Metric Name"]] = value
    return [kernels[at] for at in sorted(kernels)]


def per_read(kernels: list[dict[str, int]], reads: int) -> list[dict[str, int]]:
    """Sums over the kernels of each read, which has as many as any other."""
    if not kernels or len(kernels) % reads:
        raise SystemExit(f"ncu counted {len(kernels)} kernels for {reads} reads")
    each = len(kernels) // reads
    groups = (kernels[at : at + each] for at in range(0, len(kernels), each))
    return [{name: sum(one[name] for one in group) for name in (HITS, READS)} for group in groups]


def profiled(name: str, options: argparse.Namespace) -> tuple[list[int], list[dict[str, int]]]:
    """What a reader asked for in each step, and what ncu counted of its reads."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise SystemExit("ncu (Nsight Compute) is not on the PATH")
    with TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [
            ncu, "--csv", "--print-units", "base", "--replay-mode", "application",
            "--cache-control", "none", "--nvtx", "--nvtx-include", f"{RANGE}/",
            "--metrics", f"{HITS},{READS}", "--log-file", str(log),
            sys.executable, str(Path(__file__).resolve()), "--child", name,
            "--sms", str(options.sms), "--device", str(options.device),
            *(["--tiny"] if options.tiny else []),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        told = log.read_text() if log.exists() else ""
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    if done.returncode or not lines:
        raise SystemExit(f"ncu failed:\n{done.stdout}{done.stderr}{told}"[-4000:])
    asked: list[int] = json.loads(lines[-1])
    return asked, per_read(counted(told), len(asked))


def rows(name: str, size: int, options: argparse.Namespace) -> list[Row]:
    asked, counts = profiled(name, options)
    without = counts[0][HITS]
    found = []
    for bytes_asked, count in zip(asked, counts, strict=True):
        params = {
            "asked": bytes_asked, "bytes": size, "sms": options.sms, "hits": count[HITS],
            "hits_without": without, "sectors": count[READS],
        }  # fmt: skip
        added = 100 * SECTOR * (count[HITS] - without) / bytes_asked if bytes_asked else None
        impl = f"{bytes_asked / MB:.3g} MB" if bytes_asked else "none"
        note = "" if bytes_asked else "no prefetch"
        found.append(Row(NAME, name, impl, added, "%", note=note, params=params))
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small shapes, on the CPU")
    parser.add_argument("--sms", type=int, default=8, help="CTAs of a prefetch")
    parser.add_argument("--readers", nargs="+", help="names; by default two products and keys")
    parser.add_argument("--child", help="the reader to run under ncu")
    given = sys.argv[1:] if argv is None else argv
    options = placed(parser, [*given, "--device", "cpu"] if "--tiny" in given else given)
    device = options.device
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    made = dict([*readers(device, options.tiny), *keepers(device, options.tiny)])
    if options.child is not None:
        budgets = TINY_BUDGETS if options.tiny else BUDGETS
        read_each(made[options.child], device, budgets, options.sms)
        return
    report = Report(NAME, device, options.out)
    for name in options.readers or (TINY_READERS if options.tiny else READERS):
        if name not in made:
            parser.error(f"there is no reader {name!r}; there are {', '.join(made)}")
        size = made[name]().bytes
        for row in rows(name, size, options):
            report.add(row)
    report.finish()


if __name__ == "__main__":
    main()
