"""The native planner measures a batch on the host by the rules for single requests."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import warploom as wl
from warploom.codegen.build import build
from warploom.codegen.compilers.hostcc import host_target
from warploom.codegen.planner_source import PlannerSpec
from warploom.dsl.variants.trace import trace
from warploom.runtime.strategies.planner_params import PlannerParams
from warploom.scheduler.model.layout import c_planning


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_batches_are_measured_by_the_rules_for_requests(data: st.DataObject) -> None:
    rules, params = request_rules()
    storage = data.draw(st.integers(0, 2), label="storage")
    requests = data.draw(st.integers(0, 20), label="requests")
    lists = [
        np.cumsum(
            [0, *data.draw(st.lists(st.integers(0, 3), min_size=requests, max_size=requests))]
        )
        for _ in range(2)
    ]
    if storage == 0:
        lists[0] = 2 * np.arange(requests + 1)
    last = np.array(data.draw(st.lists(st.integers(1, 4), min_size=requests, max_size=requests)))
    arrays = [x.astype(np.int32) for x in (*lists, last)]
    for name, wrong in (("a number", (-1, 0, 5, 9)), ("a large one", (2**30, 2**28))):
        if requests and data.draw(st.integers(0, 3), label=name) == 0:
            array = arrays[data.draw(st.integers(0, 2))]
            array[data.draw(st.integers(0, len(array) - 1))] = data.draw(st.sampled_from(wrong))
    params.write_lengths(*(x.ctypes.data for x in arrays), 0)
    params.write_batch(requests, *(data.draw(st.sampled_from((x, 2**31 - 1))) for x in (30, 9, 40)))
    for name, number in (("storage", storage), ("page_size", 4), ("group_size", 8)):
        params.set(name, number)
    found = (ctypes.c_int * 7)()
    good = rules.all_requests(params.address, None) == 0
    assert (rules.warploom_measure(params.address, found) == 0) is good
    if good:
        q_lens, blocks = np.diff(arrays[0]), np.diff(arrays[1])
        kv_lens = np.where(blocks > 0, blocks * 4 - 4 + arrays[2], 0) if storage == 2 else blocks
        total, longest_q, longest = q_lens.sum(), q_lens.max(initial=0), kv_lens.max(initial=0)
        rows, extent = longest_q if storage == 0 else total, (longest, blocks.sum(), 0)[storage]
        pages = blocks.sum() if storage == 2 else 0
        sizes = (q_lens > 0).sum(), rows, total, longest_q, longest, pages, extent
        assert list(found) == [int(x) for x in sizes]


@cache
def request_rules() -> tuple[Any, PlannerParams]:
    """A planner that also asks `Batch::check` about each request."""
    ask = """
    WL_ENTRY int all_requests(const warploom::Params* p, void*) {
      const warploom::Batch<warploom::Params> batch{*p};
      if (p->num_requests == 0) return int(batch.check_empty());
      for (int r = 0; r < p->num_requests; ++r) {
        if (batch.check(r) != warploom::PlanStatus::kGood) return int(batch.check(r));
      }
      return 0;
    }
    """
    source = PlannerSpec(trace(wl.Variant())).render("cpp", c_planning())
    artifact = build(replace(source, text=source.text + ask), host_target())
    library = ctypes.CDLL(str(artifact.path))
    for entry in (library.all_requests, library.warploom_measure):
        entry.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    return library, PlannerParams(trace(wl.Variant()))
