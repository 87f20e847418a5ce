"""Several documents packed into one sequence, each seeing only itself."""

from __future__ import annotations

from typing import Any

from warploom.dsl.values.position import Position
from warploom.dsl.values.symbols import Value
from warploom.dsl.variants.fields import Tensor
from warploom.dsl.variants.variant import Variant


class DocumentMask(Variant):
    """Visible if query and key carry the same document number. Chain it with `Causal()` as
    needed.

    Args:
        document_ids: [batch, kv_pos] int32, the document of each token; queries are the last
            tokens. None leaves it to be given at run time.
    """

    document_ids = Tensor("int32", ("batch", "kv_pos"))

    def __init__(self, document_ids: Any = None) -> None:
        if document_ids is not None:
            self.document_ids = document_ids

    def logits_mask(self, at: Position) -> Value:
        of_query = self.document_ids[at.batch, at.q_pos]
        return of_query == self.document_ids[at.batch, at.kv_pos]
