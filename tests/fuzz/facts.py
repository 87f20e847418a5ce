"""Everything about a case but its functors: format, heads, types, options, lengths."""

from __future__ import annotations

from random import Random
from typing import Any

BORDERS = (0, 1, 2, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
FAR = (255, 256, 257, 383, 384, 385, 500)
FARTHEST = (511, 512, 513, 1023, 1025, 2048, 3000, 4096)  # on devices, with few rows
MOST_PAIRS = 2_000_000  # of a query row and a key, for all heads
FEW_ROWS = (1, 2, 17, 64, 65)
HEAD_DIMS = (8, 16, 24, 32, 40, 64, 64, 64, 72, 80, 96, 128, 128, 192, 256)
VALUE_DIMS = (8, 16, 48, 64, 72, 128, 256)
PAGES = (1, 1, 2, 3, 5, 7, 16, 16, 32, 64, 128)
NARROW = ("float8_e4m3fn", "float8_e5m2", "int8")
BOUNDED = ("ragged", "paged", "block_sparse")


def draw_facts(random: Random, device: str, flex: bool) -> dict[str, Any]:
    """The facts of a case; lists and plain values, as JSON has them."""
    kv_format, heads = _format(random), _heads(random)
    dims = [random.choice(HEAD_DIMS)] * 2
    if random.random() < 0.2:
        dims[1] = random.choice(VALUE_DIMS)
    is_cpu = device == "cpu"
    narrow = random.random() < 0.12 and (is_cpu or not (dims[0] % 16 or dims[1] % 16))
    dtypes = ("float32", "float32", "bfloat16", "float16") if is_cpu else ("bfloat16", "float16")
    bounded = kv_format[0] in BOUNDED and random.random() < 0.3
    softmax = flex or random.random() < 0.85
    return {
        "device": device,
        "front": "flex" if flex else "variant",
        "format": kv_format,
        "layout": random.choice(("NHD", "HND")),
        "heads": heads,
        "dims": dims,
        "dtype": random.choice(dtypes),
        "kv_dtype": random.choice(NARROW) if narrow else None,
        "sm_scale": random.choice((None, None, None, 0.5, 0.01, 30.0)),
        "q_size": random.choice((1.0, 1.0, 1.0, 20.0)),
        "softmax": softmax,
        "aux": _aux(random, softmax),
        "record_at": random.choice(("plan", "run")),
        "strided": random.random() < 0.25,
        "joined": random.random() < 0.5,
        "out": random.random() < 0.3,
        "lse_base": "2" if random.random() < 0.15 else "e",
        "options": _options(random, kv_format[0], device),
        "tile": None if is_cpu else _tile(random),
        "bounds": random.choice(("bounds", "cuda_graph")) if bounded else None,
        "indices": random.choice(("numpy", "torch") if is_cpu else ("numpy", "torch", "device")),
        "batches": _batches(random, device, kv_format[0], heads[0]),
        "threads": random.choice((1, 1, 2, 3)),
    }


def _format(random: Random) -> list[Any]:
    page = random.choice(PAGES)
    block = [random.choice((1, 2, 3, 16, 64, 70)), random.choice((1, 2, 8, 16, 33, 64))]
    share = [random.choice((1, 2, 4, 20)), random.choice((0, 0, 1, 3))]
    storage = [["dense"], ["ragged"], ["ragged"], ["paged", page], ["paged", page]]
    listed = [["composed", page, *share], ["block_sparse", *block], ["selection", page]]
    return random.choice([*storage, *listed])


def _aux(random: Random, softmax: bool) -> str | None:
    """What is asked for by `return_aux`, if it is; only scores of a softmax have maxima."""
    asked = ("lse", "max_scores", "both", "both") if softmax else ("lse",)
    return random.choice(asked) if random.random() < 0.4 else None


def later_format(seed: int, kv_format: list[Any]) -> list[Any]:
    """The format, or one that came later: from numbers of its own, so that seeds stay what they
    were.
    """
    random = Random(f"newer format {seed}")
    if kv_format[0] != "paged" or random.random() < 0.7:
        return kv_format
    window, sinks = random.choice((1, 2, 7, 16, 33, 64, 300)), random.choice((0, 0, 1, 4, 17))
    return ["rolling", window, sinks, random.choice(("sequence", "cache"))]


def later_tile(seed: int, facts: dict[str, Any]) -> list[Any] | None:
    """The tile, or two for two roles; from numbers of its own, too."""
    random = Random(f"newer tile {seed}")
    if facts["format"][0] == "dense" or random.random() < 0.75:
        found: list[Any] | None = facts["tile"]
        return found
    return ["roles", random.randrange(24)]


def _heads(random: Random) -> list[int]:
    hk, group = random.choice((1, 1, 2, 3, 4)), random.choice((1, 1, 2, 3, 4, 5, 7, 8, 16))
    return [hk * group, hk]


def _options(random: Random, name: str, device: str) -> dict[str, Any]:
    """Arguments of a wrapper; `attention` of dense tensors takes none of them."""
    options: dict[str, Any] = {}
    if name == "dense":
        return options
    if random.random() < 0.2:
        options["sm_limit"] = random.choice((1, 2, 3, 17))
    if name != "composed" and random.random() < 0.15:
        options["batch_invariant"] = True
    if device == "cpu" and random.random() < 0.06 and name != "selection":
        options = {"backend": "reference"}
    return options


def _tile(random: Random) -> list[Any] | None:
    """A template, and which of its tiles that fit; None leaves the choice to warploom."""
    if random.random() < 0.5:
        return None
    return [random.choice(("portable", "hopper", "any")), random.randrange(24)]


def _batches(random: Random, device: str, name: str, heads: int) -> list[list[list[int]]]:
    """(query rows, keys) of each request of each batch; compiles on devices are dear."""
    if device == "cpu":
        return [_lengths(random, name == "dense") for _ in range(random.choice((2, 3, 4)))]
    count = random.randint(6, 12)
    found = [_lengths(random, name == "dense") for _ in range(count)]
    if random.random() < 0.5:
        keys = [random.choice(FARTHEST) for _ in range(random.choice((1, 2, 5)))]
        few = random.choice(FEW_ROWS)
        dense = name == "dense"
        found[-1] = [[few if dense else random.choice((few, 1)), n] for n in keys]
    if name != "dense" and random.random() < 0.3:  # decoding of many
        found[0] = [[1, random.choice(BORDERS)] for _ in range(random.choice((9, 33, 60)))]
    return [_held(batch, heads, name == "dense") for batch in found]


def _held(batch: list[list[int]], heads: int, dense: bool) -> list[list[int]]:
    """A batch with fewer rows if the reference took too long."""
    most = [max(1, MOST_PAIRS // (heads * keys)) if keys else rows for rows, keys in batch]
    if dense:
        most = [min(most, default=0)] * len(batch)
    return [[min(rows, n), keys] for (rows, keys), n in zip(batch, most, strict=True)]


def _lengths(random: Random, dense: bool) -> list[list[int]]:
    far = random.random() < 0.2
    pool = (*BORDERS, *FAR) if far else BORDERS
    count = random.choice((1, 1, 2, 3)) if far else random.choice((1, 2, 3, 5))
    found = []
    for _ in range(count):
        keys = random.choice(pool) if random.random() < 0.8 else random.randint(0, 200)
        roll = random.random()
        rows = 1 if roll < 0.25 else keys if roll < 0.4 else random.choice(pool)
        found.append([rows, keys])
    if dense:
        found = [[max(1, found[0][0]), max(1, keys)] for _, keys in found]
    return found
