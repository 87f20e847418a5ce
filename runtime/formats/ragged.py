"""Ragged storage: the tokens of all requests one behind the other, [token, head, dim]."""

from __future__ import annotations

import numpy as np

from warploom.dsl.types.formats import Ragged as Declared
from warploom.runtime.formats.base import Affine, Drawn, Stored, whole_requests
from warploom.runtime.formats.batch import Arguments, Arrays, HostBatch
from warploom.runtime.formats.lists import NO_INDICES, Int32s, as_indptr, indptr, segments_of


class Ragged(Affine[Declared]):
    """See `warploom.Ragged`."""

    plans_on_device = True

    def lower(self, qo: Int32s, given: Arguments) -> HostBatch:
        kv = indptr(given.kv_indptr, "kv_indptr", entries=len(qo))
        segments = segments_of(qo, np.diff(kv))
        segments["kv_row"] = kv[:-1]
        arrays = Arrays(segments, NO_INDICES, np.diff(qo), np.diff(kv))
        return HostBatch(int(qo[-1]), int(kv[-1]), arrays)

    @property
    def native_storage(self) -> int | None:
        return 1

    @property
    def obstacle_to_pretransform(self) -> str | None:
        return None

    def store(self, drawn: Drawn) -> Stored:
        plan = {"kv_indptr": as_indptr(drawn.lengths)}
        k, v = np.concatenate(drawn.k), np.concatenate(drawn.v)
        return Stored(k, v, plan, whole_requests(drawn))
