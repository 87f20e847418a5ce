"""What a sender offers: a request, and where its pages lie."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Offer:
    """One request that is handed over.

    Attributes:
        id: of the hand-over.
        request: what the sender tells of it.
        pages: how many.
        caches: shapes and types of the sender's.
        kind: of the carrier.
        where: the pages lie, by the carrier.
    """

    id: str
    request: dict[str, Any]
    pages: int
    caches: list[Any]
    kind: str
    where: dict[str, str]

    def packed(self) -> bytes:
        """As a message; raises TypeError if the request has what JSON cannot say."""
        return json.dumps(vars(self)).encode()

    @classmethod
    def unpacked(cls, message: bytes) -> Offer:
        """Of a message; raises ValueError if it is none of an offer."""
        fields = json.loads(message)
        types = {"id": str, "request": dict, "pages": int, "caches": list, "kind": str,
                 "where": dict}  # fmt: skip
        if not isinstance(fields, dict) or fields.keys() != types.keys():
            raise ValueError("it has other fields than an offer")
        for name, of in types.items():
            if type(fields[name]) is not of:  # which a bool is not, and would be an int
                raise ValueError(f"{name} is {fields[name]!r}")
        if fields["pages"] < 0:
            raise ValueError(f"it is of {fields['pages']} pages")
        return cls(**fields)
