"""`at`: where the current element is. One class serves symbols and NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from warploom.dsl.graphs import build
from warploom.dsl.types.ir import POSITIONS, var
from warploom.dsl.types.spec import HOOKS
from warploom.dsl.values.parts import ReadInParts
from warploom.dsl.values.symbols import Symbol, Value

_REQUEST = ("batch", "q_len", "kv_len", "kv_head", "num_q_heads", "num_kv_heads")
_QUERY = ("q_pos", "q_idx", "q_head", "q_row")
_KEY = ("kv_pos",)
_VECTOR = ("lane", "head_dim")

# What each hook may read. A key is shared by all queries of a request, so it has no q_pos, and so
# on.
AVAILABLE: Mapping[str, tuple[str, ...]] = {
    "query_transform": (*_REQUEST, *_QUERY, *_VECTOR),
    "key_transform": (*_REQUEST, *_KEY, *_VECTOR),
    "value_transform": (*_REQUEST, *_KEY, *_VECTOR),
    "logits_transform": (*_REQUEST, *_QUERY, *_KEY),
    "logits_mask": (*_REQUEST, *_QUERY, *_KEY),
    "output_transform": (*_REQUEST, *_QUERY, *_VECTOR, "lse"),
}

# FlexAttention's names, some of them near to those of other positions
_FLEX = {"kv_idx": "kv_pos", "b": "batch", "h": "q_head"}


class Position(ReadInParts):
    """Position of the element that a functor works on; ints, but for `lse`.

    Attributes:
        batch: request.
        q_pos: query's position in the key sequence (queries are aligned to its end); may be
            negative if there are more queries than keys.
        q_idx: query's row within the request, from 0.
        q_row: query's row over all requests of a ragged batch; in dense tensors q_idx.
        kv_pos: key's position.
        q_len: query rows of the request.
        kv_len: keys of the request.
        q_head: query head.
        kv_head: key/value head.
        num_q_heads: query heads in all.
        num_kv_heads: key/value heads in all.
        lane: index into the head dimension; vector hooks only.
        head_dim: length of this hook's vector; vector hooks only.
        lse: natural log-sum-exp of the row over its visible keys; output_transform only.
    """

    batch: Value
    q_pos: Value
    q_idx: Value
    q_row: Value
    kv_pos: Value
    q_len: Value
    kv_len: Value
    q_head: Value
    kv_head: Value
    num_q_heads: Value
    num_kv_heads: Value
    lane: Value
    head_dim: Value
    lse: Value

    def __init__(self, hook: str, values: Mapping[str, Value]) -> None:
        """Bind the values of `ir.POSITIONS` that `hook` may read; q_idx is derived from them."""
        if hook not in HOOKS:
            raise ValueError(f"no hook {hook!r}")
        self.__dict__["_hook"] = hook
        self.__dict__["_values"] = values

    def __getattr__(self, name: str) -> Value:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "item":  # what symbols and NumPy ask numbers for
            self._taken_whole()
        if name not in AVAILABLE[self._hook]:
            raise _unavailable(self._hook, name)
        if name == "q_idx":
            return self.q_pos - (self.kv_len - self.q_len)
        return self._values[name]

    def __setattr__(self, name: str, value: object) -> None:
        raise build.refuse(f"assigning at.{name}", "The position is read-only.")

    def described(self) -> str:
        return f"the position in {self._hook}"

    def remedy(self) -> str:
        first = "" if self._hook == "logits_mask" else " after the value"
        return f"It is the last argument{first}; read one part of it, such as at.batch."


def symbolic(hook: str) -> Position:
    """`at` for tracing."""
    return Position(hook, {name: Symbol(var(name)) for name in POSITIONS})


def _unavailable(hook: str, name: str) -> Exception:
    here = AVAILABLE[hook]
    if name in POSITIONS or name == "q_idx":
        return build.refuse(f"at.{name} in {hook}", f"There it reads: {', '.join(sorted(here))}.")
    meant = _FLEX.get(name)
    close = get_close_matches(name, here, n=1) if meant is None else [meant] * (meant in here)
    hint = "".join(f"Did you mean at.{one}? " for one in close)
    return build.refuse(f"at.{name}", f"{hint}{hook} reads: {', '.join(sorted(here))}.")
