"""Attention of one request in plain torch float64."""

import torch

from fuzz.reference import Noise, Recorded, f, moved, r

# Of such logits kernels take differences before they multiply: like ones weigh the same.
FAR = 2.0**21


def stored(x, dtype):
    """A vector as a kernel may keep it between two products: in the type of its inputs."""
    if Noise.places is None or dtype == torch.float32 or not Noise.narrow:
        return r(x)
    return x.to(dtype).double()


def transformed(request, functors, inputs, dtype):
    """q, and k and v repeated for its heads, as their transforms leave them."""
    q, k, v = (request[name].double() for name in "qkv")
    group, at = len(q) // max(len(k), 1), request["at"]
    for name, hook in (("q", "query"), ("k", "key"), ("v", "value")):
        for function in functors.get(f"{hook}_transform", ()):
            x = {"q": q, "k": k, "v": v}[name]
            x = f(function(x, at[hook], inputs)).expand(x.shape)
            q, k, v = (x if name == n else old for n, old in (("q", q), ("k", k), ("v", v)))
    if functors.get("query_transform"):
        q = stored(q, dtype)
    if functors.get("key_transform"):
        k = stored(k, dtype)
    if functors.get("value_transform"):
        v = stored(v, dtype)
    return q, *(x.repeat_interleave(group, 0) for x in (k, v))


def attention_of(request, functors, softmax, sm_scale, inputs, dtype):
    """Everything about one request, by name.

    Args:
        request: dict of q [heads, rows, dim], k and v [kv_heads, keys, dim], their positions, and
            `open`, bool [1 or heads, rows, keys]: what the format itself lets be seen.
        functors: lists of functions by hook, in the order of the chain.
        softmax, sm_scale, inputs, dtype: those of the case.

    Returns:
        o [heads, rows, dim]; lse and tops (the largest scores), [heads, rows]; seen, bool, and the
        recorded values by the names of their outputs, [heads, rows, keys]. Floats are float64.
    """
    q, k, v = transformed(request, functors, inputs, dtype)
    at, s = request["at"], q @ k.transpose(1, 2) * sm_scale
    if Noise.places is not None:
        reach = q.abs() @ k.transpose(1, 2).abs() * sm_scale
        s = s + (moved(reach, Noise.places) - reach)
    Recorded.values = {}
    for function in functors.get("logits_transform", ()):
        s = f(function(s, at["logits"], inputs)).expand(s.shape)
    recorded = {name: x.expand(s.shape) for name, x in Recorded.values.items()}
    seen = request["open"].expand(s.shape)
    for function in functors.get("logits_mask", ()):
        seen = seen & function(at["logits"], inputs)
    hidden = torch.where(seen, s, -torch.inf)
    tops = torch.cat([hidden, torch.full((*s.shape[:2], 1), -torch.inf).double()], -1).amax(-1)
    if softmax:
        if Noise.places is not None:  # kernels' exponents are of 2, and so are their logarithms
            hidden = torch.where(hidden.abs() > FAR, hidden, moved(hidden, Noise.places))
        lse, is_far = torch.logsumexp(hidden, -1), (tops.abs() > FAR) & tops.isfinite()
        lse = torch.where(is_far, lse, r(lse, approximate=True))
        p = torch.where((lse > -torch.inf)[..., None], torch.exp(hidden - lse[..., None]), 0.0)
        if is_far.any():  # such a sum has no room for how many like it there are
            p = torch.where(is_far[..., None], torch.softmax(hidden, -1), p)
    else:
        p, lse = torch.where(seen, s, 0.0), torch.zeros(s.shape[:2], dtype=torch.float64)
    if Noise.places is not None and dtype != torch.float32:
        p = moved(p, 1, torch.finfo(dtype).eps / 2)
    o = r(p @ v, approximate=True)
    for function in functors.get("output_transform", ()):
        o = f(function(o, {**at["output"], "lse": lse[..., None]}, inputs)).expand(o.shape)
    return {"o": o, "lse": lse, "tops": tops, "seen": seen, "recorded": recorded}
