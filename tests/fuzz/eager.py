"""FlexAttention's functions as torch itself evaluates them, its floats in double precision."""

import torch
from torch.overrides import TorchFunctionMode

from fuzz.reference import Noise, moved, of_function, r

# Functions that give one of the numbers they are given, or what any float holds.
KEPT = "neg abs where getitem index clamp clip min max minimum maximum masked_fill sign round trunc"
KEPT += " floor ceil relu expand contiguous zeros_like full_like"
EXACT_IF_SHORT = "add radd sub rsub mul rmul div truediv rtruediv rdiv divide double float to"
KEPT, EXACT_IF_SHORT = KEPT.split(), EXACT_IF_SHORT.split()
CANCELLING = ("lerp", "gelu")  # off by as much as what they add up, and not as their result


class Rounding(TorchFunctionMode):
    """Results of float functions are those of kernels: rounded under noise, exact without."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(function, "__name__", "").strip("_")
        if name == "float" or (name == "to" and torch.float32 in args):
            return r(args[0].double())
        if Noise.places is not None and (name in CANCELLING or "alpha" in kwargs):
            args = [shaken(x) for x in args]
        found = function(*args, **kwargs)
        if not torch.is_tensor(found) or found.dtype != torch.float64 or name in KEPT:
            return found
        return r(found) if name in EXACT_IF_SHORT else of_function(found, name)


def shaken(x):
    is_float = torch.is_tensor(x) and x.dtype == torch.float64
    return moved(x, Noise.places) if is_float else x


def flex_functor(function, has_score):
    """A function of the reference out of a `score_mod` or `mask_mod`."""

    def run(*given):
        at = given[-2]
        places = [at[n].int() for n in ("batch", "q_head", "q_idx", "kv_pos")]
        places = torch.broadcast_tensors(*places)  # as torch says it of numbers: all of one shape
        torch.set_default_dtype(torch.float64)
        try:
            with Rounding():
                return function(*given[:has_score], *places)
        finally:
            torch.set_default_dtype(torch.float32)

    return run
