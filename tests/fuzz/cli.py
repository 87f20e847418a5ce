"""The command: fresh seeds for some minutes, or given ones; failing scripts in build/fuzz."""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import resource
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.status import Status

from fuzz.cases import Case, draw
from fuzz.runner import Settings, Worker
from fuzz.script import script
from fuzz.shrink import shrink

FOLDER = Path(__file__).resolve().parents[2] / "build" / "fuzz"
MOST_ILL = 0.05  # of all rows: more would mean that the fuzzer looks away
ENOUGH = 10_000  # rows, for a share to mean something
EVERY = 60.0  # seconds between lines of a log
FOLDERS = ("warploom", "dsl", "codegen", "scheduler", "runtime", "templates", "tests/fuzz")


class Campaign:
    """Some processes that take seeds, one after another, until the time is over."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self.args, self.console = args, console
        self.lock = threading.Lock()
        self.begin = time.monotonic()
        self.next = args.seed
        self.stopped = False
        self.cases = self.rows = self.ill = 0
        self.refused: Counter[str] = Counter()
        self.refusals: dict[str, str] = {}  # the first of each class
        self.failures: list[int] = []
        settings = Settings(args.limit, args.sanitize, args.memcheck, args.jobs, gpus(args.device))
        self.workers = [Worker(settings, number) for number in range(args.jobs)]

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin

    @property
    def over(self) -> bool:
        return self.stopped or self.seconds > 60 * self.args.minutes

    @property
    def looks_away(self) -> bool:
        return self.rows > ENOUGH and self.ill > MOST_ILL * self.rows

    def take(self) -> int | None:
        with self.lock:
            done = self.next - self.args.seed
            if self.over or (self.args.cases and done >= self.args.cases):
                return None
            self.next += 1
            return self.next - 1

    def draw(self, seed: int) -> Case:
        return draw(seed, self.args.device)

    def work(self, worker: Worker) -> None:
        while (seed := self.take()) is not None:
            found = worker.run(self.draw(seed).spec())
            if self.stopped:  # what a signal cut off says nothing
                break
            with self.lock:
                self.cases += 1
                self.rows += found.get("rows", 0)
                self.ill += found.get("ill", 0)
                if "refused" in found:
                    self.refused.update([found["refused"]])
                    self.refusals.setdefault(found["refused"], f"seed {seed}: {found['text']}")
            if not found["ok"]:
                self.report(seed, found, worker)
        if (found := worker.finish()) is not None and not self.stopped:
            with self.lock:
                self.failures.append(-1)
            self.console.print(f"a worker's end: {found['kind']}\n{found['text']}", markup=False)

    def report(self, seed: int, found: dict[str, object], worker: Worker) -> None:
        kind = str(found["kind"])
        with self.lock:
            self.failures.append(seed)
        path = FOLDER / f"{self.args.device}-{seed}.py"
        head = f"warploom, seed {seed} of the fuzzer: {kind}\n{found['text']}"
        whole = self.draw(seed)
        path.write_text(script(whole.spec(), head))  # kept even if shrinking is cut off
        if not self.over:
            path.write_text(script(shrink(whole, kind, worker.run, self.args.shrink).spec(), head))
        last = str(found["text"]).strip().splitlines()[-1:] or [""]
        self.console.print(f"seed {seed}: {kind}: {last[0][:200]}\n  {path}", markup=False)
        if self.args.show:
            self.console.print(path.read_text(), markup=False, highlight=False)

    def line(self) -> str:
        rate, share = self.cases / max(self.seconds, 1e-9), 100 * self.ill / max(self.rows, 1)
        return (
            f"seeds {self.args.seed}..{self.next - 1}: {self.cases} cases ({rate:.2f}/s), "
            f"{self.rows} rows compared, {share:.2f}% ill-conditioned, "
            f"{self.refused.total()} refused, {len(self.failures)} failures, {self.seconds:.0f} s"
        )

    def say(self) -> None:
        """A line on the state: the same one on a terminal, one a minute in a log."""
        self.console.print(self.line(), markup=False, soft_wrap=True)

    def stop(self, *_: object) -> None:
        """End at once: workers are killed, and what was counted is kept."""
        self.stopped = True
        for worker in self.workers:
            worker.kill()

    def close(self) -> None:
        """The closing lines, and one in the log."""
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        hours = sum(x.ru_utime + x.ru_stime for x in used) / 3600
        self.console.print(f"{self.line()}, {hours:.2f} CPU hours", markup=False, soft_wrap=True)
        if self.refused:
            self.console.print(f"refused: {dict(self.refused.most_common())}", markup=False)
            for text in self.refusals.values():
                self.console.print(text.strip()[-600:], markup=False, highlight=False)
        if self.looks_away:
            self.console.print(f"more than {MOST_ILL:.0%} of rows were ill-conditioned: a failure")
        facts = {
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "device": self.args.device,
            "sanitize": self.args.sanitize,
            "memcheck": self.args.memcheck,
            "jobs": self.args.jobs,
            "sources": digest(),
            "seeds": [self.args.seed, self.next - 1],
            "cases": self.cases,
            "rows": self.rows,
            "ill": self.ill,
            "refused": dict(self.refused),
            "seconds": round(self.seconds),
            "cpu_hours": round(hours, 4),
            "failures": self.failures,
        }
        with (FOLDER / "log.jsonl").open("a") as log:
            log.write(json.dumps(facts) + "\n")


def gpus(device: str) -> int:
    """How many GPUs workers may share, found without touching one."""
    if device == "cpu":
        return 0
    import torch

    return max(1, torch.cuda.device_count())


def digest() -> str:
    """Of all that was tested: the same sources have the same, whatever their commit."""
    found, root = hashlib.sha256(), FOLDER.parents[1]
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".j2", ".hpp", ".cuh"):
                found.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return found.hexdigest()[:12]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="the first one; fresh by default")
    parser.add_argument("--cases", type=int, default=0, help="how many seeds; 0: for all the time")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sanitize", action="store_true", help="kernels under ASan and UBSan")
    parser.add_argument("--memcheck", action="store_true", help="under compute-sanitizer")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of one case")
    parser.add_argument("--shrink", type=float, default=90.0, help="seconds to shrink a failure")
    parser.add_argument("--show", action="store_true", help="print failing scripts too")
    args = parser.parse_args()
    if args.seed is None:
        args.seed = random.SystemRandom().randrange(10**9)
    return args


def main() -> int:
    """Run a campaign; 1 if a case failed, or if too many rows said nothing."""
    args, console = arguments(), Console()
    FOLDER.mkdir(parents=True, exist_ok=True)
    campaign = Campaign(args, console)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, campaign.stop)
    console.print(f"first seed {args.seed}, on {args.device}, {args.jobs} jobs")
    threads = [threading.Thread(target=campaign.work, args=(w,)) for w in campaign.workers]
    for thread in threads:
        thread.start()
    with Status(campaign.line(), console=console) as status:
        said = time.monotonic()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.5)
            status.update(campaign.line())
            if not console.is_terminal and time.monotonic() > said + EVERY:
                said = time.monotonic()
                campaign.say()
    campaign.close()
    return 1 if campaign.failures or campaign.looks_away else 0


if __name__ == "__main__":
    sys.exit(main())
