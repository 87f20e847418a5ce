"""The small virtual caches on which refusals and faults are tried."""

from __future__ import annotations

from typing import Any

PAGE = 4096
SHAPE: dict[str, Any] = {
    "num_kv_heads": 2,
    "head_dim": 64,
    "dtype": "float32",
    "max_requests": 3,
    "max_tokens": 400,
    "page_size": 1,  # 8 tokens of 512 bytes to a page, for keys and for values
}
