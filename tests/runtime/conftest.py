"""A CPU kernel run on a batch of any KV format, from spec to output, without the wrappers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.emulator import Driver, Emulator
from support.problems import plan_of

from warploom.codegen.attention.templates import render_cpu
from warploom.codegen.build import build
from warploom.codegen.compilers.hostcc import HostTarget, host_target
from warploom.codegen.source import TileConfig
from warploom.dsl.masks.intervals import TileAnalysis
from warploom.dsl.reference import naive_attention, reference_attention
from warploom.dsl.types.dtypes import dtype
from warploom.dsl.types.formats import BlockSparse, Dense, KVFormat, Paged, Ragged
from warploom.dsl.types.rounding import assert_close
from warploom.dsl.types.spec import AttentionSpec
from warploom.dsl.variants.trace import trace
from warploom.dsl.variants.variant import Variant
from warploom.errors import NoHostCompiler
from warploom.runtime.devices.cpu import CpuKernel
from warploom.runtime.devices.params import STRIDES, ParamBlock
from warploom.runtime.formats import HostBatch, make_batch
from warploom.runtime.launching import tensor_map
from warploom.runtime.launching.kernels import Kernels
from warploom.runtime.planning.visibility import Heads, make_visibility
from warploom.scheduler.model.layout import c_structs

PAD = 8  # elements behind each row: NaN around inputs, and a mark around outputs
MARK = 7.0


@dataclass(frozen=True)
class Case:
    """What to run. Lengths are one entry per request."""

    variant: Variant
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    dtype: str = "bfloat16"
    head_dim: int = 64
    head_dim_v: int = 0  # as head_dim
    num_q_heads: int = 4
    num_kv_heads: int = 2
    kv_format: KVFormat = field(default_factory=Ragged)
    tile: TileConfig = field(default_factory=lambda: TileConfig(24, 64, 1, 1))
    num_ctas: int = 3
    split_size: int | None = None
    seed: int = 0


@dataclass
class Outcome:
    """Results of all requests, and what the kernel must have left behind."""

    o: list[np.ndarray[Any, Any]]
    lse: list[np.ndarray[Any, Any]]
    raw: torch.Tensor
    plan: Any


class CpuRun:
    """The tensors, the plan and the parameters of a case; `launch` may be called repeatedly."""

    def __init__(self, case: Case, target: HostTarget) -> None:
        self.case = case
        self.dim_v = case.head_dim_v or case.head_dim
        self.rng = np.random.default_rng(case.seed)
        traced = trace(case.variant)
        self.spec = AttentionSpec(
            traced, case.head_dim, self.dim_v, dtype(case.dtype), case.kv_format
        )
        source = render_cpu(self.spec, case.tile, c_structs())
        self.kernel = CpuKernel(source.name, build(source, target))
        self.torch_dtype = getattr(torch, case.dtype)
        self._make_queries()
        self._make_keys()
        inputs = {name: np.asarray(value) for name, value in case.variant.inputs().items()}
        numbers = {name: x.item() for name, x in inputs.items() if x.ndim == 0}
        self._make_plan(TileAnalysis(traced, numbers, inputs))
        self._fill_params(inputs)

    def _random(self, *shape: int) -> torch.Tensor:
        """Numbers with NaN between rows, which must never be read."""
        data = torch.from_numpy(self.rng.standard_normal(shape, dtype=np.float32))
        padded = torch.full((*shape[:-1], shape[-1] + PAD), float("nan"))
        padded[..., : shape[-1]] = data
        return padded.to(self.torch_dtype)[..., : shape[-1]]

    def _make_queries(self) -> None:
        case, rows = self.case, sum(self.case.q_lens)
        self.q = self._random(rows, case.num_q_heads, case.head_dim)
        self.raw = torch.full((rows, case.num_q_heads, self.dim_v + PAD), MARK).to(self.torch_dtype)
        self.o = self.raw[..., : self.dim_v]
        self.lse = torch.full((rows, case.num_q_heads), MARK)

    def _make_keys(self) -> None:
        case, fmt = self.case, self.case.kv_format
        dims = (case.head_dim, self.dim_v)
        qo = np.cumsum([0, *case.q_lens]).astype(np.int32)
        tokens = np.cumsum([0, *case.kv_lens]).astype(np.int32)
        heads = case.num_kv_heads
        lists = [self._random(int(tokens[-1]), heads, dim) for dim in dims]
        self.keys, self.values = ([x[a:b] for a, b in _pairs(tokens)] for x in lists)
        self.positions = [np.arange(n) for n in case.kv_lens]
        if isinstance(fmt, Paged):
            self.batch = self._make_pages(qo, fmt)
            return
        self.stored = lists
        if isinstance(fmt, BlockSparse):
            self.batch = self._make_blocks(qo, fmt)
        elif isinstance(fmt, Dense):
            longest = max(case.kv_lens)
            self.stored = [
                torch.full((len(case.kv_lens), longest, heads, dim), float("nan")).to(x.dtype)
                for x, dim in zip(lists, dims, strict=True)
            ]
            for b, (first, last) in enumerate(_pairs(tokens)):
                for whole, x in zip(self.stored, lists, strict=True):
                    whole[b, : last - first] = x[first:last]
            self.batch = make_batch(fmt, qo, tokens)
        else:
            self.batch = make_batch(fmt, qo, tokens)

    def _make_pages(self, qo: np.ndarray[Any, Any], fmt: Paged) -> HostBatch:
        case, size = self.case, fmt.page_size
        counts = [-(-n // size) for n in case.kv_lens]
        indptr = np.cumsum([0, *counts]).astype(np.int32)
        pages = self.rng.permutation(int(indptr[-1]) + 3)[: indptr[-1]].astype(np.int32)
        shape = (int(indptr[-1]) + 3, size, case.num_kv_heads)
        self.stored = [
            torch.full((*shape, dim), float("nan")).to(self.torch_dtype)
            for dim in (case.head_dim, self.dim_v)
        ]
        for b, (first, last) in enumerate(_pairs(indptr)):
            for cache, rows in zip(self.stored, (self.keys[b], self.values[b]), strict=True):
                for i, page in enumerate(pages[first:last]):
                    part = rows[i * size : (i + 1) * size]
                    cache[page, : len(part)] = part
        if fmt.layout == "HND":  # another order in memory, the same order of axes
            self.stored = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in self.stored]
        last_page = [(n - 1) % size + 1 if n else 0 for n in case.kv_lens]
        return make_batch(fmt, qo, indptr, pages, np.array(last_page, np.int32))

    def _make_blocks(self, qo: np.ndarray[Any, Any], fmt: BlockSparse) -> HostBatch:
        rows, columns = fmt.block
        lists = [
            np.flatnonzero(self.rng.random(-(-kv // columns)) < 0.5)
            for q, kv in zip(self.case.q_lens, self.case.kv_lens, strict=True)
            for _ in range(-(-q // rows))
        ]
        self.block_lists = lists
        indptr = np.cumsum([0, *map(len, lists)]).astype(np.int32)
        indices = np.concatenate([*lists, np.zeros(0)]).astype(np.int32)
        kv_lens = np.array(self.case.kv_lens, np.int32)
        return make_batch(fmt, qo, indptr, indices, kv_lens=kv_lens)

    def _make_plan(self, analysis: TileAnalysis) -> None:
        case, fmt = self.case, self.case.kv_format
        heads = Heads(case.num_q_heads, case.num_kv_heads)
        columns = fmt.block_kv if fmt.column_positions else 0
        batch = self.batch.arrays
        self.plan = plan_of(
            self.batch.segments,
            num_kv_heads=case.num_kv_heads,
            group_size=heads.group_size,
            rows=case.tile.rows,
            keys=case.tile.keys,
            num_ctas=case.num_ctas,
            visibility=make_visibility(self.spec.variant, analysis, batch, heads, columns),
            split_size=case.split_size,
            indices=self.batch.indices,
        )
        slot_rows = self.plan.num_slots * case.tile.rows
        self.partial_o = np.full((slot_rows, self.dim_v), np.nan, np.float32)
        self.partial_state = np.full(2 * slot_rows, np.nan, np.float32)
        self.arrivals = np.zeros(len(self.plan.merges), np.uint32)

    def _fill_params(self, inputs: Mapping[str, np.ndarray[Any, Any]]) -> None:
        case, plan = self.case, self.plan
        self.params = ParamBlock(self.spec)
        k, v = self.stored
        self.params.set_pointers(*(x.data_ptr() for x in (self.q, k, v, self.o, self.lse)))
        strides = {f"{name}_batch_stride": 0 for name in ("q", "o", "lse")}
        for name, x in (("q", self.q), ("o", self.o), ("lse", self.lse)):
            if isinstance(case.kv_format, Dense):
                strides[f"{name}_batch_stride"] = case.q_lens[0] * x.stride(0)
            strides |= {f"{name}_row_stride": x.stride(0), f"{name}_head_stride": x.stride(1)}
        for name, x in (("k", k), ("v", v)):
            block = x.stride(0) if x.dim() == 4 else case.kv_format.block_kv * x.stride(0)
            strides |= {f"{name}_block_stride": block, f"{name}_token_stride": x.stride(-3)}
            strides[f"{name}_head_stride"] = x.stride(-2)
        self.params.set_strides(tuple(strides[name] for name in STRIDES))
        arrays = {"partial_o": self.partial_o, "partial_state": self.partial_state}
        self.kept = {**plan.sections(), **arrays, "arrivals": self.arrivals}
        for name, array in self.kept.items():
            self.params.set(name, array.ctypes.data)
        group = case.num_q_heads // case.num_kv_heads
        numbers = {"num_q_heads": case.num_q_heads, "num_kv_heads": case.num_kv_heads}
        numbers |= {"group_size": group, "sm_scale": case.head_dim**-0.5, "lse_scale": 1.0}
        for name, number in numbers.items():
            self.params.set(name, number)
        for scalar in self.spec.variant.scalars:
            given = inputs.get(scalar.name, scalar.default)
            self.params.set(f"x_{scalar.name}", np.asarray(given).item())
        for tensor in self.spec.variant.tensors:
            value = np.ascontiguousarray(inputs[tensor.name], tensor.dtype.name)
            self.kept[f"x_{tensor.name}"] = value
            self.params.set(f"x_{tensor.name}", value.ctypes.data)
            for axis, size in enumerate(value.shape):
                self.params.set(f"x_{tensor.name}_n{axis}", size)
                self.params.set(f"x_{tensor.name}_s{axis}", value.strides[axis] // value.itemsize)

    def launch(self, num_threads: int = 2) -> Outcome:
        self.kernel.launch(self.params, self.case.num_ctas, num_threads)
        assert not self.arrivals.any(), "counters must be zero between launches"
        assert (self.raw[..., self.dim_v :] == MARK).all(), "wrote behind a row"
        qo = np.cumsum([0, *self.case.q_lens])
        o, lse = self.o.float().numpy(), self.lse.numpy()
        return Outcome(
            [o[a:b].copy() for a, b in _pairs(qo)],
            [lse[a:b].copy() for a, b in _pairs(qo)],
            self.o.clone(),
            self.plan,
        )

    def check(self, outcome: Outcome) -> None:
        """Compare every request with the oracle."""
        case, qo = self.case, np.cumsum([0, *self.case.q_lens])
        block_rows = case.kv_format.block[0] if isinstance(case.kv_format, BlockSparse) else 10**9
        part = 0
        for b, q_len in enumerate(case.q_lens):
            for first in range(0, q_len, block_rows):
                last = min(first + block_rows, q_len)
                self._check_rows(outcome, b, int(qo[b]), first, last, part)
                part += 1

    def _check_rows(
        self, outcome: Outcome, b: int, q_row: int, first: int, last: int, part: int
    ) -> None:
        case, fmt = self.case, self.case.kv_format
        positions = np.arange(case.kv_lens[b])
        if isinstance(fmt, BlockSparse):
            width = fmt.block[1]
            positions = (self.block_lists[part][:, None] * width + np.arange(width)).reshape(-1)
            positions = positions[positions < case.kv_lens[b]]
        place = {
            "batch": b,
            "kv_positions": positions,
            "first_q_idx": first,
            "first_q_row": first if isinstance(fmt, Dense) else q_row + first,
            "q_len": case.q_lens[b],
            "kv_len": case.kv_lens[b],
        }
        q = self.q[q_row + first : q_row + last].float().numpy()
        k, v = (x[b].float().numpy()[positions] for x in (self.keys, self.values))
        o, lse = reference_attention(case.variant, q, k, v, **place)
        o_naive, lse_naive = naive_attention(case.variant, q, k, v, round_to=case.dtype, **place)
        assert_close(outcome.o[b][first:last], o, o_naive, case.dtype)
        assert_close(outcome.lse[b][first:last], lse, lse_naive, "float32", atol=2e-3)


def _pairs(indptr: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    return list(zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True))


@pytest.fixture(scope="session")
def host() -> HostTarget:
    """The host compiler; without one the test is skipped."""
    try:
        return host_target()
    except NoHostCompiler as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder for all tests: the one that was set, or one of this session."""
    given = os.environ.get("WARPLOOM_CACHE_DIR")
    return Path(given) if given else tmp_path_factory.mktemp("cache")


@pytest.fixture
def cpu_run(
    host: HostTarget, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., CpuRun]:
    """Makes a `CpuRun` from the fields of `Case`; `target` selects another compiler or machine."""
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(kernel_cache))

    def make(*args: Any, target: HostTarget | None = None, **fields: Any) -> CpuRun:
        return CpuRun(Case(*args, **fields), target or host)

    return make


@pytest.fixture
def emulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Emulator:
    """Kernels of the CPU are CUDA kernels, run by fibers."""
    emulator = Emulator(tmp_path)
    monkeypatch.setattr(Kernels, "get", lambda kernels, tile: emulator.get(kernels, tile))
    monkeypatch.setattr(tensor_map, "load_driver", Driver)
    return emulator
