"""Overruns of CPU kernels and planners are found where the sanitizers are asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz.runner import NoSanitizer, sanitized

from warploom.codegen.build import build, content_key
from warploom.codegen.compilers import hostcc
from warploom.codegen.compilers.recorded_target import fitting_hosts
from warploom.codegen.source import KernelSource
from warploom.errors import BadSetting, NoHostCompiler

BEGIN = """
import torch
import warploom as wl
q = torch.randn(1, 5, 2, 8)
"""
PLAIN = """
wl.attention(q, q, q, variant=wl.Causal())
"""
EXTREMES = """
class Extremes(wl.Variant):
    values = wl.Tensor("float32", (None,))

    def logits_transform(self, logits, at):
        total = 0.0
        for name in ("exp exp2 expm1 log log2 log1p sqrt rsqrt tanh sigmoid sin cos tan atan sinh "
                     "cosh erf floor ceil").split():
            found = getattr(wl, name)(self.values[at.kv_pos])
            total = total + wl.where(found > 0.5, 1.0, wl.where(wl.isnan(found), 0.5, 0.0))
        x = wl.to_int(self.values[at.kv_pos])
        return total + wl.to_float((x << 7) + x * x - (x // 3) % 5 + (-x) - (x >> 31)) * 1e-9

inf = float("inf")
values = [0.0, -0.0, 1e-45, -1e-40, 0.3, -0.3, 88.0, -88.0, 1e4, -1e4, 1e9, -3e9, 3e38, -3e38, inf,
          -inf, float("nan")]
values += [1.0] * (40 - len(values))
keys = torch.randn(1, 40, 2, 8)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    q, k = (q * 1e3).to(dtype), keys.to(dtype)
    if dtype is torch.float32:  # what variants compute is of this type with the others, too
        wl.attention(q, k, k, variant=Extremes(values=torch.tensor(values)))
        wl.attention(q, k, k, variant=wl.Causal() & wl.SoftCap(5.0), sm_scale=100.0)
    print(wl.attention(q, k, k, variant=wl.Causal(), sm_scale=100.0).shape)
"""
TENSOR = """
import ctypes
from warploom.codegen.build import build
from warploom.codegen.compilers.hostcc import host_target
from warploom.codegen.source import KernelSource
text = '''extern "C" __attribute__((visibility("default")))
void warploom_kernel(float* x, int n) { x[n] = 1.0f; }'''
kernel = ctypes.CDLL(str(build(KernelSource("overrun", text, "cpp"), host_target()).path))
x = torch.zeros(1000)
kernel.warploom_kernel(ctypes.c_void_p(x.data_ptr()), 999)
print("inside")
kernel.warploom_kernel(ctypes.c_void_p(x.data_ptr()), 1000)
"""
FUNCTOR = """
table = wl.custom_function(
    "table",
    cuda="WL_FN float table(float x) { return x; }",
    cpp="WL_FN float table(float x) { static float held[3] = {}; held[0] += x; "
        "return held[int(x * 0.0f) + 3]; }",
    python=lambda x: x,
)
class Overrun(wl.Variant):
    def logits_transform(self, logits, at):
        return table(logits)
wl.attention(q, q, q, variant=Overrun())
"""
ARITHMETIC = FUNCTOR.replace("int(x * 0.0f) + 3", "(2147483647 + int(x * x + 2.0f)) & 1")
PLANNER = """
from warploom.runtime.strategies import site
site.scratch_bytes = lambda *sizes: 8
wrapper = wl.AttentionWrapper(wl.Causal(), num_q_heads=2, head_dim=8, dtype="float32")
wrapper.plan([0, 5, 9], [0, 5, 9])
"""


def run(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A script in a process whose kernels are sanitized; skips where there is no sanitizer."""
    try:
        variables = sanitized()
    except NoSanitizer as error:
        pytest.skip(str(error))
    path = folder / "script.py"
    path.write_text(BEGIN + text)
    return subprocess.run(
        [sys.executable, str(path)], env={**os.environ, **variables}, capture_output=True, text=True
    )


def test_faultless_kernels_run(tmp_path: Path) -> None:
    done = run(PLAIN + EXTREMES, tmp_path)
    assert done.returncode == 0, done.stderr[:3000]
    assert done.stdout.count("[1, 5, 2, 8]") == 3


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("text", "report"),
    [
        (TENSOR, "heap-buffer-overflow"),
        (FUNCTOR, "out of bounds|global-buffer-overflow"),
        (ARITHMETIC, "signed integer overflow"),
        # what lies behind a buffer of 24 bytes may be freed memory of torch
        (PLANNER, "heap-buffer-overflow|heap-use-after-free"),
    ],
    ids=["tensor", "functor", "arithmetic", "planner"],
)
def test_a_planted_fault_ends_the_process(text: str, report: str, tmp_path: Path) -> None:
    done = run(text, tmp_path)
    assert done.returncode != 0
    assert any(part in done.stderr for part in report.split("|")), done.stderr[-3000:]
    assert ("inside" in done.stdout) == (text is TENSOR)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the sanitizers' library were loaded."""
    monkeypatch.setattr(hostcc, "_has_sanitizer", lambda: True)


@pytest.mark.usefixtures("loaded")
def test_sanitized_kernels_have_keys_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    source = KernelSource("any", 'extern "C" int warploom_kernel() { return 1; }', "cpp")
    try:
        plain = hostcc.host_target()
    except NoHostCompiler as error:
        pytest.skip(str(error))
    monkeypatch.setenv("WARPLOOM_SANITIZE", "1")
    watched = hostcc.host_target()
    assert watched.sanitized and not plain.sanitized
    assert content_key(source, watched).digest != content_key(source, plain).digest


def test_without_the_library_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostcc, "_has_sanitizer", lambda: False)
    monkeypatch.setenv("WARPLOOM_SANITIZE", "1")
    with pytest.raises(
        BadSetting, match=r"WARPLOOM_SANITIZE is '1'; expected 0, .*LD_PRELOAD=.*libasan.*libstdc"
    ):
        hostcc.host_target()


@pytest.mark.usefixtures("loaded")
def test_a_cache_gives_sanitized_kernels_to_those_alone_who_ask(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("WARPLOOM_SANITIZE", "1")
    text = 'extern "C" __attribute__((visibility("default"))) int warploom_kernel() { return 1; }'
    try:
        build(KernelSource("any", text, "cpp"), hostcc.host_target())
    except NoHostCompiler as error:
        pytest.skip(str(error))
    assert [found.sanitized for found in fitting_hosts()] == [True]
    monkeypatch.setenv("WARPLOOM_SANITIZE", "0")
    assert fitting_hosts() == []
