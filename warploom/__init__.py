"""warploom: write attention variants in Python, run them as compiled kernels."""

from __future__ import annotations

import builtins
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from warploom.codegen.archive import export_kernels as export_kernels
    from warploom.codegen.archive_import import import_kernels as import_kernels
    from warploom.codegen.build import forbid_compilation as forbid_compilation
    from warploom.codegen.source import TileConfig as TileConfig
    from warploom.counters import reset_stats as reset_stats
    from warploom.counters import stats as stats
    from warploom.dsl.custom import custom_function as custom_function
    from warploom.dsl.fields import Scalar as Scalar
    from warploom.dsl.fields import Tensor as Tensor
    from warploom.dsl.flex import flex as flex
    from warploom.dsl.formats import BlockSparse as BlockSparse
    from warploom.dsl.formats import Composed as Composed
    from warploom.dsl.formats import Dense as Dense
    from warploom.dsl.formats import Paged as Paged
    from warploom.dsl.formats import Ragged as Ragged
    from warploom.dsl.formats import Rolling as Rolling
    from warploom.dsl.functions import abs as abs
    from warploom.dsl.functions import atan as atan
    from warploom.dsl.functions import ceil as ceil
    from warploom.dsl.functions import clamp as clamp
    from warploom.dsl.functions import cos as cos
    from warploom.dsl.functions import cosh as cosh
    from warploom.dsl.functions import erf as erf
    from warploom.dsl.functions import exp as exp
    from warploom.dsl.functions import exp2 as exp2
    from warploom.dsl.functions import expm1 as expm1
    from warploom.dsl.functions import floor as floor
    from warploom.dsl.functions import fmod as fmod
    from warploom.dsl.functions import isinf as isinf
    from warploom.dsl.functions import isnan as isnan
    from warploom.dsl.functions import log as log
    from warploom.dsl.functions import log1p as log1p
    from warploom.dsl.functions import log2 as log2
    from warploom.dsl.functions import max as max
    from warploom.dsl.functions import maximum as maximum
    from warploom.dsl.functions import mean as mean
    from warploom.dsl.functions import minimum as minimum
    from warploom.dsl.functions import rotate_half as rotate_half
    from warploom.dsl.functions import rotate_pairs as rotate_pairs
    from warploom.dsl.functions import rsqrt as rsqrt
    from warploom.dsl.functions import sigmoid as sigmoid
    from warploom.dsl.functions import sin as sin
    from warploom.dsl.functions import sinh as sinh
    from warploom.dsl.functions import sqrt as sqrt
    from warploom.dsl.functions import sum as sum
    from warploom.dsl.functions import tan as tan
    from warploom.dsl.functions import tanh as tanh
    from warploom.dsl.functions import to_bool as to_bool
    from warploom.dsl.functions import to_float as to_float
    from warploom.dsl.functions import to_int as to_int
    from warploom.dsl.functions import where as where
    from warploom.dsl.library.alibi import Alibi as Alibi
    from warploom.dsl.library.attention_sink import AttentionSink as AttentionSink
    from warploom.dsl.library.causal import Causal as Causal
    from warploom.dsl.library.document_mask import DocumentMask as DocumentMask
    from warploom.dsl.library.flash_sigmoid import FlashSigmoid as FlashSigmoid
    from warploom.dsl.library.kv_scale import HeadKVScale as HeadKVScale
    from warploom.dsl.library.kv_scale import KVScale as KVScale
    from warploom.dsl.library.kv_scale import TokenKVScale as TokenKVScale
    from warploom.dsl.library.packed_mask import PackedMask as PackedMask
    from warploom.dsl.library.packed_mask import TreeMask as TreeMask
    from warploom.dsl.library.packed_mask import pack_masks as pack_masks
    from warploom.dsl.library.prefix_lm import PrefixLM as PrefixLM
    from warploom.dsl.library.qk_norm import QKNorm as QKNorm
    from warploom.dsl.library.rope import Rope as Rope
    from warploom.dsl.library.rope_scaling import LinearScaling as LinearScaling
    from warploom.dsl.library.rope_scaling import Llama3Scaling as Llama3Scaling
    from warploom.dsl.library.rope_scaling import YarnScaling as YarnScaling
    from warploom.dsl.library.sliding_window import SlidingWindow as SlidingWindow
    from warploom.dsl.library.soft_cap import SoftCap as SoftCap
    from warploom.dsl.outputs import Output as Output
    from warploom.dsl.position import Position as Position
    from warploom.dsl.reference import reference_attention as reference_attention
    from warploom.dsl.reference import reference_batch as reference_batch
    from warploom.dsl.variant import Variant as Variant
    from warploom.runtime.ahead import build_kernels as build_kernels
    from warploom.runtime.append import Appender as Appender
    from warploom.runtime.append import append as append
    from warploom.runtime.attention import attention as attention
    from warploom.runtime.aux_outputs import AuxOutput as AuxOutput
    from warploom.runtime.aux_outputs import AuxRequest as AuxRequest
    from warploom.runtime.blocks import block_rows as block_rows
    from warploom.runtime.compose import Level as Level
    from warploom.runtime.compose import Part as Part
    from warploom.runtime.compose import RadixTree as RadixTree
    from warploom.runtime.compose import compose as compose
    from warploom.runtime.declaration import AppenderDeclaration as AppenderDeclaration
    from warploom.runtime.declaration import AttentionDeclaration as AttentionDeclaration
    from warploom.runtime.declaration import PageSelectionDeclaration as PageSelectionDeclaration
    from warploom.runtime.draw import draw_mask as draw_mask
    from warploom.runtime.huggingface import register_huggingface as register_huggingface
    from warploom.runtime.merge import merge_state as merge_state
    from warploom.runtime.merge import merge_states as merge_states
    from warploom.runtime.selection import PageSelectionWrapper as PageSelectionWrapper
    from warploom.runtime.wrapper import AttentionWrapper as AttentionWrapper
    from warploom.scheduler.bounds import Bounds as Bounds

__version__ = "0.1.0"

_HOME = {
    "BlockSparse": "warploom.dsl.formats",
    "Composed": "warploom.dsl.formats",
    "Dense": "warploom.dsl.formats",
    "Paged": "warploom.dsl.formats",
    "Ragged": "warploom.dsl.formats",
    "Rolling": "warploom.dsl.formats",
    "custom_function": "warploom.dsl.custom",
    "Scalar": "warploom.dsl.fields",
    "Tensor": "warploom.dsl.fields",
    "abs": "warploom.dsl.functions",
    "atan": "warploom.dsl.functions",
    "ceil": "warploom.dsl.functions",
    "clamp": "warploom.dsl.functions",
    "cos": "warploom.dsl.functions",
    "cosh": "warploom.dsl.functions",
    "erf": "warploom.dsl.functions",
    "exp": "warploom.dsl.functions",
    "exp2": "warploom.dsl.functions",
    "expm1": "warploom.dsl.functions",
    "floor": "warploom.dsl.functions",
    "fmod": "warploom.dsl.functions",
    "isinf": "warploom.dsl.functions",
    "isnan": "warploom.dsl.functions",
    "log": "warploom.dsl.functions",
    "log1p": "warploom.dsl.functions",
    "log2": "warploom.dsl.functions",
    "max": "warploom.dsl.functions",
    "maximum": "warploom.dsl.functions",
    "mean": "warploom.dsl.functions",
    "minimum": "warploom.dsl.functions",
    "rotate_half": "warploom.dsl.functions",
    "rotate_pairs": "warploom.dsl.functions",
    "rsqrt": "warploom.dsl.functions",
    "sigmoid": "warploom.dsl.functions",
    "sin": "warploom.dsl.functions",
    "sinh": "warploom.dsl.functions",
    "sqrt": "warploom.dsl.functions",
    "sum": "warploom.dsl.functions",
    "tan": "warploom.dsl.functions",
    "tanh": "warploom.dsl.functions",
    "to_bool": "warploom.dsl.functions",
    "to_float": "warploom.dsl.functions",
    "to_int": "warploom.dsl.functions",
    "where": "warploom.dsl.functions",
    "flex": "warploom.dsl.flex",
    "Alibi": "warploom.dsl.library.alibi",
    "AttentionSink": "warploom.dsl.library.attention_sink",
    "DocumentMask": "warploom.dsl.library.document_mask",
    "FlashSigmoid": "warploom.dsl.library.flash_sigmoid",
    "HeadKVScale": "warploom.dsl.library.kv_scale",
    "KVScale": "warploom.dsl.library.kv_scale",
    "TokenKVScale": "warploom.dsl.library.kv_scale",
    "PackedMask": "warploom.dsl.library.packed_mask",
    "TreeMask": "warploom.dsl.library.packed_mask",
    "pack_masks": "warploom.dsl.library.packed_mask",
    "PrefixLM": "warploom.dsl.library.prefix_lm",
    "QKNorm": "warploom.dsl.library.qk_norm",
    "Rope": "warploom.dsl.library.rope",
    "LinearScaling": "warploom.dsl.library.rope_scaling",
    "Llama3Scaling": "warploom.dsl.library.rope_scaling",
    "YarnScaling": "warploom.dsl.library.rope_scaling",
    "Causal": "warploom.dsl.library.causal",
    "SlidingWindow": "warploom.dsl.library.sliding_window",
    "SoftCap": "warploom.dsl.library.soft_cap",
    "Output": "warploom.dsl.outputs",
    "Position": "warploom.dsl.position",
    "reference_attention": "warploom.dsl.reference",
    "reference_batch": "warploom.dsl.reference",
    "Variant": "warploom.dsl.variant",
    "register_huggingface": "warploom.runtime.huggingface",
    "merge_state": "warploom.runtime.merge",
    "merge_states": "warploom.runtime.merge",
    "block_rows": "warploom.runtime.blocks",
    "Level": "warploom.runtime.compose",
    "Part": "warploom.runtime.compose",
    "RadixTree": "warploom.runtime.compose",
    "compose": "warploom.runtime.compose",
    "reset_stats": "warploom.counters",
    "stats": "warploom.counters",
    "forbid_compilation": "warploom.codegen.build",
    "export_kernels": "warploom.codegen.archive",
    "import_kernels": "warploom.codegen.archive_import",
    "TileConfig": "warploom.codegen.source",
    "Bounds": "warploom.scheduler.bounds",
    "build_kernels": "warploom.runtime.ahead",
    "AppenderDeclaration": "warploom.runtime.declaration",
    "AttentionDeclaration": "warploom.runtime.declaration",
    "PageSelectionDeclaration": "warploom.runtime.declaration",
    "append": "warploom.runtime.append",
    "Appender": "warploom.runtime.append",
    "attention": "warploom.runtime.attention",
    "AuxOutput": "warploom.runtime.aux_outputs",
    "AuxRequest": "warploom.runtime.aux_outputs",
    "AttentionWrapper": "warploom.runtime.wrapper",
    "PageSelectionWrapper": "warploom.runtime.selection",
    "draw_mask": "warploom.runtime.draw",
}

if not TYPE_CHECKING:  # there the imports above say it
    # `from warploom import *` leaves Python's own abs, max and sum alone
    __all__ = sorted(name for name in _HOME if not hasattr(builtins, name))


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name == "testing":
        return import_module("warploom.testing")
    from difflib import get_close_matches  # for mistakes only

    near = get_close_matches(name, _HOME, n=1)
    hint = f". Did you mean {near[0]!r}?" if near else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    helpers = ("TYPE_CHECKING", "annotations", "builtins", "import_module")
    return sorted([*(name for name in globals() if name not in helpers), *_HOME])
