"""FlexAttention's callables as a variant: `score_mod` and `mask_mod` with their own signatures."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from warploom.dsl.graphs.shown import showing
from warploom.dsl.types import location
from warploom.dsl.types.doubles import check_doubles
from warploom.dsl.types.ir import Node
from warploom.dsl.values.arrays import for_torch
from warploom.dsl.values.position import Position
from warploom.dsl.values.stand_ins import uncompiled, unseen
from warploom.dsl.values.symbols import Symbol, Value, refusing_foreign
from warploom.dsl.values.words import of_flex
from warploom.dsl.variants.block_lists import BlockLists
from warploom.dsl.variants.capture import Captures, indexing, is_tensor, rebuild
from warploom.dsl.variants.check import signature_problem
from warploom.dsl.variants.fields import READING, Field, Reading
from warploom.dsl.variants.trace import trace
from warploom.dsl.variants.variant import Variant
from warploom.errors import ArgumentError, WrongSignature

_SIGNATURES = {
    "score_mod": "(score, b, h, q_idx, kv_idx)",
    "mask_mod": "(b, h, q_idx, kv_idx)",
}
_SLICED = "_sliced_mask_mod_error"  # the mask_mod of a sliced BlockMask, which only raises
_SHOWN = {"logits_transform": "score_mod", "logits_mask": "mask_mod"}


class Flex(Variant):
    """A variant made of two plain functions; `flex` makes it.

    `is_read` says whether the kernel reads the lists; if not, they are only used to check lengths.
    """

    def __init__(
        self,
        score_mod: Callable[..., Any] | None,
        mask_mod: Callable[..., Any] | None,
        q_idx: str = "row",
        lists: BlockLists | None = None,
        is_read: bool = True,
    ) -> None:
        if lists is not None and is_read and mask_mod is not None:
            mask_mod = lists.narrow(mask_mod)
        given = (function for function in (score_mod, mask_mod) if function is not None)
        shown = (str(getattr(function, "__name__", "function")) for function in given)
        self._name = "_".join(("flex", *(re.sub(r"\W", "", name) for name in shown)))
        self._captures = Captures(self._name)
        self._q_idx = q_idx
        self._lists = lists
        self._is_read = is_read
        self._functions = {"logits_transform": score_mod, "logits_mask": mask_mod}

    def logits_transform(self, logits: Value, at: Position) -> Value:
        return self._call("logits_transform", at, logits)

    def logits_mask(self, at: Position) -> Value:
        return self._call("logits_mask", at)

    def _call(self, hook: str, at: Position, *value: Value) -> Value:
        function = self._functions[hook]
        if function is None:
            return value[0] if value else True
        reading: Reading = self.__dict__[READING]
        with of_flex(), refusing_foreign(), indexing(self._captures, reading):
            bound = rebuild(
                function, lambda name, tensor: self._captures.read(tensor, name, reading)
            )
            row = at.q_pos if self._q_idx == "position" else at.q_idx
            given = (*value, at.batch, at.q_head, row, at.kv_pos)
            with showing(_arguments(function, given)):
                return bound(*map(for_torch, given))

    def check_lengths(self, known: Mapping[str, Any], q_lens: Any, kv_lens: Any) -> None:
        if self._lists is None:
            return
        if self._q_idx == "row":
            self._lists.check_lengths(q_lens, kv_lens)
        elif self._is_read:
            self._lists.check_positions(kv_lens)

    @property
    def checks_lengths(self) -> bool:
        return self._lists is not None

    @property
    def name(self) -> str:
        return self._name

    def functor(self, hook: str) -> Any:
        return self._functions.get(hook) or super().functor(hook)

    def shown_hook(self, hook: str) -> str:
        return _SHOWN.get(hook, hook)

    def fields(self) -> dict[str, Field]:
        # __setattr__ calls this before `_captures` is set
        captures = self.__dict__.get("_captures")
        return {} if captures is None else dict(captures.fields)

    def inputs(self) -> dict[str, Any]:
        return self._captures.values()

    def traceable_inputs(self) -> dict[str, Any]:
        return dict(self._captures.alike)

    def doubles(self) -> set[str]:
        """Fields of captured float64 tensors, which kernels read as float32."""
        return self._captures.doubles()

    def shares(self, name: str, other: Variant) -> bool:
        return isinstance(other, Flex) and self._captures.shares(name, other._captures)


@uncompiled("a variant is made outside of the compiled function: call wl.flex(...) before it, once")
@unseen
def flex(
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Any = None,
    *,
    block_mask: Any = None,
    q_idx: Literal["row", "position"] = "row",
) -> Variant:
    """Make a variant of FlexAttention's callables, unchanged.

    FlexAttention's tensors are [batch, heads, tokens, dim]: give `layout="HND"` to `attention` with
    them. In the default layout they are read as [batch, tokens, heads, dim]: the output may have
    the right shape and wrong numbers.

    The callables are traced at once, to find the tensors that they capture. Captured tensors (torch
    or NumPy; closure, globals, defaults, attributes of captured modules) become inputs of the
    kernel. Each call of `attention` reads their current values. A wrapper binds them when it is
    made, like any input, and each plan reads those of the mask again. Captured Python numbers are
    constants.

    A captured tensor must be as long as the range of positions that index it; a smaller one is
    refused. The range of a computed index (`bias[h, q_idx - kv_idx]`) is unknown. A negative index
    counts from the end, as in torch, which makes the tensor's size a constant of the kernel. An
    index that is then out of range is clamped into the tensor, on every back end.

    Captured integers of 8 and 16 bits compute in their types, as in torch. Kernels have no float64:
    such a tensor may be a bias, a factor or a replacement of the score, which rounds it to float32,
    and is refused elsewhere. int64 is read as int32; larger values are refused when they are bound.

    Tracing takes milliseconds: make a variant once, not at every call.

    Args:
        score_mod: `score_mod(score, b, h, q_idx, kv_idx)`; the score is already scaled.
        mask_mod: `mask_mod(b, h, q_idx, kv_idx)`; True where the query sees the key. A torch
            `BlockMask` has the same meaning as in torch: blocks in no list are hidden, its full
            blocks are visible, and elsewhere its mask_mod decides. Its lists are read once, now. If
            they provably add nothing to the mask_mod, as after `create_block_mask`, no kernel reads
            them; else they become a table that the kernel reads. The longest request of a batch
            must have the lengths that the mask was made for; else `plan` and `attention` refuse it
            with ArgumentError, as torch does (plans made on a device cannot).
            `mask_mod=block_mask.mask_mod` works at any length. With q_idx="position" a table only
            needs to be long enough.
        block_mask: a `BlockMask`, as for `mask_mod`, under FlexAttention's name.
        q_idx: what the callables get as `q_idx`. "row" counts a request's query rows from 0, as in
            FlexAttention: `q_idx >= kv_idx` is causal aligned to the beginning, and the one row of
            a decoding request sees only key 0. "position" is the row's position in the key sequence
            (`at.q_pos`): the same mask is causal aligned to the end, in prefill and in decode.

    Returns:
        A variant, which can be chained with others. If two variants of a chain capture something
        under one name, it must be one tensor, which then is one input.

    Raises:
        WrongSignature: a callable takes other arguments.
        ArgumentError: no such `q_idx`, a `BlockMask` for `score_mod`, lists with blocks that do not
            exist, both `mask_mod` and `block_mask`, or an argument that is no function.
        VariantError: a callable cannot be traced.
    """
    if q_idx not in ("row", "position"):
        raise ArgumentError(name="q_idx", reason=f"{q_idx!r} is neither 'row' nor 'position'")
    if hasattr(score_mod, "mask_mod"):
        reason = f"is a {type(score_mod).__name__}, which is a mask; give it as mask_mod=..."
        raise ArgumentError(name="score_mod", reason=reason)
    mask_mod = _mask_of(mask_mod, block_mask)
    lists = BlockLists(mask_mod) if hasattr(mask_mod, "kv_num_blocks") else None
    mask_mod = getattr(mask_mod, "mask_mod", mask_mod)
    for kind, function in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if function is not None:
            _check(kind, function)
    is_read = lists is not None and not lists.add_nothing(trace(Flex(None, mask_mod)))
    made = Flex(score_mod, mask_mod, q_idx, lists, is_read)
    check_doubles(trace(made), made.doubles())
    return made


def _arguments(function: Callable[..., Any], given: tuple[Value, ...]) -> dict[Node, str]:
    """What the function calls the expressions that it is given; none in a reading of arrays."""
    names = [
        name
        for name, one in inspect.signature(function).parameters.items()
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    if len(names) < len(given):
        names = ["score", "b", "h", "q_idx", "kv_idx"][-len(given) :]
    pairs = zip(given, names, strict=False)
    return {one.node: name for one, name in pairs if isinstance(one, Symbol)}


def _mask_of(mask_mod: Any, block_mask: Any) -> Any:
    """The one of both that is given; raises ArgumentError for both, and for what is no mask."""
    if block_mask is not None:
        if mask_mod is not None:
            reason = "is given beside mask_mod; a BlockMask has a mask_mod, give one of both"
            raise ArgumentError(name="block_mask", reason=reason)
        if not hasattr(block_mask, "kv_num_blocks"):
            no_mask = f"is {block_mask!r}, no BlockMask; give functions as mask_mod=..."
            reason = _no_function(block_mask) or no_mask
            raise ArgumentError(name="block_mask", reason=reason)
        mask_mod = block_mask
    if getattr(getattr(mask_mod, "mask_mod", None), "__name__", "") == _SLICED:
        reason = (
            "is a slice of another, which torch leaves without a mask_mod; set it, counting rows "
            "from the slice's first: sliced.mask_mod = lambda b, h, q_idx, kv_idx: "
            "mask_mod(b, h, q_idx + offset, kv_idx), and sliced.seq_lengths = (q_len, kv_len)"
        )
        raise ArgumentError(name="block_mask", reason=reason)
    return mask_mod


def _no_function(given: Any) -> str | None:
    """What a tensor or a variant is to be given as, in place of a function; None for others."""
    if is_tensor(given):
        return (
            f"is a {type(given).__name__} of shape {tuple(given.shape)}, and no function. A mask "
            "of bools is the variant PackedMask(*pack_masks(masks)); a bias is score_mod=lambda "
            "score, b, h, q_idx, kv_idx: score + bias[q_idx, kv_idx]"
        )
    if isinstance(given, Variant) or (isinstance(given, type) and issubclass(given, Variant)):
        return "is a variant; give it to attention as variant=..., or chain it with flex(...) by &"
    return None


def _check_callable(kind: str, given: Any) -> None:
    """Raise ArgumentError for an argument that is no function: a tensor, a variant, a name."""
    reason = _no_function(given)
    if reason is None and not callable(given):
        reason = f"is {given!r}; expected a function {_SIGNATURES[kind]}"
    if reason is not None:
        raise ArgumentError(name=kind, reason=reason)


def _meant(kind: str, function: Callable[..., Any]) -> str:
    is_mask = kind == "score_mod" and signature_problem(function, 4) is None
    return ", or is it a mask? Then pass it as mask_mod=..." if is_mask else ""


def _check(kind: str, function: Any) -> None:
    _check_callable(kind, function)
    got = signature_problem(function, 5 if kind == "score_mod" else 4)
    if got is not None:
        raise WrongSignature(
            hook=kind,
            variant="flex",
            got=got,
            expected=_SIGNATURES[kind] + _meant(kind, function),
            source=location.of_function(function),
        )
