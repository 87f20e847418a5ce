"""CTAs on fibers: one after the other where that is asked for, else by turns, as if all at once."""

from __future__ import annotations

import ctypes

import pytest
from support.emulator import CTAS, compile_for_fibers

SEEDS = range(2, 40)
LISTS = 20

_KERNELS = f"""
constexpr int kCtas = {CTAS}, kThreads = 64, kLists = {LISTS};
static int counter, sum, parts[kCtas][kThreads];
static int memory[kThreads + 1];

template <class Kernel>
static bool launch(unsigned order, Kernel kernel) {{
  counter = sum = 0;
  std::memset(parts, 0, sizeof(parts));
  fibers::shared = {{{{reinterpret_cast<char*>(memory), sizeof(memory)}}}};
  return fibers::run(kCtas, kThreads, order, kernel);
}}

extern "C" bool note(unsigned order, int* events) {{
  return launch(order, [events] {{
    if (threadIdx.x == 0) events[counter++] = blockIdx.x;
    for (int i = 0; i < 20; ++i) __syncthreads();
    if (threadIdx.x == kThreads - 1) events[counter++] = kCtas + blockIdx.x;
  }});
}}

extern "C" bool claim(unsigned order, int* owners) {{
  return launch(order, [owners] {{
    while (true) {{
      if (threadIdx.x == 0) memory[0] = counter++;
      __syncthreads();
      const int list = memory[0];
      __syncthreads();
      if (list >= kLists) return;
      if (threadIdx.x == 0) owners[list] = blockIdx.x;
    }}
  }});
}}

extern "C" bool remember(unsigned order, int* wrong) {{
  return launch(order, [wrong] {{
    *wrong += memory[threadIdx.x] != -1;
    for (int i = 0; i < 50; ++i) {{
      memory[threadIdx.x] = 100 * blockIdx.x + i;
      __syncthreads();
      *wrong += memory[threadIdx.x ^ 33] != 100 * int(blockIdx.x) + i;
      __syncthreads();
    }}
  }});
}}

// Of a tile in parts: the CTA that comes last adds up what all have written, or are yet to write.
extern "C" bool merge(unsigned order, bool counts_first, int* found) {{
  const bool ends = launch(order, [=] {{
    if (counts_first && threadIdx.x == 0) memory[kThreads] = ++counter == kCtas;
    __syncthreads();
    parts[blockIdx.x][threadIdx.x] = 1;
    __syncthreads();
    if (!counts_first && threadIdx.x == 0) memory[kThreads] = ++counter == kCtas;
    __syncthreads();
    if (threadIdx.x != 0 || memory[kThreads] != 1) return;
    for (const auto& part : parts) {{
      for (const int one : part) sum += one;
    }}
  }});
  *found = sum;
  return ends;
}}

// How many CTAs have waited until all had come.
extern "C" bool meet(unsigned order, int* found) {{
  const bool ends = launch(order, [] {{
    __syncthreads();
    if (threadIdx.x != 0) return;
    ++counter;
    const long long begin = clock64();
    while (counter < kCtas) {{
      if (clock64() - begin > 1 << 18) return;
      __nanosleep(64);
    }}
    ++sum;
  }});
  *found = sum;
  return ends;
}}
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = compile_for_fibers(_KERNELS, tmp_path_factory.mktemp("ctas") / "ctas.cpp")
    for name in ("note", "claim", "remember", "merge", "meet"):
        library[name].restype = ctypes.c_bool
    library.merge.argtypes = ctypes.c_uint, ctypes.c_bool, ctypes.c_void_p
    return library


def noted(kernels: ctypes.CDLL, order: int) -> list[int]:
    """Numbers of CTAs as they begin, and as they end, CTAS behind those."""
    events = (ctypes.c_int * (2 * CTAS))()
    assert kernels.note(order, events)
    return list(events)


def test_ctas_follow_each_other_in_either_order(kernels: ctypes.CDLL) -> None:
    ascending = [event for block in range(CTAS) for event in (block, CTAS + block)]
    assert noted(kernels, 0) == ascending
    descending = [event for block in reversed(range(CTAS)) for event in (block, CTAS + block)]
    assert noted(kernels, 1) == descending


def test_in_random_orders_ctas_run_at_the_same_time(kernels: ctypes.CDLL) -> None:
    all_events = [noted(kernels, seed) for seed in SEEDS]
    assert all_events == [noted(kernels, seed) for seed in SEEDS]
    begins, ends = (
        [tuple(x % CTAS for x in events if (x >= CTAS) == is_end) for events in all_events]
        for is_end in (False, True)
    )
    for sequences in (begins, ends):
        assert all(sorted(sequence) == list(range(CTAS)) for sequence in sequences)
        assert len(set(sequences)) > len(SEEDS) / 2
        for place in (0, -1):
            assert {sequence[place] for sequence in sequences} == set(range(CTAS))
    assert sum(max(events[:2]) < CTAS for events in all_events) > len(SEEDS) / 2
    assert any(max(events[:CTAS]) < CTAS for events in all_events)  # all begin before one ends


def test_several_ctas_claim_where_one_would_take_all(kernels: ctypes.CDLL) -> None:
    owners = (ctypes.c_int * LISTS)()
    found = []
    for order in (0, 1, *SEEDS):
        assert kernels.claim(order, owners)
        found.append(set(owners))
    assert found[:2] == [{0}, {CTAS - 1}]
    assert set(range(CTAS)) in found
    assert sum(len(of_one) > 1 for of_one in found) > len(SEEDS) / 2


def test_each_cta_has_shared_memory_of_its_own(kernels: ctypes.CDLL) -> None:
    wrong = ctypes.c_int(0)
    for order in (0, 1, *SEEDS):
        assert kernels.remember(order, ctypes.byref(wrong))
        assert wrong.value == 0, order


def test_a_part_counted_before_it_is_written_is_missed(kernels: ctypes.CDLL) -> None:
    """A fault that shows where CTAs run at the same time alone."""

    def merged(order: int, counts_first: bool) -> int:
        found = ctypes.c_int()
        assert kernels.merge(order, counts_first, ctypes.byref(found))
        return found.value

    everything = CTAS * 64
    assert {merged(order, False) for order in (0, 1, *SEEDS)} == {everything}
    assert {merged(order, True) for order in (0, 1)} == {everything}
    assert min(merged(order, True) for order in SEEDS) < everything


def test_ctas_that_wait_for_others_may_meet_them(kernels: ctypes.CDLL) -> None:
    """Whoever waits long goes on without the others."""
    found = ctypes.c_int()
    counts = []
    for order in (0, 1, *SEEDS):
        assert kernels.meet(order, ctypes.byref(found))
        counts.append(found.value)
    assert counts[:2] == [1, 1]  # the last CTA
    assert CTAS in counts and min(counts[2:]) < CTAS
