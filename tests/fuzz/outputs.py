"""Tensors that a case records values in, and what they should hold afterwards."""

import torch

from fuzz.batches import gapped

FILL = 77.0  # what was there before, which all types hold


def sizes_of_roles(spec, batch):
    """What each role of an input or output ranges over; with bounds, in any batch.

    Captured launches keep one tensor for all, and devices, which see no lengths, want what the
    bounds allow: all rows may be those of one request.
    """
    sizes = batch.sizes
    for lengths in spec["batches"] if spec["bounds"] else ():
        rows, keys = [q for q, _ in lengths], [k for _, k in lengths]
        longest = max([*keys, 1])
        least = {"batch": len(lengths), "q_pos": longest, "kv_pos": longest, "q_row": sum(rows),
                 "q_idx": max(sum(rows), 1)}  # fmt: skip
        sizes |= {role: max(size, sizes[role]) for role, size in least.items()}
    return sizes


def blank(spec, batch):
    """A tensor for each output, NumPy's where index arrays are."""
    found = {}
    sizes = sizes_of_roles(spec, batch)
    for name, output in spec["outputs"].items():
        shape, dtype = [sizes[role] for role in output["roles"]], output["dtype"]
        full = torch.full(shape, FILL, dtype=getattr(torch, dtype), device=batch.device)
        full = gapped(full, spec["strided"])
        is_numpy = spec["indices"] == "numpy" and spec["device"] == "cpu" and dtype != "bfloat16"
        found[name] = full.numpy() if is_numpy else full
    return found


def as_doubles(tensors):
    return {name: torch.as_tensor(x).cpu().double() for name, x in tensors.items()}


def should_hold(spec, batch, name, parts):
    """What an output should hold, and how far noise moves it; infinitely where it may be hidden."""
    roles = spec["outputs"][name]["roles"]
    sizes = sizes_of_roles(spec, batch)
    values = torch.full([sizes[role] for role in roles], FILL, dtype=torch.float64)
    spread = torch.zeros_like(values)
    for part in parts:
        shape = part["seen"].shape
        place = [part["at"][role].expand(shape) for role in roles]
        written = part["seen"] | part["doubtful"]
        for index, size in zip(place, values.shape, strict=True):
            written = written & (index >= 0) & (index < size)
        at = tuple(index[written] for index in place)
        values[at] = part["recorded"][name][written]
        moves = torch.where(part["doubtful"], torch.inf, part["spreads"][name])
        spread[at] = moves[written]
    return values, spread


def wrong_records(spec, name, got, values, spread, margin, hook):
    """Elements that are further off than noise explains, and all that were judged."""
    info = torch.finfo(getattr(torch, spec["outputs"][name]["dtype"]))
    off = torch.where(got == values, 0.0, (got - values).abs())
    known = spread[spread.isfinite() & (spread > 0)]
    typical = known.median() if known.numel() else 0.0
    bound = margin * spread + 2 * typical + (info.eps + 4e-6 + hook) * values.abs() + 1e-6
    ill = ~spread.isfinite() | ~values.isfinite() | (values.abs() > info.max / 2)
    bound = torch.where((values == FILL) & (spread == 0), 0.0, bound)  # hidden, or so by chance
    return ~(off <= bound) & ~ill
