"""`BlockSparseAttentionWrapper`: blocks of a matrix of queries by keys."""

from __future__ import annotations

from functools import partialmethod
from typing import Any, ClassVar

import numpy as np
import torch

from warploom.dsl.types.formats import BlockSparse
from warploom.dsl.types.limits import MAX_LENGTH
from warploom.engines.flashinfer.declared import Declaration, Types
from warploom.engines.flashinfer.facade import Facade, Step, takes_a_new_batch, workspace_device
from warploom.engines.flashinfer.masks import Masks
from warploom.engines.flashinfer.refusals import (
    checked_backend,
    checked_encoding,
    refuse,
    refuse_given,
)
from warploom.engines.flashinfer.tables import host
from warploom.engines.flashinfer.variants import Shaping
from warploom.engines.flashinfer.words import Words, in_words_of_its_class
from warploom.errors import ArgumentError, WrongShape
from warploom.runtime.declaring.declare import checked_count, checked_number
from warploom.runtime.tensors.tensors import as_torch

__all__ = ["BlockSparseAttentionWrapper", "convert_bsr_mask_layout"]

_POSITIONS = (
    "positions there count the blocks that a row of blocks has, not the matrix's columns",
    "Give a variant to warploom.AttentionWrapper(kv_format=warploom.BlockSparse(block=(R, C))).",
)


class BlockSparseAttentionWrapper(Facade):
    """FlashInfer's wrapper of this name, by `AttentionWrapper` over `warploom.BlockSparse`.

    Args:
        float_workspace_buffer: any tensor on the device that is to attend. It is not used: wrappers
            allocate what they need.
        backend: a hint of speed, without effect; "cudnn" is refused.

    Raises:
        ArgumentError: no workspace.
        UnsupportedByEngine: a back end that means something else.
    """

    words: ClassVar[Words] = {
        "kv_indptr": "indptr",
        "kv_indices": "indices",
        "kv_lens": "N",
        "qo_indptr[-1]": "M",
        "kv": "k and v",
        "packed_mask": "packed_mask",
    }

    def __init__(self, float_workspace_buffer: Any, backend: str = "auto") -> None:
        checked_backend(backend)
        super().__init__(workspace_device(float_workspace_buffer), "NHD")

    @in_words_of_its_class
    @takes_a_new_batch
    def plan(
        self,
        indptr: Any,
        indices: Any,
        M: int,
        N: int,
        R: int,
        C: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: Any = None,
        packed_mask: Any = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = "float16",
        non_blocking: bool = True,
        block_mask: Any = None,
    ) -> None:
        """Plan the matrix on the host; index arrays on a device are waited for.

        Args:
            indptr: int32 [ceil(M / R) + 1], where the blocks of each row of blocks begin.
            indices: int32, columns of blocks.
            M, N: rows and columns of the matrix, which need be no multiples of R and C.
            R, C: rows and columns of a block.
            num_qo_heads, num_kv_heads, head_dim: of q, k and v.
            mask: bools [blocks, R, C], in the order of `indices`: True where a row sees a key.
                M N bits are planned with.
            packed_mask: its bits, uint8, little-endian, for each row of blocks its rows over all of
                its blocks, in whole bytes; in place of mask.
            causal, pos_encoding_mode, rope_scale, rope_theta: refused, unless off.
            use_fp16_qk_reduction, non_blocking: without effect.
            logits_soft_cap: the bound of logits; None or 0 for none.
            sm_scale: factor of q.k; 1/sqrt(head_dim) by default.
            q_data_type, kv_data_type, o_data_type: types or their names. Outputs are converted from
                the type of q to o_data_type, which is float16 if left out, whatever q is.
            block_mask: refused.

        Raises:
            What `AttentionWrapper` and its `plan` raise.
            ArgumentError, WrongShape: no blocks, or a mask of another size.
            UnsupportedByEngine: types without a kernel, or an argument that is refused.
        """
        del use_fp16_qk_reduction, non_blocking, rope_scale, rope_theta
        refuse_given(block_mask=block_mask)
        is_masked = mask is not None or packed_mask is not None
        if causal and not is_masked:
            refuse("causal=True over blocks", *_POSITIONS)
        if checked_encoding(pos_encoding_mode) != "NONE":
            refuse(f"pos_encoding_mode={pos_encoding_mode!r} over blocks", *_POSITIONS)
        for name, given in (("M", M), ("N", N)):
            checked_number(name, given)
        for name, given in (("R", R), ("C", C)):
            checked_count(name, given, MAX_LENGTH)
        if indptr is None or indices is None:
            raise ArgumentError(name="indptr and indices", reason="are needed: they say the blocks")
        shaping = Shaping(logits_soft_cap=logits_soft_cap, is_masked=is_masked)
        tensors: dict[str, Any] = {}
        if is_masked:
            rows, columns = host(indptr), host(indices)
            blocks = _unpacked(packed_mask, rows, M, R, C) if packed_mask is not None else mask
            flags = _dense(as_torch(blocks, "mask"), rows, columns, (M, N), (R, C))
            lens = np.array([M]), np.array([N])
            tensors = Masks(self.device).inputs(flags, None, *lens)
        declaration = Declaration(
            shaping.scores, BlockSparse(block=(R, C)), num_qo_heads, num_kv_heads, head_dim, None,
            Types.of(q_data_type, kv_data_type, o_data_type), sm_scale,
        )  # fmt: skip
        self._plan(Step(declaration, shaping, ([0, M], indptr, indices, None), [N], tensors))

    begin_forward = plan

    @in_words_of_its_class
    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        scale_q: Any = None,
        scale_k: Any = None,
        scale_v: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Any:
        """Attention of the planned matrix, on the current stream.

        Args:
            q: [M, num_qo_heads, head_dim].
            k, v: [N, num_kv_heads, head_dim].
            scale_q, scale_k, scale_v: refused.
            out, lse: tensors to write to: shaped like q in o_data_type, and float32 [M,
                num_qo_heads]. `lse` is written with `return_lse` alone.
            return_lse: return the log-sum-exps, too, in base 2.
            enable_pdl: without effect.

        Returns:
            The output, shaped like q, or (output, log-sum-exps [M, num_qo_heads]).

        Raises:
            What `AttentionWrapper.run` raises.
            UnsupportedByEngine: a scale.
        """
        del enable_pdl
        refuse_given(scale_q=scale_q, scale_k=scale_k, scale_v=scale_v)
        return self._attend(q, (k, v), out=out, lse=lse, return_lse=return_lse)

    run_return_lse = partialmethod(run, return_lse=True)

    @in_words_of_its_class
    def forward(
        self,
        q: Any,
        k: Any,
        v: Any,
        scale_q: Any = None,
        scale_k: Any = None,
        scale_v: Any = None,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Any:
        """The older way: what shapes scores is given here, and replaces what `plan` was given.

        Arguments, results and errors are those of `plan` and `run`.
        """
        del use_fp16_qk_reduction, rope_scale, rope_theta
        if checked_encoding(pos_encoding_mode) != "NONE":
            refuse(f"pos_encoding_mode={pos_encoding_mode!r} over blocks", *_POSITIONS)
        with self._reshape(sm_scale, logits_soft_cap=logits_soft_cap):
            return self.run(q, k, v, scale_q, scale_k, scale_v)


def convert_bsr_mask_layout(mask: Any, indptr: Any) -> torch.Tensor:
    """Flags of blocks in the order in which masks of bits have them: row by row.

    Args:
        mask: bools [blocks, R, C], block after block.
        indptr: [rows of blocks + 1] integers, where the blocks of each row of blocks begin.

    Returns:
        [blocks R C]; each row of blocks has its R rows over all of its blocks.

    Raises:
        WrongShape: another number of axes, or of blocks than indptr says.
    """
    blocks, counts = as_torch(mask, "mask"), np.diff(host(indptr)).tolist()
    if blocks.dim() != 3 or len(blocks) != sum(counts):
        expected = f"[{sum(counts)}, R, C], as indptr has blocks"
        raise WrongShape(name="mask", got=tuple(blocks.shape), expected=expected)
    return torch.cat([one.transpose(0, 1).reshape(-1) for one in torch.split(blocks, counts)])


def _dense(
    blocks: torch.Tensor, indptr: np.ndarray[Any, Any], indices: np.ndarray[Any, Any],
    shape: tuple[int, int], block: tuple[int, int],
) -> torch.Tensor:  # fmt: skip
    """The whole matrix of flags, False outside of the blocks."""
    (m, n), (r, c) = shape, block
    high, wide = -(-m // r), -(-n // c)
    used = int(indptr[-1])
    if blocks.shape != (used, r, c):
        raise WrongShape(name="mask", got=tuple(blocks.shape), expected=f"({used}, {r}, {c})")
    if used and not 0 <= indices[:used].min() <= indices[:used].max() < wide:
        reason = f"has columns outside of 0 to {wide - 1}"
        raise ArgumentError(name="indices", reason=reason)
    flags = torch.zeros(high, r, wide, c, dtype=torch.bool, device=blocks.device)
    rows = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    at = (torch.as_tensor(x, device=blocks.device).long() for x in (rows, indices[:used]))
    row, column = at
    flags[row, :, column] = blocks.bool()
    return flags.reshape(high * r, wide * c)[:m, :n]


def _unpacked(packed: Any, indptr: np.ndarray[Any, Any], m: int, r: int, c: int) -> torch.Tensor:
    """Flags of each block [blocks, r, c] from bits of whole rows of blocks."""
    bits = host(packed)
    counts = np.diff(indptr)
    heights = np.minimum(r, m - r * np.arange(len(counts)))
    sizes = -(-heights * counts * c // 8)
    if bits.dtype != np.uint8 or len(bits) != sizes.sum():
        reason = f"has {len(bits)} bytes; expected {sizes.sum()} of uint8"
        raise ArgumentError(name="packed_mask", reason=reason)
    blocks = np.zeros((int(indptr[-1]), r, c), bool)
    for at, (first, count, high) in enumerate(zip(indptr, counts, heights, strict=False)):
        begin = int(sizes[:at].sum())
        flat = np.unpackbits(bits[begin : begin + int(sizes[at])], bitorder="little")
        rows = flat[: high * count * c].reshape(high, count, c)
        blocks[first : first + count, :high] = rows.transpose(1, 0, 2)
    return torch.as_tensor(blocks)
