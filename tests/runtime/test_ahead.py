"""What was built ahead serves where nothing can be compiled, whatever batches come."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import warploom as wl
from warploom.codegen import build as build_module
from warploom.codegen.build import build, forbid_compilation
from warploom.codegen.compilers.arch import ARCHS
from warploom.codegen.compilers.headers import find_toolchain
from warploom.codegen.compilers.hostcc import HostTarget, host_target_for
from warploom.deployment_errors import CacheNotWritable, UnknownProcessor
from warploom.errors import (
    ArgumentError,
    BuildFailed,
    CompileError,
    NoCudaCompiler,
    UnknownArchitecture,
    UnsupportedSpec,
)
from warploom.runtime.calls.ahead import build_ahead

DEPLOYMENT = """
import warploom as wl

class Fading(wl.Variant):
    rate = wl.Scalar("float32", default=0.01)

    def logits_transform(self, logits, at):
        return logits - self.rate * (at.q_pos - at.kv_pos)

SIZES = dict(num_q_heads=4, num_kv_heads=2, head_dim=32, dtype="float32")
PAGES = wl.Paged(4)
ATTEND = wl.AttentionDeclaration(wl.Causal() & Fading(), kv_format=PAGES, **SIZES)
SELECT = wl.PageSelectionDeclaration(wl.Causal() & Fading(), kv_format=PAGES, **SIZES)
APPEND = wl.AppenderDeclaration(kv_format=PAGES, num_kv_heads=2, head_dim=32, dtype="float32")

def everything():
    return [ATTEND, SELECT, APPEND]
"""

# As in an image without compiler, CUDA packages and this checkout's environment.
ISOLATED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cuda", "nvidia", "cutlass_library", "pycuda", "cupy"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
sys.path[:0] = {paths!r}
import warploom.codegen.compilers.headers as headers
headers.find_spec = lambda name: None
"""

SERVER = """
import numpy as np
import torch
from kernels import APPEND, ATTEND, SELECT

rng = np.random.default_rng({seed})
torch.manual_seed(0)
attend, select, append = ATTEND.on("cpu"), SELECT.on("cpu"), APPEND.on("cpu")
reference = ATTEND.on("cpu", backend="reference")
tiles, planned_by = set(), set()
for step in range(40):
    requests = int(rng.integers(1, 5))
    longest = int(rng.choice((1, 2, 9, 40, 130)))
    q = rng.integers(0, longest + 1, requests)
    if step % 7 == 6:
        q[:] = 0
    if step == 20:
        q = np.array([900])
        requests = 1
    kv = q + rng.integers(0, 60, requests)
    pages = -(-kv // 4)
    qo, indptr = (np.concatenate(([0], np.cumsum(x))).astype(np.int32) for x in (q, pages))
    table = rng.permutation(int(indptr[-1])).astype(np.int32)
    last = np.where(kv > 0, (kv - 1) % 4 + 1, 0).astype(np.int32)
    cache = torch.zeros(int(indptr[-1]) + 1, 2, 4, 2, 32)
    queries, k, v = (torch.randn(int(qo[-1]), h, 32) for h in (4, 2, 2))
    append(k, v, cache, qo, indptr, table, last)
    attend.plan(qo, indptr, table, last)
    tiles.add(attend.tile)
    planned_by.add(attend.planned.by)
    o = attend.run(queries, cache)
    if int(qo[-1]) <= 300:
        reference.plan(qo, indptr, table, last)
        torch.testing.assert_close(o, reference.run(queries, cache), atol=2e-4, rtol=1e-3)
    budget = max(1, int(pages.max()))
    chosen = torch.zeros(requests, 2, budget, dtype=torch.int32)
    for i in range(requests):
        chosen[i, :, : pages[i]] = torch.from_numpy(table[indptr[i] : indptr[i + 1]])
    select.plan(qo, indptr, chosen, last)
    torch.testing.assert_close(select.run(queries, cache), o, atol=1e-4, rtol=1e-3)
assert tiles >= set(attend.tiles()), tiles
attend.warm_up()
assert "the host, natively" in planned_by, planned_by
assert not [name for name in sys.modules if name.split(".")[0] in ("cuda", "nvidia")]
print("served")
"""


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("WARPLOOM_FORBID_COMPILE", raising=False)
    build_module._artifacts.clear()


def isolated(code: str, folder: Path, cache: Path, **settings: str) -> str:
    """Run code as a machine would that has Python, torch and warploom, and nothing else."""
    paths = [str(folder), *(path for path in sys.path if path)]
    script = folder / "served.py"
    script.write_text(ISOLATED.format(paths=paths) + textwrap.dedent(code))
    keep = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    environment = {**keep, "PATH": str(folder), "WARPLOOM_CACHE_DIR": str(cache), **settings}
    done = subprocess.run(
        [sys.executable, "-I", str(script)], env=environment, cwd=folder, text=True,
        capture_output=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_machine_without_compilers_serves_what_was_built_ahead(
    tmp_path: Path, host: HostTarget
) -> None:
    (tmp_path / "kernels.py").write_text(DEPLOYMENT)
    made: dict[str, list[wl.AttentionDeclaration]] = {}
    path = tmp_path / "kernels.py"
    exec(compile(path.read_text(), str(path), "exec"), made)
    report = wl.build_kernels(made["everything"](), archs=["cpu"])  # type: ignore[operator]
    assert [kernel.state for kernel in report.kernels] == ["built"] * 7
    assert all(kernel.seconds > 0 and kernel.bytes > 0 for kernel in report.kernels)
    kinds = [kernel.labels["kind"] for kernel in report.kernels]
    assert sorted(kinds) == ["append", *["cpu"] * 4, *["planner"] * 2]
    again = wl.build_kernels(made["ATTEND"], archs=["cpu"])  # type: ignore[arg-type]
    assert {kernel.state for kernel in again.kernels} == {"present"}

    verified = {"WARPLOOM_VERIFY_PLANS": "1"}
    forbidden = {"WARPLOOM_FORBID_COMPILE": "1", **verified}
    server = SERVER.format(seed=1)
    assert "served" in isolated(server, tmp_path, tmp_path / "cache", **forbidden)

    archive = wl.export_kernels(tmp_path / "kernels.zip")
    bring = f"""
    import warploom as wl
    print(wl.import_kernels({str(archive.path)!r}, sha256={archive.sha256!r}))
    assert "torch" not in sys.modules and "jinja2" not in sys.modules
    """
    elsewhere = tmp_path / "elsewhere"
    assert "imported=7, present=0" in isolated(bring, tmp_path, elsewhere)
    assert "served" in isolated(SERVER.format(seed=2), tmp_path, elsewhere, **verified)


def small(**given: object) -> wl.AttentionDeclaration:
    tile = wl.TileConfig(16, 64, 2, 2)
    return wl.AttentionDeclaration(
        num_q_heads=2, head_dim=64, dtype="bfloat16", tile=tile, **given  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.nvrtc
def test_kernels_for_a_gpu_are_built_without_one(host: HostTarget) -> None:
    try:
        find_toolchain()
    except NoCudaCompiler as error:
        pytest.skip(str(error))
    declaration = small(variant=wl.Causal(), kv_format=wl.Ragged(), bounds=wl.Bounds(4, 64, 512))
    report = wl.build_kernels(declaration, archs=["sm_80"], progress=False)
    built = [(kernel.name.split("_Causal")[0], kernel.target) for kernel in report.kernels]
    assert built == [
        ("portable", "sm_80"), ("planner", "cpu"), ("longest_first_planner", "cpu"),
        ("planner", "sm_80"),
    ]  # fmt: skip
    assert {kernel.state for kernel in report.kernels} == {"built"}
    build_module._artifacts.clear()
    with forbid_compilation():
        for job in declaration.jobs(ARCHS["sm_80"], [host]):
            assert not build(*job).compiled


def test_host_code_is_for_the_processors_that_were_named(host: HostTarget) -> None:
    if "-march=native" not in host.flags:
        pytest.skip("needs a compiler for x86")
    declaration = wl.AppenderDeclaration(kv_format=wl.Paged(16), num_kv_heads=1, head_dim=8)
    report = wl.build_kernels(declaration, archs=["cpu"], processors=["x86-64", "native"])
    assert [kernel.state for kernel in report.kernels] == ["built"] * 2
    plain = host_target_for("x86-64")
    assert set(plain.needs) < set(host.needs)
    for processor in ("i9000", "x86-64 -O0", ""):
        with pytest.raises(UnknownProcessor, match=r"x86-64-v3, or native"):
            wl.build_kernels(declaration, archs=["cpu"], processors=[processor])


def failing(name: str) -> wl.AttentionDeclaration:
    text = f"WL_FN float {name}(float x) {{ return no_such_function(x); }}"
    function = wl.custom_function(name, cuda=text, cpp=text, python=lambda x: x)

    class Calling(wl.Variant):
        def logits_transform(self, logits, at):  # type: ignore[no-untyped-def]
            return function(logits)

    return small(variant=Calling(), kv_format=wl.Dense())


def test_failures_are_told_and_the_others_are_built(host: HostTarget) -> None:
    good = wl.AppenderDeclaration(kv_format=wl.Paged(16), num_kv_heads=1, head_dim=8)
    one, two = failing("one"), failing("two")
    report = build_ahead([one, two, good], ["cpu"])
    states = {kernel.name.partition("_")[0]: kernel.state for kernel in report.kernels}
    assert states == {"cpu": "failed", "planner": "built", "longest": "built", "append": "built"}
    with pytest.raises(BuildFailed, match=r"2 of 5 kernels could not be built:(?s:.*)no_such"):
        report.check()
    with pytest.raises(CompileError, match="no_such_function"):
        wl.build_kernels([one, good], archs=["cpu"])


def test_a_cache_that_cannot_be_written_is_a_failure(
    tmp_path: Path, host: HostTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere such kernels go to a folder of the process, and are lost with it."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(tmp_path / "file" / "cache"))
    declaration = wl.AppenderDeclaration(kv_format=wl.Paged(16), num_kv_heads=1, head_dim=8)
    with (
        pytest.warns(UserWarning, match="cannot be written"),
        pytest.raises(CacheNotWritable, match="WARPLOOM_CACHE_DIR"),
    ):
        wl.build_kernels(declaration, archs=["cpu"])


def test_wrong_arguments_are_told(host: HostTarget) -> None:
    with pytest.raises(UnknownArchitecture, match=r"'sm_90'.*sm_90a.*cpu"):
        wl.build_kernels(small(), archs=["sm_90"])
    with pytest.raises(ArgumentError, match="archs: names no back end"):
        wl.build_kernels(small(), archs=[])
    with pytest.raises(ArgumentError, match=r"archs: is 'cpu'; expected .* such as \['cpu'\]"):
        wl.build_kernels(small(), archs="cpu")
    with pytest.raises(ArgumentError, match=r"processors: is 'native'; expected several names"):
        wl.build_kernels(small(), archs=["cpu"], processors="native")
    with pytest.raises(ArgumentError, match=r"declarations: hold .*expected AttentionDeclaration"):
        wl.build_kernels([wl.Causal()], archs=["cpu"])  # type: ignore[list-item]
    with pytest.raises(UnsupportedSpec, match="float32 on CUDA"):
        wl.build_kernels(
            wl.AttentionDeclaration(num_q_heads=1, head_dim=64, dtype="float32"), archs=["sm_80"]
        )
