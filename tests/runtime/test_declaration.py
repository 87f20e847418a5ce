"""Declarations name every kernel that wrappers on any device of a kind can ask for."""

from __future__ import annotations

import inspect
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.gpu_planners import MakePlanner, choice, declared, planners
from support.parts import compiled

import warploom as wl
from warploom.codegen.compilers.arch import ARCHS, Arch
from warploom.codegen.compilers.hostcc import HostTarget
from warploom.codegen.source import KernelSource
from warploom.errors import ArgumentError, BadHeadDim, UnknownArchitecture, UnsupportedSpec
from warploom.runtime.calls.attention import _Unbound
from warploom.runtime.formats import make_batch
from warploom.runtime.formats.batch import Batch, OnDevice
from warploom.runtime.launching.kernels import Kernels
from warploom.runtime.strategies.planner import Planner
from warploom.scheduler.model.problem import Partition

WHERE = {"self", "device", "backend", "workspace"}
SMS = (1, 14, 58, 78, 108, 114, 132, 148, 160, 188, 256)
CAUSAL = wl.Causal()
BOUNDS = wl.Bounds(max_requests=32, max_q_rows=512, max_kv_len=4096, max_blocks=32 * 256)


DECLARATIONS = [
    declared(kv_format=wl.Paged(16)),
    declared(kv_format=wl.Paged(1), num_kv_heads=8),
    declared(kv_format=wl.Dense(), num_kv_heads=8, head_dim=64),
    declared(wl.Causal() & wl.Rope(), kv_format=wl.Ragged()),
    declared(wl.QKNorm() & wl.Rope(), kv_format=wl.Dense(), key_transform="before"),
    declared(wl.Causal() & wl.SoftCap(30.0), kv_format=wl.BlockSparse((16, 16)), head_dim=256),
    declared(wl.KVScale(), kv_format=wl.Paged(16), kv_dtype="float8_e4m3fn"),
    declared(kv_format=wl.Composed(16)),
    declared(wl.Rope(), kv_format=wl.Composed(16), head_dim=64),
    declared(kv_format=wl.Paged(16), bounds=BOUNDS),
    declared(kv_format=wl.Paged(16), bounds=BOUNDS, cuda_graph=True),
    declared(kv_format=wl.Composed(16), bounds=BOUNDS, cuda_graph=True),
    declared(kv_format=wl.Ragged(), bounds=BOUNDS, batch_invariant=True, num_kv_heads=1),
    declared(kv_format=wl.Ragged(), batch_invariant=True),
    declared(kv_format=wl.Ragged(), tile=wl.TileConfig(64, 64, 2, 2)),
]


def random_batch(kv_format: Any, rng: np.random.Generator) -> Batch:
    """Lengths from none to long, alike or not, and page tables with shared prefixes."""
    requests = int(rng.choice((0, 1, 3, 17, 32)))
    longest = int(rng.choice((0, 1, 2, 5, 16)))  # within BOUNDS
    alike = rng.random() < 0.5 or isinstance(kv_format, wl.Dense)
    q = np.full(requests, longest) if alike else rng.integers(0, longest + 1, requests)
    if requests == 1:
        q[:] = rng.choice((0, 1, 12, 48, 130, 512))
    kv = rng.integers(0, int(rng.choice((1, 40, 4097))), requests)
    qo = np.concatenate(([0], np.cumsum(q))).astype(np.int32)
    if isinstance(kv_format, wl.BlockSparse):
        rows = int(sum(-(-n // kv_format.block[0]) for n in q))
        indptr = np.arange(rows + 1, dtype=np.int32)
        return make_batch(kv_format, qo, indptr, np.zeros(rows, np.int32), kv_lens=kv + 16)
    if not isinstance(kv_format, wl.Paged):
        return make_batch(kv_format, qo, np.concatenate(([0], np.cumsum(kv))).astype(np.int32))
    size = kv_format.page_size
    pages = -(-kv // size)
    if isinstance(kv_format, wl.Composed) and rng.random() < 0.7:
        pages[:] = int(rng.choice((1, 40, 256)))
        kv = pages * size
    shared = np.minimum(pages, int(rng.choice((0, 7, 255))))
    table = [
        [*range(n), *range(1000 * (i + 1), 1000 * (i + 1) + p - n)]
        for i, (n, p) in enumerate(zip(shared.tolist(), pages.tolist(), strict=True))
    ]
    indptr = np.concatenate(([0], np.cumsum(pages))).astype(np.int32)
    indices = np.array([x for row in table for x in row], np.int32)
    last = np.where(kv > 0, (kv - 1) % size + 1, 0).astype(np.int32)
    return make_batch(kv_format, qo, indptr, indices, last)


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> MakePlanner:
    return planners(monkeypatch)


def codes(jobs: Any, target: Any) -> set[str]:
    return {source.code for source, of in jobs if of is target}


@pytest.mark.some(20)
@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
@pytest.mark.parametrize("declaration", DECLARATIONS, ids=range(len(DECLARATIONS)))
def test_every_source_of_every_batch_on_every_gpu_is_named(
    planner: MakePlanner,
    declaration: wl.AttentionDeclaration,
    arch: Arch,
) -> None:
    named = codes(declaration.jobs(arch, []), arch)
    rng = np.random.default_rng(7)
    kv_format: Any = declaration.kv_format
    batches = [random_batch(kv_format, rng) for _ in range(12)]
    if declaration.bounds is not None and not kv_format.composed:
        batches.append(OnDevice.of((None,) * 4, 3, 40, declaration.bounds))
    met = set[str]()
    for sms in SMS:
        made, kernels = planner(declaration, arch, sms)
        choices = [*(choice(made, batch) for batch in batches), *made.choices()]
        met |= {source.code for choice in choices for source in kernels.sources(choice)}
    assert met <= named
    planners = {code for code in named if "warploom_planner" in code}
    served = type(kv_format) in (wl.Paged, wl.Ragged) and not declaration.batch_invariant
    assert len(planners) == (declaration.bounds is not None and served)
    assert named == met | planners  # nothing is built for nobody


@pytest.mark.parametrize("declaration", DECLARATIONS, ids=range(len(DECLARATIONS)))
def test_every_source_of_every_batch_on_the_cpu_is_named(
    declaration: wl.AttentionDeclaration, host: HostTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    if declaration.key_transform == "before":
        with pytest.raises(ArgumentError, match="cannot be 'before'"):
            list(declaration.jobs(host, [host]))
        return
    monkeypatch.setattr(
        Kernels, "get", lambda self, choice: SimpleNamespace(tile=choice.tile, num_ctas=4)
    )
    monkeypatch.setattr(Planner, "largest_size", lambda *_: None)
    monkeypatch.setattr(Planner, "reserve", lambda _: None)
    named = codes(declaration.jobs(host, [host]), host)
    wrapper = declaration.on("cpu")
    assert isinstance(wrapper, wl.AttentionWrapper) and wrapper.device.type == "cpu"
    rng = np.random.default_rng(3)
    batches = [random_batch(declaration.kv_format, rng) for _ in range(50)]
    made = compiled(wrapper)
    choices = [*(choice(made.planner, batch) for batch in batches), *wrapper.choices()]
    met = {source.code for choice in choices for source in made.kernels.sources(choice)}
    assert met <= named
    kv_format: Any = declaration.kv_format
    native = type(kv_format) in (wl.Dense, wl.Ragged, wl.Paged) and not declaration.batch_invariant
    rules = made.planner.rules
    long = any(
        rules.partition(b, one.tile) is Partition.LONGEST_FIRST for b in batches for one in choices
    )
    found = [code for code in named if "warploom_planner" in code]
    assert sum("LongestFirstPlanner" in code for code in found) == (native and long)
    assert len(found) == native * (1 + long)


def test_attention_asks_for_what_dense_declarations_name(host: HostTarget) -> None:
    dense = declared(kv_format=wl.Dense())
    asked = _Unbound(
        wl.Causal(), kv_format=wl.Dense(layout="HND"), num_q_heads=8, num_kv_heads=2, head_dim=128,
        head_dim_v=128, dtype=torch.bfloat16, device="cpu",
    )  # fmt: skip
    assert codes(asked.build_jobs(), asked.target) <= codes(dense.jobs(host, [host]), host)


def test_selections_have_the_kernels_of_pages_and_no_native_planner(host: HostTarget) -> None:
    selected = wl.PageSelectionDeclaration(
        wl.Causal(), kv_format=wl.Paged(16), num_q_heads=8, num_kv_heads=2, head_dim=128,
        dtype="bfloat16", bounds=wl.Bounds(32, 512, 4096),
    )  # fmt: skip
    for target in (ARCHS["sm_80"], host):
        paged = codes(declared(kv_format=wl.Paged(16)).jobs(target, []), target)
        found = codes(selected.jobs(target, [host]), target)
        assert found == {code for code in paged if "warploom_planner" not in code}
    assert type(selected.on("cpu")) is wl.PageSelectionWrapper


def test_appends_are_one_kernel(host: HostTarget) -> None:
    declaration = wl.AppenderDeclaration(
        wl.Rope(), kv_format=wl.Paged(16), num_kv_heads=2, head_dim=64, dtype="bfloat16",
        kv_dtype="float8_e4m3fn",
    )  # fmt: skip
    for target, language in ((ARCHS["sm_80"], "cuda"), (host, "cpp")):
        ((source, of),) = declaration.jobs(target, [host])
        assert isinstance(source, KernelSource) and source.language == language and of is target


@pytest.mark.parametrize(
    ("declaration", "made"),
    [
        (wl.AttentionDeclaration, wl.AttentionWrapper),
        (wl.PageSelectionDeclaration, wl.PageSelectionWrapper),
        (wl.AppenderDeclaration, wl.Appender),
    ],
)
def test_declarations_have_the_arguments_of_what_they_make(declaration: Any, made: Any) -> None:
    wanted = inspect.signature(made.__init__).parameters
    given = inspect.signature(declaration).parameters
    assert [name for name in wanted if name not in WHERE] == list(given)
    for name, parameter in given.items():
        assert parameter.default == wanted[name].default and parameter.kind == wanted[name].kind
    where = inspect.signature(declaration.on).parameters
    assert set(where) == WHERE & set(wanted)
    assert {field.name for field in fields(declaration)} == set(given)


def test_formats_that_nothing_serves_are_refused_at_once() -> None:
    heads: dict[str, Any] = {"num_kv_heads": 1, "head_dim": 64}
    with pytest.raises(ArgumentError, match="no paged cache; write new tokens to slot_of"):
        wl.AppenderDeclaration(kv_format=wl.Rolling(4), **heads)  # type: ignore[arg-type]
    for given in (wl.Rolling(4), None):
        with pytest.raises(ArgumentError, match="selections need Paged"):
            wl.PageSelectionDeclaration(kv_format=given, num_q_heads=1, **heads)


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"head_dim": 12}, BadHeadDim, "head_dim=12"),
        ({"num_kv_heads": 3}, ArgumentError, "num_q_heads"),
        ({"dtype": "float32"}, UnsupportedSpec, "float32 on CUDA"),
        ({"cuda_graph": True}, ArgumentError, "bounds"),
        ({"sm_limit": 0}, ArgumentError, "sm_limit"),
        ({"lse_base": "10"}, ArgumentError, "lse_base"),
        ({"sm_scale": "small"}, ArgumentError, "sm_scale"),
        ({"tile": 16}, ArgumentError, "tile"),
        ({"key_transform": "before"}, ArgumentError, "transforms no keys"),
        ({"kv_format": wl.Composed(16), "batch_invariant": True}, ArgumentError, "composed"),
        ({"kv_format": wl.Paged(16), "bounds": wl.Bounds(1, 1, 99)}, ArgumentError, "max_blocks"),
    ],
)
def test_mistakes_are_told_before_anything_is_built(
    given: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        list(declared(**given).jobs(ARCHS["sm_90a"], []))


def test_a_gpu_has_a_name() -> None:
    """Which stands for it; what is no target is not taken for a host."""
    one, arch = declared(kv_format=wl.Paged(16)), ARCHS["sm_90a"]
    named = list(one.jobs("sm_90a", []))
    assert named == list(one.jobs(arch, [])) and all(of is arch for _, of in named)
    with pytest.raises(UnknownArchitecture, match="sm_91"):
        list(one.jobs("sm_91", []))
    other: Any = torch.device("cuda")
    with pytest.raises(ArgumentError, match="target: is device"):
        list(one.jobs(other, []))
