"""Upper bounds declared once, so that every buffer has its final size before the first plan."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from warploom.dsl.types.limits import MAX_LENGTH
from warploom.errors import ArgumentError, BadLength, BoundsExceeded
from warploom.scheduler.model.layout import SEGMENT, Records

INT32_MAX = 2**31 - 1
_LENGTHS = ("max_requests", "max_q_rows", "max_kv_len")  # these bound positions of functors


@dataclass(frozen=True)
class Bounds:
    """The largest batch that will ever be planned (FlashInfer, appendix D.3).

    The first three are at most 2^28, which positions of functors rely on; the others 2^31 - 1.

    Attributes:
        max_requests: requests in a batch.
        max_q_rows: sum of the segments' query rows, before heads are fused.
        max_kv_len: keys of the longest request. Where a segment lists whole blocks, also the
            longest list, counted in keys.
        max_blocks: entries of the block list (indexed formats).
        max_segments: segments; None means one for each request. Block-sparse formats have more.
        max_levels: parts that a request of a composed format may read, its own included. If more
            prefixes follow each other, only some of them become parts.

    Raises:
        ArgumentError: a number that is too small or too large.
    """

    max_requests: int
    max_q_rows: int
    max_kv_len: int
    max_blocks: int = 0
    max_segments: int | None = None
    max_levels: int = 2

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name == "max_segments":
                continue
            least = 1 if field.name == "max_levels" else 0  # a request's own part is one
            most = MAX_LENGTH if field.name in _LENGTHS else INT32_MAX
            if not isinstance(value, (int, np.integer)) or not least <= value <= most:
                reason = f"is {value!r}; expected an integer from {least} to {most}"
                raise ArgumentError(name=f"Bounds.{field.name}", reason=reason)

    @property
    def segments(self) -> int:
        """Largest number of segments."""
        return self.max_requests if self.max_segments is None else self.max_segments

    @classmethod
    def of(cls, segments: Records, num_blocks: int = 0) -> Bounds:
        """The smallest bounds that admit this batch.

        Args:
            segments: SEGMENT records.
            num_blocks: entries of the block list.
        """
        return cls(**_sizes(segments, num_blocks))

    def admit(self, segments: Records, num_blocks: int) -> None:
        """Checks a batch against the bounds.

        Args:
            segments: SEGMENT records.
            num_blocks: entries of the block list.

        Raises:
            BoundsExceeded: names the first bound that is exceeded, and both numbers.
        """
        sizes = _sizes(segments, num_blocks)
        for name, got in sizes.items():
            bound = self.segments if name == "max_segments" else getattr(self, name)
            if got > bound:
                raise BoundsExceeded(name=name, got=got, bound=bound)


def _sizes(segments: Records, num_blocks: int) -> dict[str, int]:
    if len(segments) == 0:
        return dict.fromkeys(("max_requests", "max_q_rows", "max_kv_len", "max_segments"), 0) | {
            "max_blocks": num_blocks
        }
    return {
        "max_requests": int(segments["batch"].max()) + 1,
        "max_q_rows": int(segments["num_q"].sum(dtype=np.int64)),
        "max_kv_len": int(max(segments["kv_len"].max(), segments["kv_count"].max())),
        "max_blocks": num_blocks,
        "max_segments": len(segments),
    }


def check_segments(segments: Records, group_size: int) -> None:
    """Refuses records that no kernel can process: negative fields, or positions beyond int32.

    Raises:
        BadLength: names the field, the segment and the value.
    """
    matrix = segments.view(np.int32).reshape(len(segments), len(SEGMENT.fields))
    if len(matrix) == 0:
        return
    if matrix.min() < 0:
        index, column = np.argwhere(matrix < 0)[0].tolist()
        name = f"segments.{SEGMENT.fields[column][0]}"
        raise BadLength(name=name, index=index, value=matrix[index, column], expected="at least 0")
    # Row r of a tile is computed in int32, up to one tile past the end.
    for field, limit in (
        ("num_q", min(MAX_LENGTH, (INT32_MAX - 256) // group_size)),
        ("kv_count", MAX_LENGTH),
        ("q_len", MAX_LENGTH),
        ("kv_len", MAX_LENGTH),
    ):
        index = int(segments[field].argmax())
        if segments[field][index] > limit:
            raise BadLength(
                name=f"segments.{field}",
                index=index,
                value=segments[field][index],
                expected=f"at most {limit}, so that positions fit int32",
            )
