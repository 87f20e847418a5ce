"""The fuzzer itself: seeds reproduce; faults are found, shrunk and shown by scripts."""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz import cli, harness, reference, runner
from fuzz.attention import attention_of
from fuzz.cases import Case, draw
from fuzz.recorded import RECORDED
from fuzz.runner import NoSanitizer, Settings, Worker
from fuzz.script import script
from fuzz.source import literal
from rich.console import Console

from warploom.codegen.build import build
from warploom.codegen.compilers.arch import arch_named
from warploom.codegen.compilers.hostcc import host_target
from warploom.errors import NoHostCompiler
from warploom.runtime.wrappers.declaration import AttentionDeclaration, PageSelectionDeclaration

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def compiler() -> None:
    try:
        host_target()
    except NoHostCompiler as error:
        pytest.skip(str(error))


CAUSAL = "    return le(at['kv_pos'], at['q_pos'])\n"
FAULT = (CAUSAL, CAUSAL.replace("le(", "lt("))


@dataclass(frozen=True)
class Wrong(Case):
    """A case whose reference hides the diagonal of causal masks."""

    def spec(self) -> dict[str, Any]:
        spec = super().spec()
        return {**spec, "reference": spec["reference"].replace(*FAULT)}


def wrong(seed: int, device: str) -> Case:
    case = draw(seed, device)
    return Wrong(case.seed, case.hooks, case.fields, case.shipped, case.facts)


def seed_with(text: str, front: str = "variant") -> int:
    """The first seed whose reference has a text, of few compiles."""
    for seed in range(1000):
        case = draw(seed)
        simple = case.facts["front"] == front and case.facts["format"][0] == "ragged"
        if simple and text in case.spec()["reference"] and not case.facts["kv_dtype"]:
            return seed
    raise LookupError(text)


def spec_with(text: str) -> dict[str, Any]:
    """Its spec, of one batch: those of other sizes have kernels of their own."""
    spec = draw(seed_with(text)).spec()
    return {**spec, "batches": spec["batches"][:1]}


def digest(count: int) -> str:
    drawn = [[draw(seed, device).spec() for device in ("cpu", "cuda")] for seed in range(count)]
    return hashlib.sha256(json.dumps(drawn).encode()).hexdigest()


DIGEST = inspect.getsource(digest)


def alone(path: Path) -> subprocess.CompletedProcess[str]:
    """Run a script as someone does who has warploom and nothing of its tests."""
    kept = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    links = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept["PYTHONPATH"] = os.pathsep.join(x for x in links if Path(x) != ROOT / "tests")
    return subprocess.run([sys.executable, str(path)], env=kept, capture_output=True, text=True)


def test_a_seed_is_the_same_case_in_any_process() -> None:
    code = f"import hashlib, json\nfrom fuzz.cases import draw\n{DIGEST}\nprint(digest(60))"
    path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == digest(60)


def test_a_planted_fault_is_found_shrunk_and_shown_by_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "FOLDER", tmp_path)
    monkeypatch.setattr(cli, "draw", wrong)
    monkeypatch.setattr(cli, "digest", lambda: "any")
    seed = seed_with(CAUSAL)
    args = argparse.Namespace(
        minutes=10.0, seed=seed, cases=1, jobs=1, device="cpu", sanitize=False, memcheck=False,
        limit=300.0, shrink=40.0, show=False,
    )  # fmt: skip
    console = Console(record=True, quiet=True)
    campaign = cli.Campaign(args, console)
    campaign.work(campaign.workers[0])
    campaign.close()
    assert campaign.failures == [seed]
    path = tmp_path / f"cpu-{seed}.py"
    done = alone(path)
    assert done.returncode == 1
    assert "Mismatch: " in done.stderr and "rows are wrong" in done.stderr
    text = path.read_text()
    variant = text.rpartition("SPEC['variant'] = '''")[2].partition("'''")[0]
    assert variant.rstrip().endswith(("= Drawn() & wl.Causal()", "= wl.Causal() & Drawn()"))
    assert len(variant) < len(draw(seed).spec()["variant"])
    batches = ast.literal_eval(text.rpartition("'batches': ")[2].partition(",\n '")[0])
    assert len(batches) == len(batches[0]) == 1  # one request is enough
    log = json.loads((tmp_path / "log.jsonl").read_text())
    assert (log["failures"], log["cases"], log["seeds"]) == ([seed], 1, [seed, seed])


def spec_that(looks: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first spec of a causal variant, on few rows, of which something holds."""
    for seed in range(3000):
        spec = draw(seed).spec()
        if "wl.Causal()" in spec["variant"] and spec["bounds"] is None and looks(spec):
            return {**spec, "batches": [[[9, 9]]]}
    raise LookupError("no seed")


def spoilt(change: Callable[[dict[str, Any]], object]) -> Callable[..., dict[str, Any]]:
    """The attention of the reference, with something of it changed in place."""

    def changed(*args: Any) -> dict[str, Any]:
        found = attention_of(*args)
        change(found)
        return found

    return changed


def test_wrong_largest_scores_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_that(lambda spec: spec["aux"] in ("max_scores", "both"))
    assert harness.check(spec)["rows"] > 0
    monkeypatch.setattr(harness, "attention_of", spoilt(lambda x: x["tops"].mul_(1.001).add_(0.01)))
    with pytest.raises(harness.Mismatch, match="tops by"):
        harness.check(spec)


def test_wrong_records_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that is off, one that should not be there, and one that is not."""
    changes: list[Callable[[dict[str, Any]], object]] = [
        lambda x: x["recorded"].update(seen0=x["recorded"]["seen0"] * 1.01 + 0.5),
        lambda x: x["seen"].zero_(),
        lambda x: x["seen"].fill_(True),
    ]
    spec = spec_that(lambda spec: "q_idx" in str(spec["outputs"]))
    assert harness.check(spec)["rows"] > 0
    for change in changes:
        monkeypatch.setattr(harness, "attention_of", spoilt(change))
        with pytest.raises(harness.Mismatch, match="elements of seen0 are wrong"):
            harness.check(spec)


def test_a_script_without_a_fault_says_so(tmp_path: Path) -> None:
    path = tmp_path / "sound.py"
    spec = spec_that(lambda spec: bool(spec["outputs"]) and spec["aux"] == "both")
    path.write_text(script(spec, "nothing"))
    text = path.read_text()
    assert "seen0 = wl.Output(" in text and "'aux': 'both'" in text
    done = alone(path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("no fault: {'rows': ")


def test_a_process_that_dies_or_hangs_is_a_failure_of_its_case() -> None:
    spec = spec_with("tanh(")
    worker = Worker(Settings())
    dead = worker.run({**spec, "variant": "import os\nos._exit(3)"})
    assert (dead["ok"], dead["kind"]) == (False, "Died(3)")
    assert worker.run(spec)["ok"]
    worker.settings = Settings(limit=1.0)
    found = worker.run({**spec, "variant": "import time\ntime.sleep(60)"})
    assert (found["ok"], found["kind"]) == (False, "Hang")
    worker.close()


def test_sanitized_workers_find_overruns_and_nothing_else() -> None:
    spec = spec_with("tanh(")
    overrun = spec["variant"] + (
        'peek = wl.custom_function("peek", cuda="WL_FN float peek(float x) { return x; }",\n'
        '    cpp="WL_FN float peek(float x) { static float held[3] = {}; held[0] += x; "\n'
        '        "return held[int(x * 0.0f) + 3]; }", python=lambda x: x)\n'
        "class Overrun(wl.Variant):\n"
        "    def logits_transform(self, logits, at):\n        return peek(logits)\n"
        "VARIANT = Overrun()\n"
    )
    try:
        worker = Worker(Settings(sanitize=True))
    except NoSanitizer as error:
        pytest.skip(str(error))
    assert worker.run(spec)["ok"]
    found = worker.run({**spec, "fields": {}, "variant": overrun})
    worker.close()
    assert found["kind"].startswith("Died(")
    assert "AddressSanitizer" in found["text"] or "out of bounds" in found["text"]


MEMCHECK = """#!/bin/sh
while [ "$1" != --log-file ]; do shift; done
log=$2; shift 2
echo "========= COMPUTE-SANITIZER" > $log
if [ -n "$FAULT" ]; then echo "========= Invalid __global__ write of size 4 bytes" >> $log; fi
"$@"
if [ -n "$LATE" ]; then echo "========= ERROR SUMMARY: 1 error" >> $log; exit 9; fi
"""


@pytest.mark.some(2)
@pytest.mark.parametrize("fault", ["", "FAULT", "LATE"])
def test_what_compute_sanitizer_reports_is_a_failure(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(MEMCHECK)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    if fault:
        monkeypatch.setenv(fault, "1")
    spec = spec_with("tanh(")
    worker = Worker(Settings(memcheck=True))
    found, end = worker.run(spec), worker.finish()
    if fault == "FAULT":
        assert found["kind"] == "Memcheck" and "Invalid __global__ write" in found["text"]
    else:
        assert found["ok"]
    assert (end or {}).get("kind") == ("Memcheck(9)" if fault == "LATE" else None)


def test_workers_share_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    names = [runner.on_gpu(i, 2)["CUDA_VISIBLE_DEVICES"] for i in range(5)]
    assert names == ["0", "1", "0", "1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,7")
    assert [runner.on_gpu(i, 2)["CUDA_VISIBLE_DEVICES"] for i in range(3)] == ["3", "7", "3"]


def variant_of(spec: dict[str, Any]) -> Any:
    """The variant of a case whose tensors do not exist yet."""
    batch = harness.Batch({**spec, "device": "cpu"}, [(1, 1)], 0)
    return harness.prepare({**spec, "device": "cpu"}, batch)[0]


def test_tiles_for_a_device_are_those_that_fit(all_cases: bool) -> None:
    arch, found = arch_named("sm_90a"), set()
    tiles = {("portable", 1), ("portable", 16), ("portable", 64), ("hopper", 128)}
    roles = {("portable", 64, True), ("portable", 128, True), ("hopper", 128, True)}
    wanted = {*((*tile, False) for tile in tiles), *roles}
    for seed in range(400):
        if wanted <= found and not all_cases:
            break
        spec = draw(seed, "cuda").spec()
        if spec["tile"] is None or spec["front"] == "flex":
            continue
        tile = harness.chosen_tile(spec, variant_of(spec), arch)
        wants_roles = spec["tile"][0] == "roles"
        assert tile is None or spec["tile"][0] in ("any", "roles", tile.template)
        assert tile is None or wants_roles == bool(tile.of_roles)
        found.add(None if tile is None else (tile.template, tile.rows, wants_roles))
    assert wanted <= found


def test_what_is_drawn_for_a_device_can_be_declared(all_cases: bool) -> None:
    """Nothing is refused that a wrapper of a GPU would look at before it has a batch."""
    arch, kinds = arch_named("sm_90a"), {"selection": PageSelectionDeclaration}
    for seed in range(100 if all_cases else 8):
        spec = draw(seed, "cuda").spec()
        variant, declaration = variant_of(spec), kinds.get(spec["format"][0], AttentionDeclaration)
        tile = harness.chosen_tile(spec, variant, arch)
        next(declaration(variant, **harness.arguments(spec, tile)).jobs(arch, []))


def test_keys_are_transformed_before_attention_where_they_can_be() -> None:
    ways = {draw(seed, "cuda").facts["options"].get("key_transform") for seed in range(300)}
    assert ways == {None, "auto", "fused", "before"}


@pytest.mark.nvrtc
def test_kernels_for_devices_compile(all_cases: bool) -> None:
    """Those of drawn tiles, up to the cubin."""

    from warploom.codegen.attention.templates import render_cuda
    from warploom.errors import NoCudaCompiler, UnsupportedSpec
    from warploom.scheduler.model.layout import c_structs

    arch, count = arch_named("sm_90a"), 0
    for seed in range(40, 80):
        spec = draw(seed, "cuda").spec()
        variant = variant_of(spec)
        tile = None if spec["tile"] is None else harness.chosen_tile(spec, variant, arch)
        if tile is None:
            continue
        of = harness.declared_spec(spec, variant)
        try:
            build(render_cuda(of, tile, c_structs(roles=bool(tile.of_roles))), arch)
        except NoCudaCompiler as error:
            pytest.skip(str(error))
        except UnsupportedSpec:
            continue
        count += 1
        if count == (4 if all_cases else 1):
            return
    raise AssertionError("no tile was drawn")


def test_numbers_are_written_as_python_reads_them() -> None:
    for value in (1, -3, 0.5, True, float("inf")):
        assert eval(literal(value)) == value


def test_recorded_seeds_are_listed_once() -> None:
    assert len(set(RECORDED)) == len(RECORDED)
    assert random.Random(1).random() == 0.13436424411240122  # seeds mean the same everywhere


@pytest.mark.parametrize("fast", [False, True], ids=["cpu", "gpu"])
def test_noise_has_what_only_rounds(fast: bool) -> None:
    """Both ways to keep transformed vectors, and functions whose results are float32's own."""
    narrow = set()
    for places, seed in harness.NOISES:
        with reference.noise(places, seed, fast=fast):
            if places == 0.0:
                narrow.add(reference.Noise.narrow)
                five = reference.of_function(torch.tensor(4.99999977).double(), "gelu")
                assert five.item() == 5.0
    assert narrow == {False, True}
