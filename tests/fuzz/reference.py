"""What functors say in plain torch float64, and how far rounding alone may move it.

Integers are int64 tensors that wrap at 32 bits after each operation. Floats are float64; under
`Noise` each result that single precision cannot hold is moved by a few of its last places, so that
what is ill-conditioned shows itself.
"""

import contextlib

import torch

FAST_TANH = 6e-4  # of its value


TINY = 2.0**-126  # the smallest normal number of float32


class Noise:
    """How results are rounded: `places` of float32's last place, moved at random; None is exact.

    `fast` is set for GPUs, whose tanh is an instruction that gives 11 bits. With `common`, all
    elements move alike: a kernel's cos(0) is too large for all of them, or for none. With `narrow`,
    transformed vectors are kept in the type of the inputs; without, in float32.
    """

    places: "float | None" = None
    generator: "torch.Generator | None" = None
    fast = False
    common = False
    narrow = True


@contextlib.contextmanager
def noise(places, seed, fast=False):
    Noise.places, Noise.generator = places, torch.Generator().manual_seed(seed)
    Noise.fast, Noise.common, Noise.narrow = fast, seed % 2 == 0, seed % 3 > 0
    try:
        yield
    finally:
        Noise.places = None


def moved(x, places, relative=2.0**-23):
    shape = () if Noise.common else x.shape
    shift = torch.rand(shape, generator=Noise.generator, dtype=torch.float64) * 2 - 1
    return x * (1 + shift * places * relative)


def r(x, approximate=False):
    """A float result as kernels may have it."""
    if Noise.places is None:
        return x
    single = x.float().double()
    if approximate:
        return moved(single, Noise.places)
    return torch.where((single == x) | x.isnan(), single, moved(single, Noise.places))


def of_function(x, name):
    """The result of a function as kernels may have it."""
    if Noise.places is not None and Noise.fast and name in ("tanh", "gelu"):
        return moved(x.float().double(), min(1, Noise.places), FAST_TANH)
    if Noise.places is not None:  # fast functions may give 0 for what is below the normal numbers
        x = torch.where(x.abs() < TINY, 0.0, x)
    return r(x, approximate=True)


def num(value):
    kind = (
        torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else None
    )
    return torch.tensor(value, dtype=kind or torch.float64)


def i(x):
    return x.long() if x.dtype == torch.bool else x


def wrap(x):
    return ((x + 2**31) & (2**32 - 1)) - 2**31


def f(x):
    return x if x.dtype == torch.float64 else r(x.double())


def is_float(*values):
    return any(x.dtype == torch.float64 for x in values)


def both(a, b):
    return (f(a), f(b)) if is_float(a, b) else (i(a), i(b))


def add(a, b):
    return wrap(i(a) + i(b))


def sub(a, b):
    return wrap(i(a) - i(b))


def mul(a, b):
    return wrap(i(a) * i(b))


def fadd(a, b):
    return r(f(a) + f(b))


def fsub(a, b):
    return r(f(a) - f(b))


def fmul(a, b):
    return r(f(a) * f(b))


def fdiv(a, b):
    return r(f(a) / f(b))


def floordiv(a, b):
    a, b = torch.broadcast_tensors(i(a), i(b))
    safe = torch.where(b == 0, 1, b)
    return torch.where(b == 0, 0, wrap(torch.div(a, safe, rounding_mode="floor")))


def remainder(a, b):
    a, b = torch.broadcast_tensors(i(a), i(b))
    safe = torch.where(b == 0, 1, b)
    return torch.where(b == 0, 0, torch.remainder(a, safe))


def ffloordiv(a, b):
    return (f(a) / f(b)).floor()


def fremainder(a, b):
    return r(torch.remainder(f(a), f(b)))


def fmod(a, b):
    """Of the sign of a, as C has it; ints by numbers that are not 0."""
    if is_float(a, b):
        return r(torch.fmod(f(a), f(b)))
    return torch.fmod(i(a), i(b))


def power(x, n):
    """x to a small whole power, multiplied in its own kind."""
    found = x
    for _ in range(int(n) - 1):
        found = mul(found, x)
    return found


def rpow(base, x):
    return r(base ** f(x), approximate=True)


def fpower(x, n):
    return r(f(x) ** n)


def clamp(x, low, high):
    return minimum(maximum(x, low), high)


def and_(a, b):
    return a & b


def or_(a, b):
    return a | b


def xor(a, b):
    return a ^ b


def shl(a, b):
    a, b = i(a), i(b)
    good = (b >= 0) & (b <= 31)
    return torch.where(good, wrap(a << b.clamp(0, 31)), 0)


def shr(a, b):
    a, b = i(a), i(b)
    good = (b >= 0) & (b <= 31)
    return torch.where(good, a >> b.clamp(0, 31), torch.where(a < 0, -1, 0))


def lt(a, b):
    a, b = both(a, b)
    return a < b


def le(a, b):
    a, b = both(a, b)
    return a <= b


def gt(a, b):
    a, b = both(a, b)
    return a > b


def ge(a, b):
    a, b = both(a, b)
    return a >= b


def eq(a, b):
    a, b = both(a, b)
    return a == b


def ne(a, b):
    a, b = both(a, b)
    return a != b


def neg(x):
    return -x if is_float(x) else wrap(-i(x))


def invert(x):
    return ~x


def abs(x):
    return x.abs() if is_float(x) else wrap(i(x).abs())


def minimum(a, b):
    return torch.minimum(*both(a, b))


def maximum(a, b):
    return torch.maximum(*both(a, b))


def where(c, a, b):
    if a.dtype != b.dtype:
        a, b = both(a, b)
    return torch.where(c, a, b)


def to_int(x):
    if not is_float(x):
        return i(x)
    return x.nan_to_num(0.0, 2.0**31 - 1, -(2.0**31)).clamp(-(2.0**31), 2.0**31 - 1).long()


def to_float(x):
    return f(x)


def to_bool(x):
    return x != 0


def _function(name):
    return lambda x: of_function(getattr(torch, name)(f(x)), name)


exp, exp2, log, log2 = (_function(name) for name in ("exp", "exp2", "log", "log2"))
sqrt, rsqrt, tanh, sigmoid = (_function(name) for name in ("sqrt", "rsqrt", "tanh", "sigmoid"))
sin, cos, erf, tan = (_function(name) for name in ("sin", "cos", "erf", "tan"))
expm1, log1p, atan = (_function(name) for name in ("expm1", "log1p", "atan"))
sinh, cosh = (_function(name) for name in ("sinh", "cosh"))


def bent(x):
    """The custom function of generated variants."""
    return fdiv(x, fadd(num(1.0), abs(x)))


def isnan(x):
    return f(x).isnan()


def isinf(x):
    return f(x).isinf()


def floor(x):
    return f(x).floor()


def ceil(x):
    return f(x).ceil()


def look(tensor, *indices):
    """A tensor at any ints, each held within its dimension."""
    held = [torch.clamp(i(x), 0, n - 1) for x, n in zip(indices, tensor.shape, strict=True)]
    return tensor[torch.broadcast_tensors(*held)]


def vsum(x):
    return r(f(x).sum(-1, keepdim=True), approximate=True)


def vmean(x):
    return r(f(x).mean(-1, keepdim=True), approximate=True)


def vmax(x):
    return f(x).amax(-1, keepdim=True)


def rotate_half(x, dim=None):
    n = x.shape[-1] if dim is None else int(dim)
    first, second = x[..., : n // 2], x[..., n // 2 : n]
    return torch.cat([-second, first, x[..., n:]], -1)


def rotate_pairs(x, dim=None):
    n = x.shape[-1] if dim is None else int(dim)
    head = torch.stack([-x[..., 1:n:2], x[..., :n:2]], -1).flatten(-2)
    return torch.cat([head, x[..., n:]], -1)


def rope(x, position, theta):
    """Rotary embedding: lanes i and i + dim / 2 turn by position * theta^(-2 i / dim)."""
    half = x.shape[-1] // 2
    pair = torch.arange(2 * half, dtype=torch.float64) % half
    angle = fmul(position, r(theta ** (-pair / half), approximate=True))
    return fadd(fmul(x, cos(angle)), fmul(rotate_half(x), sin(angle)))


class Recorded:
    """What functors have recorded of the request that is worked on, by output."""

    values: "dict[str, torch.Tensor]" = {}  # noqa: RUF012 - one for each request


def record(name, x):
    Recorded.values[name] = f(x)
    return x


def then(first, second):
    """The second; the first was there for what it records."""
    return second


def language():
    """The names that texts of the reference may use."""
    return dict(globals())
