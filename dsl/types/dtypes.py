"""Element types of tensors and scalars, by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from warploom.dsl.types.ir import Kind


@dataclass(frozen=True)
class DType:
    """A storage type.

    Attributes:
        name: torch's name for it.
        bytes: size of an element.
        c_name: the type's name in rendered C++ (a typedef of our headers for the 16-bit floats).
        kind: the type of a value of it inside a functor.
    """

    name: str
    bytes: int
    c_name: str
    kind: Kind

    @property
    def limits(self) -> tuple[int, int]:
        """Least and greatest int that a kernel reads of this type; it computes in 32 bits."""
        if self.name == "uint8":
            return 0, 255
        bits = min(8 * self.bytes, 32)
        return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


float32 = DType("float32", 4, "float", Kind.FLOAT)
float16 = DType("float16", 2, "warploom::half_t", Kind.FLOAT)
bfloat16 = DType("bfloat16", 2, "warploom::bfloat16_t", Kind.FLOAT)
int64 = DType("int64", 8, "long long", Kind.INT)
int32 = DType("int32", 4, "int", Kind.INT)
int16 = DType("int16", 2, "short", Kind.INT)
int8 = DType("int8", 1, "signed char", Kind.INT)
uint8 = DType("uint8", 1, "unsigned char", Kind.INT)
bool_ = DType("bool", 1, "bool", Kind.BOOL)

# Of 8 bits: storage of keys and values only. The ints are numbers like the floats, up to scales.
float8_e4m3fn = DType("float8_e4m3fn", 1, "warploom::e4m3_t", Kind.FLOAT)
float8_e5m2 = DType("float8_e5m2", 1, "warploom::e5m2_t", Kind.FLOAT)
kv_int8 = DType("int8", 1, "warploom::i8_t", Kind.FLOAT)

BY_NAME = {t.name: t for t in (float32, float16, bfloat16, int64, int32, int16, int8, uint8, bool_)}
ATTENTION_DTYPES = (float16, bfloat16, float32)
NARROW_DTYPES = (float8_e4m3fn, float8_e5m2, kv_int8)

# what types are called elsewhere -> here
_MEANT = {
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    **dict.fromkeys(("bf16", "bfloat"), "bfloat16"),
    **dict.fromkeys(("fp32", "f32", "float", "single"), "float32"),
    **dict.fromkeys(
        ("fp8", "float8", "e4m3", "e4m3fn", "fp8_e4m3", "fp8_e4m3fn", "float8_e4m3"),
        "float8_e4m3fn",
    ),
    **dict.fromkeys(("e5m2", "fp8_e5m2"), "float8_e5m2"),
}


def dtype(name: str | DType) -> DType:
    """Look a type up; torch's and NumPy's dtype objects are accepted by their printed name.

    Raises:
        KeyError: no such type.
    """
    return name if isinstance(name, DType) else BY_NAME[_plain(name)]


def kv_dtype(name: str | DType) -> DType:
    """Look up a storage type of keys and values: one that attention computes in, or narrower.

    Raises:
        KeyError: no such type.
    """
    if isinstance(name, DType):
        return name
    return {t.name: t for t in (*ATTENTION_DTYPES, *NARROW_DTYPES)}[_plain(name)]


def meant(name: object, allowed: Iterable[DType]) -> str:
    """The name of the type that a name of elsewhere stands for; empty if none that is allowed."""
    found = _MEANT.get(_plain(name).lower(), "")
    return found if any(found == one.name for one in allowed) else ""


def _plain(name: object) -> str:
    return str(getattr(name, "name", name)).rpartition(".")[2]
