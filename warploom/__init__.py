"""warploom: write attention variants in Python, run them as compiled kernels."""

from __future__ import annotations

import builtins
from importlib import import_module
from typing import TYPE_CHECKING

from warploom.lazy import look_up, no_attribute, not_installed

if TYPE_CHECKING:
    from warploom import deployment_errors as deployment_errors
    from warploom import distributed as distributed
    from warploom import engine_errors as engine_errors
    from warploom import errors as errors
    from warploom import graph_errors as graph_errors
    from warploom import memory_errors as memory_errors
    from warploom import prefetch as prefetch
    from warploom import prefetch_errors as prefetch_errors
    from warploom import recommendation as recommendation
    from warploom import recommendation_errors as recommendation_errors
    from warploom import simulate as simulate
    from warploom import simulation_errors as simulation_errors
    from warploom import testing as testing
    from warploom.codegen.archives.archive import export_kernels as export_kernels
    from warploom.codegen.archives.archive_import import import_kernels as import_kernels
    from warploom.codegen.build import forbid_compilation as forbid_compilation
    from warploom.codegen.source import TileConfig as TileConfig
    from warploom.counters import reset_stats as reset_stats
    from warploom.counters import stats as stats
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
    from warploom.dsl.reference import reference_attention as reference_attention
    from warploom.dsl.reference import reference_batch as reference_batch
    from warploom.dsl.types.formats import BlockSparse as BlockSparse
    from warploom.dsl.types.formats import Composed as Composed
    from warploom.dsl.types.formats import Dense as Dense
    from warploom.dsl.types.formats import Paged as Paged
    from warploom.dsl.types.formats import Ragged as Ragged
    from warploom.dsl.types.formats import Rolling as Rolling
    from warploom.dsl.values.custom import custom_function as custom_function
    from warploom.dsl.values.functions import abs as abs
    from warploom.dsl.values.functions import atan as atan
    from warploom.dsl.values.functions import ceil as ceil
    from warploom.dsl.values.functions import clamp as clamp
    from warploom.dsl.values.functions import cos as cos
    from warploom.dsl.values.functions import cosh as cosh
    from warploom.dsl.values.functions import erf as erf
    from warploom.dsl.values.functions import exp as exp
    from warploom.dsl.values.functions import exp2 as exp2
    from warploom.dsl.values.functions import expm1 as expm1
    from warploom.dsl.values.functions import floor as floor
    from warploom.dsl.values.functions import fmod as fmod
    from warploom.dsl.values.functions import isinf as isinf
    from warploom.dsl.values.functions import isnan as isnan
    from warploom.dsl.values.functions import log as log
    from warploom.dsl.values.functions import log1p as log1p
    from warploom.dsl.values.functions import log2 as log2
    from warploom.dsl.values.functions import max as max
    from warploom.dsl.values.functions import maximum as maximum
    from warploom.dsl.values.functions import mean as mean
    from warploom.dsl.values.functions import minimum as minimum
    from warploom.dsl.values.functions import rotate_half as rotate_half
    from warploom.dsl.values.functions import rotate_pairs as rotate_pairs
    from warploom.dsl.values.functions import rsqrt as rsqrt
    from warploom.dsl.values.functions import sigmoid as sigmoid
    from warploom.dsl.values.functions import sin as sin
    from warploom.dsl.values.functions import sinh as sinh
    from warploom.dsl.values.functions import sqrt as sqrt
    from warploom.dsl.values.functions import sum as sum
    from warploom.dsl.values.functions import tan as tan
    from warploom.dsl.values.functions import tanh as tanh
    from warploom.dsl.values.functions import to_bool as to_bool
    from warploom.dsl.values.functions import to_float as to_float
    from warploom.dsl.values.functions import to_int as to_int
    from warploom.dsl.values.functions import where as where
    from warploom.dsl.values.position import Position as Position
    from warploom.dsl.variants.fields import Scalar as Scalar
    from warploom.dsl.variants.fields import Tensor as Tensor
    from warploom.dsl.variants.flex import flex as flex
    from warploom.dsl.variants.outputs import Output as Output
    from warploom.dsl.variants.variant import Variant as Variant
    from warploom.runtime.calls.ahead import build_kernels as build_kernels
    from warploom.runtime.calls.attention import attention as attention
    from warploom.runtime.calls.blocks import block_rows as block_rows
    from warploom.runtime.calls.compose import Level as Level
    from warploom.runtime.calls.compose import Part as Part
    from warploom.runtime.calls.compose import RadixTree as RadixTree
    from warploom.runtime.calls.compose import compose as compose
    from warploom.runtime.calls.draw import draw_mask as draw_mask
    from warploom.runtime.calls.flex_attention import flex_attention as flex_attention
    from warploom.runtime.calls.huggingface import register_huggingface as register_huggingface
    from warploom.runtime.calls.merge import merge_state as merge_state
    from warploom.runtime.calls.merge import merge_states as merge_states
    from warploom.runtime.inputs.aux_outputs import AuxOutput as AuxOutput
    from warploom.runtime.inputs.aux_outputs import AuxRequest as AuxRequest
    from warploom.runtime.traces.trace import trace as trace
    from warploom.runtime.wrappers.append import Appender as Appender
    from warploom.runtime.wrappers.append import append as append
    from warploom.runtime.wrappers.declaration import AppenderDeclaration as AppenderDeclaration
    from warploom.runtime.wrappers.declaration import AttentionDeclaration as AttentionDeclaration
    from warploom.runtime.wrappers.declaration import (
        PageSelectionDeclaration as PageSelectionDeclaration,
    )
    from warploom.runtime.wrappers.selection import PageSelectionWrapper as PageSelectionWrapper
    from warploom.runtime.wrappers.wrapper import AttentionWrapper as AttentionWrapper
    from warploom.scheduler.model.bounds import Bounds as Bounds
    from warploom.serving.graphs.buffers import GraphInput as GraphInput
    from warploom.serving.graphs.pieces import GraphPiece as GraphPiece
    from warploom.serving.graphs.pool import GraphPool as GraphPool
    from warploom.serving.virtual_memory.cache import VirtualCache as VirtualCache
    from warploom.serving.virtual_memory.pool import MemoryPool as MemoryPool

__version__ = "0.1.0"

_HOME = {
    "BlockSparse": "warploom.dsl.types.formats",
    "Composed": "warploom.dsl.types.formats",
    "Dense": "warploom.dsl.types.formats",
    "Paged": "warploom.dsl.types.formats",
    "Ragged": "warploom.dsl.types.formats",
    "Rolling": "warploom.dsl.types.formats",
    "custom_function": "warploom.dsl.values.custom",
    "Scalar": "warploom.dsl.variants.fields",
    "Tensor": "warploom.dsl.variants.fields",
    "abs": "warploom.dsl.values.functions",
    "atan": "warploom.dsl.values.functions",
    "ceil": "warploom.dsl.values.functions",
    "clamp": "warploom.dsl.values.functions",
    "cos": "warploom.dsl.values.functions",
    "cosh": "warploom.dsl.values.functions",
    "erf": "warploom.dsl.values.functions",
    "exp": "warploom.dsl.values.functions",
    "exp2": "warploom.dsl.values.functions",
    "expm1": "warploom.dsl.values.functions",
    "floor": "warploom.dsl.values.functions",
    "fmod": "warploom.dsl.values.functions",
    "isinf": "warploom.dsl.values.functions",
    "isnan": "warploom.dsl.values.functions",
    "log": "warploom.dsl.values.functions",
    "log1p": "warploom.dsl.values.functions",
    "log2": "warploom.dsl.values.functions",
    "max": "warploom.dsl.values.functions",
    "maximum": "warploom.dsl.values.functions",
    "mean": "warploom.dsl.values.functions",
    "minimum": "warploom.dsl.values.functions",
    "rotate_half": "warploom.dsl.values.functions",
    "rotate_pairs": "warploom.dsl.values.functions",
    "rsqrt": "warploom.dsl.values.functions",
    "sigmoid": "warploom.dsl.values.functions",
    "sin": "warploom.dsl.values.functions",
    "sinh": "warploom.dsl.values.functions",
    "sqrt": "warploom.dsl.values.functions",
    "sum": "warploom.dsl.values.functions",
    "tan": "warploom.dsl.values.functions",
    "tanh": "warploom.dsl.values.functions",
    "to_bool": "warploom.dsl.values.functions",
    "to_float": "warploom.dsl.values.functions",
    "to_int": "warploom.dsl.values.functions",
    "where": "warploom.dsl.values.functions",
    "flex": "warploom.dsl.variants.flex",
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
    "Output": "warploom.dsl.variants.outputs",
    "Position": "warploom.dsl.values.position",
    "reference_attention": "warploom.dsl.reference",
    "reference_batch": "warploom.dsl.reference",
    "Variant": "warploom.dsl.variants.variant",
    "register_huggingface": "warploom.runtime.calls.huggingface",
    "merge_state": "warploom.runtime.calls.merge",
    "merge_states": "warploom.runtime.calls.merge",
    "block_rows": "warploom.runtime.calls.blocks",
    "Level": "warploom.runtime.calls.compose",
    "Part": "warploom.runtime.calls.compose",
    "RadixTree": "warploom.runtime.calls.compose",
    "compose": "warploom.runtime.calls.compose",
    "reset_stats": "warploom.counters",
    "stats": "warploom.counters",
    "forbid_compilation": "warploom.codegen.build",
    "export_kernels": "warploom.codegen.archives.archive",
    "import_kernels": "warploom.codegen.archives.archive_import",
    "TileConfig": "warploom.codegen.source",
    "Bounds": "warploom.scheduler.model.bounds",
    "build_kernels": "warploom.runtime.calls.ahead",
    "AppenderDeclaration": "warploom.runtime.wrappers.declaration",
    "AttentionDeclaration": "warploom.runtime.wrappers.declaration",
    "PageSelectionDeclaration": "warploom.runtime.wrappers.declaration",
    "append": "warploom.runtime.wrappers.append",
    "Appender": "warploom.runtime.wrappers.append",
    "attention": "warploom.runtime.calls.attention",
    "AuxOutput": "warploom.runtime.inputs.aux_outputs",
    "AuxRequest": "warploom.runtime.inputs.aux_outputs",
    "AttentionWrapper": "warploom.runtime.wrappers.wrapper",
    "PageSelectionWrapper": "warploom.runtime.wrappers.selection",
    "draw_mask": "warploom.runtime.calls.draw",
    "flex_attention": "warploom.runtime.calls.flex_attention",
    "trace": "warploom.runtime.traces.trace",
    "GraphInput": "warploom.serving.graphs.buffers",
    "GraphPiece": "warploom.serving.graphs.pieces",
    "GraphPool": "warploom.serving.graphs.pool",
    "MemoryPool": "warploom.serving.virtual_memory.pool",
    "VirtualCache": "warploom.serving.virtual_memory.cache",
}

# modules that users need no import of their own for
_MODULES = (
    "deployment_errors",
    "distributed",
    "engine_errors",
    "errors",
    "graph_errors",
    "memory_errors",
    "prefetch",
    "prefetch_errors",
    "recommendation",
    "recommendation_errors",
    "simulate",
    "simulation_errors",
    "testing",
)

if not TYPE_CHECKING:  # there the imports above say it
    # `from warploom import *` leaves Python's own abs, max and sum alone
    __all__ = sorted(name for name in _HOME if not hasattr(builtins, name))


def __getattr__(name: str) -> object:
    try:
        if name in _HOME:
            return look_up(_HOME[name], name)
        if name in _MODULES:
            return import_module(f"warploom.{name}")
    except ModuleNotFoundError as error:
        raise not_installed(error, __file__) from None
    raise no_attribute(__name__, name, _HOME)


def __dir__() -> list[str]:
    own = (name for name in globals() if name.startswith("__"))
    return sorted({*own, *_HOME, *_MODULES})  # and no modules that were imported by the way
