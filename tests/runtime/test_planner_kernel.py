"""The planner kernel's text, run by fibers on the host, writes the host's plans bit for bit."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import warploom as wl
import warploom.templates
from warploom.codegen.compilers.hostcc import host_target
from warploom.codegen.planner_source import PlannerSpec
from warploom.codegen.source import TileConfig
from warploom.dsl.variants.trace import trace
from warploom.runtime.formats.batch import Arguments
from warploom.runtime.planning.rules import smaller_roles
from warploom.runtime.planning.visibility import Heads
from warploom.runtime.strategies.host_planner import HostPlanner
from warploom.runtime.strategies.planner_params import PlannerParams
from warploom.runtime.strategies.site import Site
from warploom.scheduler.model.bounds import Bounds
from warploom.scheduler.model.layout import c_planning
from warploom.scheduler.model.roles import RolePrices
from warploom.scheduler.plans.capacity import capacity

EMULATION = Path(__file__).resolve().parents[1] / "emulation"
TEMPLATES = Path(warploom.templates.__file__).parent
PAGE, LONGEST, REQUESTS = 16, 3000, 150

_HARNESS = """
char memory[1 << 20];
extern "C" __attribute__((visibility("default"))) void emulate(
    const warploom::Params* p, unsigned bytes, unsigned blocks, unsigned threads, unsigned order) {
  fibers::shared = {{memory, bytes}};
  fibers::run(blocks, threads, order, [p] { warploom_planner(*p); });
}
"""


class Emulated:
    """The planner kernel of one mask."""

    def __init__(self, variant: Any, site: Site, folder: Path) -> None:
        target, traced, has_roles = host_target(), trace(variant), site.room.num_roles > 1
        self.site = site
        text = PlannerSpec(traced, has_roles).render("cuda", c_planning(has_roles)).text
        source, library = folder / "kernel.cpp", folder / "kernel.so"
        source.write_text('#include "cuda_intrinsics.hpp"\n' + text + _HARNESS)
        folders = (EMULATION, *(TEMPLATES / name for name in ("include", "cpu", "common")))
        command = [*target.command, "-std=c++17", "-O1", "-fPIC", "-shared", "-Wno-attributes"]
        command += [f"-I{folder}" for folder in folders]
        done = subprocess.run(
            [*command, str(source), "-o", str(library)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        self._run = ctypes.CDLL(str(library))["emulate"]
        self._run.argtypes = (ctypes.c_void_p, *(ctypes.c_uint,) * 4)
        self.params = PlannerParams(traced, has_roles)
        self.votes = np.zeros(1, np.int32)
        self.params.set("votes", self.votes.ctypes.data)
        self.inputs: Any = SimpleNamespace(scalars=variant.inputs(), known={})
        self.params.write_inputs(self.inputs.scalars)
        self.native = HostPlanner(traced, wl.Paged(PAGE), HEADS, has_roles)

    def plan(self, lengths: Any, address: int, grid: tuple[int, int, int]) -> None:
        """As `HostPlanner.plan`, with lengths checked against the bounds."""
        site = self.site
        bounds = site.room.bounds
        shared = site.scratch + 528
        assert shared <= 2**20
        self.params.write_lengths(*lengths.addresses)
        self.params.write_outputs(*site.outputs(address))
        self.params.write_batch(
            lengths.counts[0] - 1, bounds.max_q_rows, bounds.max_kv_len, bounds.max_blocks
        )
        self.params.write_site(*site.numbers)
        self._run(self.params.address, shared, *grid)
        assert self.votes[0] == 0


HEADS = Heads(8, 2)
BOUNDS = Bounds(REQUESTS, REQUESTS * 5, LONGEST, 40_000)


def site_of(tile: TileConfig) -> Site:
    room = capacity(
        BOUNDS, rows=16, keys=32, num_kv_heads=2, group_size=4, num_ctas=70,
        smaller=smaller_roles(tile),
    )  # fmt: skip
    prices = RolePrices((900, 70), 40, 1, 1, LONGEST // 2) if tile.decode else None
    return Site.of(wl.Paged(PAGE), HEADS, tile, room, 66, prices)


TILES = {"one role": TileConfig(16, 32), "two roles": TileConfig(16, 32, decode=TileConfig(4, 64))}


@pytest.fixture(
    scope="module",
    params=[(mask, tile) for tile in TILES for mask in ("all", "causal", "window")],
    ids=", ".join,
)
def emulated(request: Any, tmp_path_factory: Any) -> Emulated:
    mask, tile = request.param
    variants = {"all": wl.Variant(), "causal": wl.Causal(), "window": wl.SlidingWindow(500)}
    return Emulated(variants[mask], site_of(TILES[tile]), tmp_path_factory.mktemp("planner"))


@pytest.mark.some(8)
@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize(("blocks", "threads"), [(1, 64), (3, 96), (2, 1024)])
def test_kernels_write_the_plans_of_the_host(
    emulated: Emulated, blocks: int, threads: int, order: int
) -> None:
    rng = np.random.default_rng(threads)
    for size, rows in ((0, 1), (1, 1), (3, 5), (40, 1), (REQUESTS, 1), (REQUESTS, 5)):
        for kind in ("equal", "even", "giants")[-1 if threads == 1024 else 0 :]:
            kv_lens = {
                "equal": np.full(size, 700),
                "even": rng.integers(0, 900, size),
                "giants": np.where(rng.random(size) < 0.1, LONGEST, rng.integers(0, 70, size)),
            }[kind]
            q_lens = rng.integers(0, rows + 1, size) if rows > 1 else np.ones(size, int)
            arguments = paged(q_lens, kv_lens, rng)
            batch = emulated.native.measure(Arguments(*arguments), emulated.site.room.bounds)
            assert batch is not None
            expected, found = (
                np.full(emulated.site.room.total_ints, -7, np.int32) for _ in range(2)
            )
            emulated.native.plan(emulated.inputs, emulated.site, expected.ctypes.data)
            grid = blocks, threads, order
            emulated.plan(batch.lengths, found.ctypes.data, grid)
            assert np.array_equal(found, expected)


def test_kernels_refuse_what_passes_the_bounds(emulated: Emulated) -> None:
    rng = np.random.default_rng(0)
    arguments = paged(np.ones(2, int), np.array([LONGEST + 1, 5]), rng)
    batch = emulated.native.measure(Arguments(*arguments), None)
    assert batch is not None
    found = np.full(emulated.site.room.total_ints, -7, np.int32)
    emulated.plan(batch.lengths, found.ctypes.data, (2, 64, 0))
    assert found[:5].tolist() == [0, 0, 0, 0, 10]
    indptr = emulated.site.room.offsets["cta_indptr"]
    assert not found[indptr : indptr + emulated.site.room.num_lists + 1].any()


@pytest.mark.parametrize("threads", [32, 64])  # fewer than requests, and more
def test_kernels_name_the_mistake_that_others_follow_from(emulated: Emulated, threads: int) -> None:
    """Ends that decrease make a request too long, which is what bounds would speak of."""
    good = paged(np.ones(40, int), np.full(40, PAGE), np.random.default_rng(0))
    for status, changes in (
        (1, {("qo", 0): 2}), (2, {("qo", 1): 10_000}), (3, {("kv", 0): 2}),
        (4, {("kv", 1): 50_000}), (7, {("last", 5): 17}),
        (4, {("last", 5): 17, ("kv", 30): 50_000}),
    ):  # fmt: skip
        arguments = [array.copy() for array in good]
        batch = emulated.native.measure(Arguments(*arguments), None)
        assert batch is not None
        for (name, at), value in changes.items():
            arguments[("qo", "kv", "indices", "last").index(name)][at] = value
        found = np.full(emulated.site.room.total_ints, -7, np.int32)
        emulated.plan(batch.lengths, found.ctypes.data, (2, threads, 0))
        assert found[4] == status, changes


def test_kernels_refuse_lists_without_requests_that_begin_elsewhere(emulated: Emulated) -> None:
    empty, last = np.zeros(0, np.int32), np.zeros(0, np.int32)
    for starts, status in (((0, 0), 0), ((3, 0), 1), ((0, 5), 3), ((3, 5), 1)):
        qo, kv = (np.zeros(1, np.int32) for _ in range(2))
        batch = emulated.native.measure(Arguments(qo, kv, empty, last), None)
        assert batch is not None
        qo[0], kv[0] = starts
        found = np.full(emulated.site.room.total_ints, -7, np.int32)
        emulated.plan(batch.lengths, found.ctypes.data, (2, 64, 0))
        assert found[:5].tolist() == [0, 0, 0, 0, status]


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("shift", [0, 1])  # lists that begin where vectors may not
@pytest.mark.parametrize("rows", [0, 1])  # without rows, there is no work
def test_kernels_refuse_negative_pages(
    emulated: Emulated, blocks: int, shift: int, rows: int
) -> None:
    rng = np.random.default_rng(0)
    last_of_vectors, last_of_all, behind = 27, 29, 30
    for at in (0, last_of_vectors, last_of_vectors + 1, last_of_all, behind):
        qo, kv, pages, last = paged(np.full(3, rows), np.array([10 * PAGE] * 3), rng)
        pages = np.concatenate((np.zeros(8, np.int32), pages, np.zeros(1, np.int32)))
        begin = (-pages.ctypes.data // 4) % 4 + shift
        pages[begin : begin + 30] = pages[8:38]
        batch = emulated.native.measure(Arguments(qo, kv, pages[begin : begin + 31], last), None)
        assert batch is not None
        pages[begin + at] = -1
        found = np.full(emulated.site.room.total_ints, -7, np.int32)
        emulated.plan(batch.lengths, found.ctypes.data, (blocks, 64, 0))
        is_refused = at < behind
        assert found[4] == (6 if is_refused else 0)
        assert (found[0] > 0) == (rows > 0 and not is_refused)
        assert found[1] == (0 if is_refused else 3)


def paged(q_lens: Any, kv_lens: Any, rng: Any) -> tuple[Any, ...]:
    pages = -(-kv_lens // PAGE)
    parts = (
        np.append(0, np.cumsum(q_lens)),
        np.append(0, np.cumsum(pages)),
        rng.permutation(int(pages.sum())),
        np.where(kv_lens > 0, (kv_lens - 1) % PAGE + 1, 0),
    )
    return tuple(part.astype(np.int32) for part in parts)
