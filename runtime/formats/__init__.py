"""KV formats at run time: an object for each that users declare, in a module of its own.

Everything that differs between formats is here; the rest of the runtime asks `format_of`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from warploom.dsl.types import formats as declared
from warploom.runtime.formats.base import Format
from warploom.runtime.formats.batch import Arguments, HostBatch
from warploom.runtime.formats.block_sparse import BlockSparse
from warploom.runtime.formats.composed import Composed
from warploom.runtime.formats.dense import Dense
from warploom.runtime.formats.paged import Paged
from warploom.runtime.formats.ragged import Ragged
from warploom.runtime.formats.rolling import Rolling

_FORMATS: dict[type[declared.KVFormat], type[Format[Any]]] = {
    declared.Dense: Dense,
    declared.Ragged: Ragged,
    declared.Paged: Paged,
    declared.Composed: Composed,
    declared.BlockSparse: BlockSparse,
    declared.Rolling: Rolling,
}


@lru_cache(maxsize=256)
def format_of(kv_format: declared.KVFormat) -> Format[Any]:
    """What a declared format does at run time."""
    return _FORMATS[type(kv_format)](kv_format)


def make_batch(
    kv_format: declared.KVFormat | Format[Any],
    qo_indptr: Any,
    kv_indptr: Any,
    kv_indices: Any = None,
    last_page_len: Any = None,
    kv_lens: Any = None,
    *,
    rows_name: str = "qo_indptr",
) -> HostBatch:
    """Check the plan arguments of a format and lower them.

    Args:
        kv_format: the format that the wrapper was declared for, or its object.
        qo_indptr: int32 [requests + 1], where each request's query rows begin.
        kv_indptr, kv_indices, last_page_len, kv_lens: as the format wants them; see
            `AttentionWrapper.plan`.
        rows_name: what the caller calls `qo_indptr`, for messages.

    Raises:
        BadIndptr, BadLength, IndexOutOfRange, WrongShape, WrongDType: see `warploom.errors`.
        ArgumentError: an argument that this format does not take, or lacks.
    """
    given = Arguments(qo_indptr, kv_indptr, kv_indices, last_page_len, kv_lens)
    found = kv_format if isinstance(kv_format, Format) else format_of(kv_format)
    return found.make_batch(given, rows_name)
