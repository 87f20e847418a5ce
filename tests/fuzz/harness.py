"""Runs one spec: builds its batches, asks warploom and the reference, and compares."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import warploom as wl
from fuzz.attention import attention_of
from fuzz.batches import Batch, draw_input, exact, gapped
from fuzz.eager import flex_functor
from fuzz.outputs import as_doubles, blank, should_hold, sizes_of_roles, wrong_records
from fuzz.reference import language, noise, num
from warploom.codegen.attention.templates import SINGLE_ROW, STREAMED, template_of
from warploom.codegen.choice.tile_choice import every_tile
from warploom.dsl.variants.trace import trace
from warploom.runtime.declaring.declare import make_spec
from warploom.runtime.devices.device import cuda_facts

# Last places, seed. The first two round and move nothing, transformed vectors to float32 and to the
# type of the inputs (`Noise.narrow`): what lies half way between two numbers of 16 bits goes to the
# even one there, and all up or all down in the others.
NOISES = ((0.0, 0), (0.0, 1), (4.0, 1), (4.0, 2), (16.0, 3))
DOUBTS = *NOISES[:2], *((4.0 + 12.0 * (seed % 2), seed) for seed in range(4, 100))  # for wrong rows
MARGIN = 3.0  # times what noise alone does
# Of the CPU: decodes with fewer keys than prefills, as many, and more.
ROLES = [
    wl.TileConfig(48, 128, decode=wl.TileConfig(12, 64)),
    wl.TileConfig(12, 64, decode=wl.TileConfig(1, 64)),
    wl.TileConfig(24, 64, decode=wl.TileConfig(6, 256)),
]
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
    return made(variant, device=spec["device"], **arguments(spec, chosen_tile(spec, variant)))


def arguments(spec, tile) -> dict[str, Any]:
    """Those of a wrapper beside its variant and its device."""
    return dict(
        kv_format=kv_format(spec), num_q_heads=spec["heads"][0], num_kv_heads=spec["heads"][1],
        head_dim=spec["dims"][0], head_dim_v=spec["dims"][1], dtype=spec["dtype"],
        kv_dtype=spec["kv_dtype"], sm_scale=spec["sm_scale"], lse_base=spec["lse_base"],
        tile=tile, max_scores=spec["aux"] in ("max_scores", "both"), **declared(spec),
        **spec["options"],
    )  # fmt: skip


def declared_spec(spec, variant):
    """What warploom compiles a kernel for."""
    d, dv = spec["dims"]
    device = torch.device(spec["device"])
    stored = kv_format(spec)
    told = spec["aux"] in ("max_scores", "both")
    return make_spec(trace(variant), d, dv, spec["dtype"], stored, device, spec["kv_dtype"], told)


def chosen_tile(spec, variant, arch=None):
    """The tile that the case asks for, of those that fit; None leaves the choice to warploom."""
    if spec["tile"] is None:
        return None
    template, number = spec["tile"]
    if template == "roles" and spec["device"] == "cpu":
        return of_group(ROLES[number % len(ROLES)], spec)
    of = declared_spec(spec, variant)
    if template == "roles":
        tiles = roles_on_gpu(of, arch or cuda_facts(torch.cuda.current_device()).arch)
        return of_group(tiles[number % len(tiles)], spec) if tiles else None
    tiles = [] if SINGLE_ROW.obstacle(of) else [SINGLE_ROW.tile(of)]
    arch = arch or cuda_facts(torch.cuda.current_device()).arch
    tiles += every_tile(of, arch) + STREAMED.fitting(of, arch, OF_EIGHT_ROWS)
    tiles = [tile for tile in tiles if template in ("any", tile.template)]
    return tiles[number % len(tiles)] if tiles else None


def of_group(tile, spec):
    """The tile, without that for decodes where it holds no row of a group, which is refused."""
    hq, hk = spec["heads"]
    return replace(tile, decode=None) if tile.decode.rows < hq // hk else tile


OF_EIGHT_ROWS = [wl.TileConfig(8, 64, 2, 2), wl.TileConfig(8, 128, 4, 2)]  # nothing chooses them


def roles_on_gpu(of, arch):
    """Every tile that fits with one for decodes, in an order that mixes them."""
    found = []
    for tile, rows, warps in itertools.product(
        every_tile(of, arch), (16, 8), (1, 2, 3, 4, 5, 6, 7, 10)
    ):
        both = replace(tile, decode=wl.TileConfig(rows, 32 * warps, warps, 2))
        template = template_of(tile)
        can = template.takes_roles and template.obstacle(of, both) is None
        if can and template.launch(of, both, arch).shared_bytes <= arch.shared_per_cta:
            found.append(both)
    return found[::3] + found[1::3] + found[2::3]


def asked(spec):
    """How a call asks for what is beside the output."""
    if spec["aux"] is None:
        return {"return_lse": True}
    lse, tops = (spec["aux"] in (name, "both") for name in ("lse", "max_scores"))
    return {"return_aux": wl.AuxRequest(lse=lse, max_scores=tops)}


def unpacked(spec, result):
    """The output, and the log-sum-exp and the largest scores, None where none was asked for."""
    if spec["aux"] is None:
        return *result, None
    o, aux = result
    for name, tensor in zip(("lse", "max_scores"), (aux.lse, aux.max_scores), strict=True):
        if (tensor is not None) != (spec["aux"] in (name, "both")):
            raise Mismatch(f"{spec['aux']} was asked for, and {name} is {tensor}")
    return o, aux.lse, aux.max_scores


def answer_dense(spec, batch, variant, inputs, outputs):
    shape = (len(batch.lengths), -1 if batch.lengths[0][0] else 0, batch.hq, batch.d)
    lens = np.array(batch.keys, np.int32)
    found = unpacked(spec, wl.attention(
        batch.given(batch.q.view(shape)), *batch.kv, variant=variant, sm_scale=spec["sm_scale"],
        layout=spec["layout"], lse_base=spec["lse_base"], kv_lens=lens, **asked(spec), **inputs,
        **outputs,
    ))  # fmt: skip
    if spec["layout"] == "HND":
        found = [x if x is None else x.transpose(1, 2) for x in found]
    return [x if x is None else x.flatten(0, 1) for x in found]


def answer_planned(spec, batch, made, inputs, outputs):
    lists = [indices(spec, batch, x) for x in batch.positional]
    named = {name: indices(spec, batch, x) for name, x in batch.plan.items()}
    planned, given = (outputs if spec["record_at"] == name else {} for name in ("plan", "run"))
    if spec["bounds"] and spec["indices"] == "device" and spec["format"][0] in ("ragged", "paged"):
        named["q_rows"] = len(batch.q)  # a device that plans does not tell
    made.plan(*lists, **named, **inputs, **planned)
    q, results = gapped(batch.q.to(batch.device), spec["strided"]), {}
    if spec["out"]:
        shape = (len(batch.q), batch.hq)
        results["out"] = torch.full((*shape, batch.dv), 9.0, dtype=q.dtype, device=q.device)
        results["lse"] = torch.full(shape, 9.0, device=q.device)
        if spec["aux"] in ("max_scores", "both"):
            results["max_scores"] = torch.full(shape, 9.0, device=q.device)
    o, lse, tops = unpacked(spec, made.run(q, batch.kv, **asked(spec), **results, **given))
    if spec["out"]:
        lse = results["lse"] if lse is None else lse  # given, and so written
        for name, x in (("out", o), ("lse", lse), ("max_scores", tops)):
            if x is not None and x.data_ptr() != results[name].data_ptr():
                raise Mismatch(f"run did not return the tensor given as {name}")
    return o, lse, tops


def answer(spec, batch, variant, made, inputs):
    """What warploom says, float64, as `attention_of` but for the order of axes.

    Output [rows, heads, dim_v]; log-sum-exp and largest scores [rows, heads] or None; recorded
    tensors by name.
    """
    outputs = blank(spec, batch)
    if spec["format"][0] == "dense":
        found = answer_dense(spec, batch, variant, inputs, outputs)
    else:
        found = answer_planned(spec, batch, made, inputs, outputs)
    o, lse, tops = (x if x is None else x.cpu().double() for x in found)
    if lse is not None and spec["lse_base"] == "2":
        lse = lse * math.log(2.0)
    return {"o": o, "lse": lse, "tops": tops, "recorded": as_doubles(outputs)}


def indices(spec, batch, array):
    """An index array where the case has it."""
    if spec["indices"] == "numpy" or torch.is_tensor(array):
        return array
    tensor = torch.from_numpy(array)
    return tensor.to(batch.device) if spec["indices"] == "device" else tensor


def expected(spec, batch, functors, inputs, noises=NOISES):
    """By request the reference with rows first, how far noise moves each value, and `doubtful`."""
    options = (spec["softmax"], spec["sm_scale"] or spec["dims"][0] ** -0.5, inputs, batch.dtype)
    for request in batch.requests():
        part = attention_of(request, functors, *options)
        values = {"o": part["o"], "lse": part["lse"], "tops": part["tops"], **part["recorded"]}
        spreads = {name: torch.zeros_like(x) for name, x in values.items()}
        doubtful = torch.zeros_like(part["seen"])
        for places, seed in noises:
            with noise(places, seed, fast=spec["device"] != "cpu"):
                found = attention_of(request, functors, *options)
            doubtful |= found["seen"] != part["seen"]
            shaken = {**found, **found["recorded"]}
            for name, x in values.items():
                move = torch.where(shaken[name] == x, 0.0, (shaken[name] - x).abs())
                spreads[name] = torch.fmax(spreads[name], move.nan_to_num(torch.inf))
        spreads["o"] = spreads["o"].amax(-1) if spreads["o"].numel() else part["lse"] * 0
        rows_first = {name: spreads[name].T for name in ("o", "lse", "tops")}
        yield {**part, "o": part["o"].transpose(0, 1), "lse": part["lse"].T, "tops": part["tops"].T,
               "at": request["at"]["logits"], "doubtful": doubtful,
               "spreads": spreads | rows_first}  # fmt: skip


def compare(spec, batch, got, parts):
    """Raise Mismatch where an element is further off than noise explains; else what was seen."""
    hook = 2e-3 if spec["device"] != "cpu" else 0.0  # fast tanh of GPUs: 2^-11 of its value
    for name, tensor in got["recorded"].items():
        values, spread = should_hold(spec, batch, name, parts)
        wrong = wrong_records(spec, name, tensor, values, spread, MARGIN, hook)
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            raise Mismatch(
                f"{int(wrong.sum())} of {wrong.numel()} elements of {name} are wrong; {at} is "
                f"{float(tensor[at]):.7g} instead of {float(values[at]):.7g}, "
                f"spread {float(spread[at]):.3g}"
            )
    return compare_rows(spec, batch, got, parts, hook)


def compare_rows(spec, batch, got, parts, hook):
    o, lse, tops = (torch.cat([part[x] for part in parts]) for x in ("o", "lse", "tops"))
    spread, spread_lse, spread_tops = (
        torch.cat([part["spreads"][x] for part in parts]) for x in ("o", "lse", "tops")
    )
    size = o.abs().amax(-1) if o.numel() else torch.zeros(o.shape[:2])
    eps = torch.finfo(batch.dtype).eps
    typical = spread[spread.isfinite()].median() if spread.isfinite().any() else 0.0
    ill = ~(spread <= ILL * (1e-3 + size)) | ~o.isfinite().all(-1) | ~(spread_lse < 0.1)
    ill |= size > (6e4 if spec["dtype"] == "float16" else 1e37)
    off = {"o": (got["o"] - o).abs().amax(-1) if o.numel() else torch.zeros(o.shape[:2])}
    bound = {"o": MARGIN * spread + 2 * typical + (eps + 4e-6 + hook) * size + 1e-6}
    weights = 1e-5 if spec["dtype"] == "float32" else 2e-4  # 16-bit kernels weigh to 1e-4
    if got["lse"] is not None:
        off["lse"] = torch.where(got["lse"] == lse, 0.0, (got["lse"] - lse).abs())
        bound["lse"] = MARGIN * spread_lse + (weights + hook) * (1 + lse.abs().nan_to_num(0, 0, 0))
    wrong = torch.stack([~(off[name] <= bound[name]) for name in off]).any(0) & ~ill
    if got["tops"] is not None:
        off["tops"] = torch.where(got["tops"] == tops, 0.0, (got["tops"] - tops).abs())
        bound["tops"] = MARGIN * spread_tops + (4e-6 + hook) * (1 + tops.abs().nan_to_num(0, 0, 0))
        says_nothing = ~spread_tops.isfinite() | tops.isnan() | (tops.abs() > 1e37) & ~tops.isinf()
        wrong |= ~(off["tops"] <= bound["tops"]) & ~says_nothing
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        told = [f"{n} by {float(off[n][at]):.3g} of {float(bound[n][at]):.3g}" for n in off]
        instead = {"lse": lse, "tops": tops}
        told += [f"{n} {float(got[n][at]):.6g} instead of {float(instead[n][at]):.6g}"
                 for n in off if n != "o"]  # fmt: skip
        raise Mismatch(
            f"{int(wrong.sum())} of {wrong.numel()} rows are wrong; first row {at[0]}, "
            f"head {at[1]}: off are {', '.join(told)}"
        )
    return {"rows": wrong.numel(), "ill": int(ill.sum())}


def thawed(kept, inputs):
    """New values in the first plan's tensors, which captured launches keep."""
    for name, value in inputs.items():
        if torch.is_tensor(value):
            kept[name].copy_(value)
    return kept


def prepare(spec, batch):
    """The variant, its inputs by name, and the functors and inputs of the reference."""
    found = {}
    generator = torch.Generator().manual_seed(spec["seed"] + 1)
    sizes = sizes_of_roles(spec, batch)
    for name, field in spec["fields"].items():
        is_tensor = field["roles"] is not None
        found[name] = draw_input(field, sizes, generator) if is_tensor else field["value"]
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
        hook: [flex_functor(mods[x], x == "score_mod") if isinstance(x, str) else x for x in listed]
        for hook, listed in spoken["FUNCTORS"].items()
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
    seen, made, kept = {"rows": 0, "ill": 0}, None, None
    for i, lengths in enumerate(spec["batches"]):
        batch = Batch(spec, [tuple(x) for x in lengths], spec["seed"] * 31 + i)
        variant, inputs, functors, of_reference = prepare(spec, batch)
        if made is None and spec["format"][0] != "dense":
            made = wrapper(spec, variant)
        if spec["bounds"] == "cuda_graph":
            kept = inputs = inputs if kept is None else thawed(kept, inputs)
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
