"""Prices of key tiles of two roles, by which CTAs are divided: prefills compute, decodes read.

Prices of Hopper's tiles are for an H200, by FLOPs, elements and bytes. For 16-bit keys of 128 lanes
and decode tiles of 8 rows they were compared with recorded splits of 112 batches
(`benchmarks/role_splits.py --fit`). Those of 64 and 96 lanes, tiles of 16 rows and 8-bit keys lie
among a few that were tried on 9 to 11 batches each (docs/experiments/mixed-plans.md, "Prices of
other heads"). Prices of portable tiles were never measured; other GPUs have the same prices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from warploom.codegen.attention.templates import template_of
from warploom.codegen.attention.two_roles import TwoRoles
from warploom.codegen.choice.element_cost import instructions_of_element
from warploom.codegen.source import TileConfig
from warploom.dsl.types.spec import AttentionSpec

_PREFILL_ELEMENTS = 128 * 128  # rows and keys of `TwoRoles.prefill_ps`
_PREFILL_BYTES = (128 + 128) * 2  # lanes of a key and its value there, of 2 bytes each
# Percentage of that price which does not depend on the lanes: exponentials, maxima and sums. Tensor
# cores take the rest, in proportion to lanes and bytes.
_SOFTMAX_PERCENT = 45
_BANDWIDTH = 4200  # GB/s that decoding reads on all SMs
# On a CPU, reading a key costs a tile as much as this many rows. The kernel counts the same way
# when it decides how many threads are worth starting.
_ROWS_OF_A_KEY = 16
# Time that each instruction per element of a logits transform or a mask adds to a prefill tile of
# 128 x 128; one instruction is hidden. From 42 variants on an H200.
_INSTRUCTION_PS = 100_000
_FEW_INSTRUCTIONS = 4  # of a soft-cap; with more no split of mixed batches was recorded
_NEVER = 2**31 - 1  # CTAs that saturate memory where that was not measured


@dataclass(frozen=True)
class RoleCost:
    """What two roles cost.

    Attributes:
        prefill, decode: picoseconds that one SM takes for a key tile of each; on a CPU only their
            ratio is known.
        saturating: number of decoding SMs that saturate memory bandwidth.
        decode_in_tall: picoseconds that one SM computes if the prefill tile processes the keys of a
            decode key tile; 0 where memory is slower, as with 16-bit keys without transforms.
        may_deal_beside_decodes: see `RolePrices`; no split of mixed batches was recorded for
            transforms with more instructions than _FEW_INSTRUCTIONS.
    """

    prefill: int
    decode: int
    saturating: int
    decode_in_tall: int = 0
    may_deal_beside_decodes: bool = True


def role_cost(spec: AttentionSpec, tile: TileConfig) -> RoleCost:
    """Prices on a GPU.

    Args:
        spec: lanes and types.
        tile: prefill tile, with the decode tile in it.
    """
    template = template_of(tile)
    assert tile.decode is not None and isinstance(template, TwoRoles)
    lanes = spec.head_dim_qk + spec.head_dim_v
    read = tile.decode.keys * lanes * spec.stored_dtype.bytes
    narrow, decodes = spec.is_narrow, template.decodes
    bandwidth = (decodes.narrow_sm_bandwidth if narrow else decodes.sm_bandwidth)[tile.decode.rows]
    instructions = instructions_of_element(spec.variant)
    slower = max(0, instructions - 1) * _INSTRUCTION_PS
    of_lanes = lanes * max(spec.dtype.bytes, 2)  # 8-bit queries are widened
    prefill_ps = (template.narrow_ps if narrow else template.prefill_ps) * (
        _SOFTMAX_PERCENT * _PREFILL_BYTES + (100 - _SOFTMAX_PERCENT) * of_lanes
    )
    per_tile = prefill_ps // (100 * _PREFILL_BYTES) + slower
    prefill = -(-tile.rows * tile.keys * per_tile // _PREFILL_ELEMENTS)
    return RoleCost(
        prefill=prefill,
        decode=-(-read * 1000 // bandwidth),
        saturating=-(-_BANDWIDTH // bandwidth),
        decode_in_tall=prefill * tile.decode.keys // tile.keys if narrow or slower else 0,
        may_deal_beside_decodes=instructions <= _FEW_INSTRUCTIONS,
    )


class Margins(NamedTuple):
    """Margins beside prices, fitted by `benchmarks/fit_roles.py`.

    Attributes:
        spread: two roles must save 1/spread of the time, which is what they lose where one of them
            has hardly any work.
        longer: one tile takes 1/longer more time for decodes than memory does, since most of its
            rows are empty.
    """

    spread: int = 25
    longer: int = 8


SHIPPED = Margins()


class Forecast(NamedTuple):
    """Predicted times of a batch, in picoseconds.

    Attributes:
        in_turn: with one tile for all, which computes and reads in turn.
        at_once: with two roles, which compute and read at the same time.
        margin: overhead of two roles.
    """

    in_turn: int
    at_once: int
    margin: int

    @property
    def pays(self) -> bool:
        """Whether two roles are faster, by more than they cost."""
        return self.in_turn - self.at_once > self.margin


def forecast(
    cost: RoleCost, prefills: int, decodes: int, ctas: int, margins: Margins = SHIPPED
) -> Forecast:
    """Times of a batch with one tile and with two roles, from batches on an H200 (decision 0056).

    With one tile for all, decodes take the time of reading memory, or of computing with 8-bit keys
    or a logits transform, if that is longer. Two roles are done when memory has been read and when
    each CTA has done an equal share of all work, whichever is later.

    Args:
        cost: prices of the key tiles of both roles.
        prefills, decodes: key tiles of all heads.
        ctas: CTAs that may get work.
        margins: margins beside the prices.
    """
    prefill, decode = prefills * cost.prefill, decodes * cost.decode
    reading = decode // min(cost.saturating, ctas)
    alone = max(reading + reading // margins.longer, decodes * cost.decode_in_tall // ctas)
    in_turn = prefill // ctas + alone
    at_once = max(reading, (prefill + decode) // ctas)
    return Forecast(in_turn, at_once, in_turn // margins.spread)


def role_cost_on_cpu(tile: TileConfig) -> RoleCost:
    """Prices on a CPU: a key costs as much as the tile's rows, and some more for being read."""
    assert tile.decode is not None  # it has two roles
    prefill, decode = (own.keys * (own.rows + _ROWS_OF_A_KEY) for own in (tile, tile.decode))
    return RoleCost(prefill, decode, _NEVER)
