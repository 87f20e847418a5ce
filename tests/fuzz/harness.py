"""Runs one spec: builds its batches, asks warploom and the reference, and compares."""

import math

import numpy as np
import torch

import warploom as wl
from fuzz.batches import Batch, draw_input, exact, gapped
from fuzz.eager import flex_functor
from fuzz.reference import attention_of, language, noise, num
from warploom.codegen.tiles import every_tile
from warploom.codegen.tiles_single import single_row_obstacle, single_tile
from warploom.dsl.trace import trace
from warploom.runtime.declare import make_spec
from warploom.runtime.device import cuda_facts

NOISES = ((4.0, 1), (4.0, 2), (16.0, 3))  # last places, seed
DOUBTS = tuple((4.0 + 12.0 * (seed % 2), seed) for seed in range(4, 28))  # more, for wrong rows
MARGIN = 3.0  # times what noise alone does
ILL = 0.03  # a row that noise moves by this much of its size says nothing, and is counted


class Mismatch(Exception):
    """warploom's result is not the reference's."""


def kv_format(spec):
    name, *rest = spec["format"]
    if name == "rolling":
        return wl.Rolling(*rest[:2], positions=rest[2], layout=spec["layout"])
    made = {"ragged": wl.Ragged, "dense": wl.Dense, "paged": wl.Paged, "composed": wl.Composed,
            "selection": wl.Paged, "block_sparse": wl.BlockSparse}[name]  # fmt: skip
    args = [tuple(rest)] if name == "block_sparse" else rest[:1]
    return made(*args, layout=spec["layout"])


def declared(spec):
    """Bounds of all batches together, as options of a wrapper."""
    if spec["bounds"] is None:
        return {}
    name, *sizes = spec["format"]
    rows, keys, blocks, segments = [], [], [1], [1]
    for batch in spec["batches"]:
        rows.append(sum(q for q, _ in batch))
        keys += [k for _, k in batch]
        if name == "paged":
            blocks.append(sum(-(-k // sizes[0]) for _, k in batch))
        elif name == "rolling":
            blocks.append(sum(min(k, sizes[0] + sizes[1]) for _, k in batch))
        elif name == "block_sparse":
            blocks.append(sum(-(-q // sizes[0]) * -(-k // sizes[1]) for q, k in batch))
            segments.append(sum(-(-q // sizes[0]) for q, _ in batch))
            keys += [-(-k // sizes[1]) * sizes[1] for _, k in batch]
    most = {} if name == "ragged" else {"max_blocks": max(blocks)}
    if name == "block_sparse":
        most["max_segments"] = max(segments)
    requests = max(1, *(len(batch) for batch in spec["batches"]), 1)
    bounds = wl.Bounds(requests, max(1, *rows, 1), max(1, *keys, 1), **most)
    return {"bounds": bounds, "cuda_graph": spec["bounds"] == "cuda_graph"}


def wrapper(spec, variant):
    made = wl.PageSelectionWrapper if spec["format"][0] == "selection" else wl.AttentionWrapper
    return made(
        variant, kv_format=kv_format(spec), num_q_heads=spec["heads"][0],
        num_kv_heads=spec["heads"][1], head_dim=spec["dims"][0], head_dim_v=spec["dims"][1],
        dtype=spec["dtype"], kv_dtype=spec["kv_dtype"], device=spec["device"],
        sm_scale=spec["sm_scale"], lse_base=spec["lse_base"], tile=chosen_tile(spec, variant),
        **declared(spec), **spec["options"],
    )  # fmt: skip


def declared_spec(spec, variant):
    """What warploom compiles a kernel for."""
    d, dv = spec["dims"]
    device = torch.device(spec["device"])
    stored = kv_format(spec)
    return make_spec(trace(variant), d, dv, spec["dtype"], stored, device, spec["kv_dtype"])


def chosen_tile(spec, variant, arch=None):
    """The tile that the case asks for, of those that fit; None leaves the choice to warploom."""
    if spec["tile"] is None:
        return None
    of = declared_spec(spec, variant)
    template, number = spec["tile"]
    tiles = [] if single_row_obstacle(of) else [single_tile(of)]
    tiles += every_tile(of, arch or cuda_facts(torch.cuda.current_device()).arch)
    tiles = [tile for tile in tiles if template in ("any", tile.template)]
    return tiles[number % len(tiles)] if tiles else None


def answer(spec, batch, variant, made, inputs):
    """What warploom says: output [rows, heads, dim_v] and log-sum-exp [rows, heads], float64."""
    if spec["format"][0] == "dense":
        shape = (len(batch.lengths), -1 if batch.lengths[0][0] else 0, batch.hq, batch.d)
        q = batch.given(batch.q.view(shape))
        lens = np.array(batch.keys, np.int32)
        o, lse = wl.attention(
            q, *batch.kv, variant=variant, sm_scale=spec["sm_scale"], return_lse=True,
            layout=spec["layout"], lse_base=spec["lse_base"], kv_lens=lens, **inputs,
        )  # fmt: skip
        if spec["layout"] == "HND":
            o, lse = o.transpose(1, 2), lse.transpose(1, 2)
        o, lse = o.flatten(0, 1), lse.flatten(0, 1)
    else:
        lists = [indices(spec, batch, x) for x in batch.positional]
        named = {name: indices(spec, batch, x) for name, x in batch.plan.items()}
        made.plan(*lists, **named, **inputs)
        q = gapped(batch.q.to(batch.device), spec["strided"])
        results = {}
        if spec["out"]:
            results["out"] = torch.full(
                (len(q), batch.hq, batch.dv), 9.0, dtype=q.dtype, device=q.device
            )
            results["lse"] = torch.full((len(q), batch.hq), 9.0, device=q.device)
        o, lse = made.run(q, batch.kv, return_lse=True, **results)
        if spec["out"] and o.data_ptr() != results["out"].data_ptr():
            raise Mismatch("run did not return the tensor given as out")
    factor = math.log(2.0) if spec["lse_base"] == "2" else 1.0
    return o.cpu().double(), lse.cpu().double() * factor


def indices(spec, batch, array):
    """An index array where the case has it."""
    if spec["indices"] == "numpy" or torch.is_tensor(array):
        return array
    tensor = torch.from_numpy(array)
    return tensor.to(batch.device) if spec["indices"] == "device" else tensor


def expected(spec, batch, functors, inputs, noises=NOISES):
    """By request the reference, and how far noise moves it: (o, lse, their spreads)."""
    options = (spec["softmax"], spec["sm_scale"] or spec["dims"][0] ** -0.5, inputs, batch.dtype)
    for request in batch.requests():
        o, lse = attention_of(request, functors, *options)
        spreads = torch.zeros(o.shape[:2], dtype=o.dtype), torch.zeros_like(lse)
        for places, seed in noises:
            with noise(places, seed, fast=spec["device"] != "cpu"):
                found = attention_of(request, functors, *options)
            moves = (found[0] - o).abs().amax(-1), (found[1] - lse).abs()
            same = found[1] == lse
            moves = (moves[0], torch.where(same, 0.0, moves[1]))
            spreads = tuple(
                torch.fmax(a, b.nan_to_num(torch.inf)) for a, b in zip(spreads, moves, strict=False)
            )
        yield o.transpose(0, 1), lse.T, spreads[0].T, spreads[1].T


def compare(spec, batch, got, parts):
    """Raise Mismatch where an element is further off than noise explains; else what was seen."""
    o, lse, spread, spread_lse = (torch.cat(x) for x in zip(*parts, strict=False))
    size = o.abs().amax(-1) if o.numel() else torch.zeros(o.shape[:2])
    eps = torch.finfo(batch.dtype).eps
    seat = 2e-3 if spec["device"] != "cpu" else 0.0  # fast tanh of GPUs: 2^-11 of its value
    typical = spread[spread.isfinite()].median() if spread.isfinite().any() else 0.0
    ill = ~(spread <= ILL * (1e-3 + size)) | ~o.isfinite().all(-1) | ~(spread_lse < 0.1)
    ill |= size > (6e4 if spec["dtype"] == "float16" else 1e37)
    bound = MARGIN * spread + 2 * typical + (eps + 4e-6 + seat) * size + 1e-6
    off = (got[0] - o).abs().amax(-1) if o.numel() else torch.zeros(o.shape[:2])
    weights = 1e-5 if spec["dtype"] == "float32" else 2e-4  # 16-bit kernels weigh to 1e-4
    bound_lse = MARGIN * spread_lse + (weights + seat) * (1 + lse.abs().nan_to_num(0, 0, 0))
    off_lse = torch.where(got[1] == lse, 0.0, (got[1] - lse).abs())
    wrong = (~(off <= bound) | ~(off_lse <= bound_lse)) & ~ill
    if wrong.any():
        row, head = wrong.nonzero()[0].tolist()
        raise Mismatch(
            f"{int(wrong.sum())} of {wrong.numel()} rows are wrong; first row {row}, head {head}: "
            f"off by {float(off[row, head]):.3g}, bound {float(bound[row, head]):.3g}, "
            f"lse {float(got[1][row, head]):.6g} instead of {float(lse[row, head]):.6g}"
        )
    return {"rows": wrong.numel(), "ill": int(ill.sum())}


def prepare(spec, batch):
    """The variant, its inputs by name, and the functors and inputs of the reference."""
    found = {}
    generator = torch.Generator().manual_seed(spec["seed"] + 1)
    for name, field in spec["fields"].items():
        is_tensor = field["roles"] is not None
        found[name] = draw_input(field, batch.sizes, generator) if is_tensor else field["value"]
    of_reference = {
        n: exact(x) if torch.is_tensor(x) else number_of(spec, n, x) for n, x in found.items()
    }
    space = {"wl": wl, "torch": torch}
    given = {n: x.to(batch.device) if torch.is_tensor(x) else x for n, x in found.items()}
    if spec["front"] == "flex":
        space.update(given)
    run_text(spec["variant"], space)
    spoken, mods = language(), {"torch": torch}
    if spec["front"] == "flex":
        for n, x in found.items():
            spoken[n] = x.double() if x.dtype.is_floating_point else x
        mods |= {n: spoken[n] for n in found}
        run_text(spec["variant"].partition("VARIANT =")[0], mods)
        given = {}
    run_text(spec["reference"], spoken)
    functors = {
        seat: [flex_functor(mods[x], x == "score_mod") if isinstance(x, str) else x for x in listed]
        for seat, listed in spoken["FUNCTORS"].items()
    }
    return space["VARIANT"], given, functors, of_reference


def number_of(spec, name, value):
    if "float" not in spec["fields"][name]["dtype"]:
        return num(bool(value) if spec["fields"][name]["dtype"] == "bool" else int(value))
    return torch.tensor(value).to(getattr(torch, spec["fields"][name]["dtype"])).double()


def run_text(text, space):
    exec(compile(text, "<variant>", "exec"), space)


def check(spec):
    """Run a spec on all of its batches.

    Returns:
        How many rows were compared, and how many of them were too ill-conditioned to say anything.

    Raises:
        Mismatch: a wrong result.
        and whatever warploom raises.
    """
    torch.set_num_threads(1)  # the reference's; warploom's are WARPLOOM_THREADS
    seen, made = {"rows": 0, "ill": 0}, None
    for i, lengths in enumerate(spec["batches"]):
        batch = Batch(spec, [tuple(x) for x in lengths], spec["seed"] * 31 + i)
        variant, inputs, functors, of_reference = prepare(spec, batch)
        if made is None and spec["format"][0] != "dense":
            made = wrapper(spec, variant)
        if spec["front"] == "flex" and i:
            made = wrapper(spec, variant) if made is not None else None
        got = answer(spec, batch, variant, made, inputs)
        try:
            parts = list(expected(spec, batch, functors, of_reference))
            counted = compare(spec, batch, got, parts)
        except Mismatch:  # rows near a jump move in some draws only: is it one of those?
            parts = list(expected(spec, batch, functors, of_reference, DOUBTS))
            counted = compare(spec, batch, got, parts)
        seen = {name: seen[name] + counted[name] for name in seen}
    return seen
