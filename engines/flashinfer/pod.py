"""`BatchPODWithPagedKVCacheWrapper`: prefills and decodes of one cache, as one plan and launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from warploom.engines.flashinfer.declared import Declaration, Types, paged_format
from warploom.engines.flashinfer.facade import (
    Facade,
    RunScales,
    Step,
    takes_a_new_batch,
    workspace_device,
)
from warploom.engines.flashinfer.masks import Masks
from warploom.engines.flashinfer.refusals import refuse
from warploom.engines.flashinfer.tables import (
    Pages,
    as_tensor,
    check_lists,
    host,
    lengths_of,
    page_lists,
    unpacked,
)
from warploom.engines.flashinfer.variants import Scores, Shaping
from warploom.engines.flashinfer.words import Words, in_words, in_words_of_its_class
from warploom.errors import ArgumentError
from warploom.runtime.tensors.tensors import as_torch

__all__ = ["BatchPODWithPagedKVCacheWrapper"]


class BatchPODWithPagedKVCacheWrapper(Facade):
    """FlashInfer's wrapper of this name: two batches of one cache become one of warploom's.

    Args:
        float_workspace_buffer: any tensor on the device that is to attend. It is not used: wrappers
            allocate what they need.
        kv_layout: "NHD" or "HND", of the cache.

    Raises:
        ArgumentError: no workspace, or another layout.
    """

    words: ClassVar[Words] = {"kv_indices": "(kv_indices_p + kv_indices_d)"}

    def __init__(self, float_workspace_buffer: Any, kv_layout: str = "NHD") -> None:
        super().__init__(workspace_device(float_workspace_buffer), kv_layout)
        self._rows = (0, 0)
        self._lens: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None = None
        self._prefills = 0
        self._is_causal = True  # what the last run was given

    @in_words_of_its_class
    @takes_a_new_batch
    def plan(
        self,
        qo_indptr_p: Any,
        kv_indptr_p: Any,
        kv_indices_p: Any,
        last_page_len_p: Any,
        qo_indptr_d: Any,
        kv_indptr_d: Any,
        kv_indices_d: Any,
        last_page_len_d: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Plan both batches on the host; index arrays on a device are waited for.

        Args:
            qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p: the prefills, as
                `BatchPrefillWithPagedKVCacheWrapper.plan` takes them, all int32.
            qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d: the decodes, likewise.
            num_qo_heads, num_kv_heads, head_dim, page_size: of q and of the cache.
            pos_encoding_mode: "NONE", "ROPE_LLAMA" or "ALIBI".
            window_left: keys before a row's own that it sees; -1 for all.
            q_data_type, kv_data_type: types or their names.
            data_type: for those of the two that are None.
            sm_scale: factor of q.k; 1/sqrt(head_dim) by default.
            rope_scale, rope_theta: of "ROPE_LLAMA"; 1 and 1e4 by default.
            non_blocking: without effect.

        Raises:
            What `AttentionWrapper` and its `plan` raise.
            UnsupportedByEngine: types without a kernel.
        """
        del non_blocking
        if data_type is not None:
            q_data_type = data_type if q_data_type is None else q_data_type
            kv_data_type = data_type if kv_data_type is None else kv_data_type
        rows = host(qo_indptr_p), host(qo_indptr_d)
        pages = (
            page_lists(kv_indptr_p, kv_indices_p, last_page_len_p, None),
            page_lists(kv_indptr_d, kv_indices_d, last_page_len_d, None),
        )
        kv_format = paged_format(page_size, self.kv_layout)
        for half, begins, table in zip("pd", rows, pages, strict=True):
            words = {one: f"{one}_{half}" for one in ("qo_indptr", *Pages._fields)}
            in_words(**words)(check_lists)(begins, table, page_size)
        shaping = Shaping(
            self._is_causal, window_left, None, pos_encoding_mode, rope_scale, rope_theta
        )
        declaration = Declaration(
            _scores(shaping), kv_format, num_qo_heads, num_kv_heads,
            head_dim, None, Types.of(q_data_type, kv_data_type), sm_scale,
        )  # fmt: skip
        q_lens = np.concatenate([np.diff(x) for x in rows])
        kv_lens = np.concatenate([lengths_of(x, page_size) for x in pages])
        self._lens, self._prefills = (q_lens, kv_lens), len(rows[0]) - 1
        self._rows = int(rows[0][-1]), int(rows[1][-1])
        lists = (np.concatenate((rows[0], rows[0][-1] + rows[1][1:])), *_joined(*pages))
        self._plan(Step(declaration, shaping, lists))

    begin_forward = plan

    @in_words_of_its_class
    def run(
        self,
        q_p: Any,
        paged_kv_cache_p: Any,
        q_d: Any,
        paged_kv_cache_d: Any,
        custom_mask_p: Any = None,
        packed_custom_mask_p: Any = None,
        causal_p: bool = False,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        return_lse: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
    ) -> Any:
        """Attention of both batches, on the current stream.

        The batches are planned again where `causal_p` differs from that of the run before, and for
        each mask. Where q_d does not lie behind q_p in one tensor, both are copied.

        Args:
            q_p: [rows of prefills, num_qo_heads, head_dim].
            paged_kv_cache_p: (k, v), or one tensor [pages, 2, ...], as of the paged wrappers.
            q_d: [rows of decodes, num_qo_heads, head_dim].
            paged_kv_cache_d: the same cache.
            custom_mask_p: flags of all prefills one after the other, each [rows, keys], in place of
                `causal_p`.
            packed_custom_mask_p: its bits, uint8, little-endian, each prefill in whole bytes.
            causal_p: rows of prefills see no key after their own.
            q_scale, k_scale: numbers that q.k of decodes is multiplied with; None is 1. That of
                prefills stays as it is, as in FlashInfer.
            v_scale: likewise of the output of decodes.
            return_lse: return the log-sum-exps, too, in base 2.
            use_fp16_qk_reduction, enable_pdl: without effect.

        Returns:
            (output of prefills, output of decodes), shaped like q_p and q_d; with `return_lse`
            ((outputs), (log-sum-exps)), each float32 [rows, num_qo_heads].

        Raises:
            What `AttentionWrapper.run` raises.
            ArgumentError: two caches, other rows than planned, or a scale that is not above 0.
            UnsupportedByEngine: `causal_p` beside decodes of several rows, or a scale of several
                numbers.
        """
        del use_fp16_qk_reduction, enable_pdl
        _check_one_cache(paged_kv_cache_p, paged_kv_cache_d)
        q_p, q_d = as_torch(q_p, "q_p"), as_torch(q_d, "q_d")
        self._planned()
        if (len(q_p), len(q_d)) != self._rows:
            reason = f"have {len(q_p)} and {len(q_d)} rows; plan() was given {self._rows}"
            raise ArgumentError(name="q_p and q_d", reason=reason)
        self._plan_mask(custom_mask_p, packed_custom_mask_p, bool(causal_p))
        cache = unpacked(paged_kv_cache_p, self.kv_layout)
        scales = RunScales.of(q_scale, k_scale, v_scale)
        found = self._attend(
            _joined_rows(q_p, q_d), cache, return_lse=return_lse, scales=scales,
            first_decode=self._prefills,
        )  # fmt: skip
        halves = [x.split(self._rows) for x in (found if return_lse else (found,))]
        return (halves[0], halves[1]) if return_lse else halves[0]

    def _plan_mask(self, custom: Any, packed: Any, is_causal: bool) -> None:
        """Plan again where prefills see other keys than those of the run before."""
        step, (q_lens, kv_lens), first = self._planned(), self._planned_lens(), self._prefills
        if custom is None and packed is None:
            if is_causal and (q_lens[first:] > 1).any():
                reason = "decodes see all keys there, and those of several rows would not"
                refuse("causal_p beside decodes of several rows", reason, "Plan them as prefills.")
            shaping = replace(step.shaping, causal=is_causal, is_masked=False)
            tensors: dict[str, Any] = {}
        else:
            bits = Masks(torch.device("cpu")).inputs(
                custom, packed, q_lens[:first], kv_lens[:first]
            )
            shaping = replace(step.shaping, causal=False, is_masked=True)
            tensors = _seen_behind(bits, q_lens[first:] * kv_lens[first:], self.device)
        if shaping != step.shaping or tensors:
            declaration = replace(step.declaration, scores=_scores(shaping))
            self._plan(replace(step, declaration=declaration, shaping=shaping, tensors=tensors))
        self._is_causal = is_causal if not tensors else self._is_causal

    def _planned_lens(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        assert self._lens is not None  # there is a plan
        return self._lens


def _scores(shaping: Shaping) -> Scores:
    return replace(shaping.scores, scales_decodes=True)


def _seen_behind(
    bits: dict[str, Any], pairs: np.ndarray[Any, Any], device: torch.device
) -> dict[str, Any]:
    """Bits of the prefills, and behind them those of decodes, which see all keys."""
    begins = bits["mask_indptr"].cpu()
    sizes = torch.as_tensor(-(-pairs // 8)).int()
    packed = bits["packed_mask"].cpu()[: int(begins[-1])]
    spare = int(begins[-1]) + int(sizes.sum()) == 0
    ones = torch.full((int(sizes.sum()) + spare,), 255, dtype=torch.uint8)
    indptr = torch.cat((begins, begins[-1] + sizes.cumsum(0).int()))
    made = {"packed_mask": torch.cat((packed, ones)), "mask_indptr": indptr}
    return {name: x.to(device) for name, x in made.items()}


def _joined(p: Pages, d: Pages) -> Pages:
    """The lists of both, prefills first."""
    used = [as_tensor(x.kv_indices, "kv_indices")[: int(x.kv_indptr[-1])] for x in (p, d)]
    return Pages(
        np.concatenate((p.kv_indptr, p.kv_indptr[-1] + d.kv_indptr[1:])),
        torch.cat((used[0], used[1].to(used[0].device))),
        np.concatenate((p.last_page_len, d.last_page_len)),
    )


def _joined_rows(p: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """Both in one tensor, without a copy if the second lies behind the first."""
    alike = p.stride() == d.stride() and p.shape[1:] == d.shape[1:] and p.dtype == d.dtype
    end = p.storage_offset() + len(p) * p.stride(0)
    same = p.untyped_storage().data_ptr() == d.untyped_storage().data_ptr()
    if alike and same and d.storage_offset() == end:
        return p.as_strided((len(p) + len(d), *p.shape[1:]), p.stride(), p.storage_offset())
    return torch.cat((p, d))


def _check_one_cache(p: Any, d: Any) -> None:
    """Raises ArgumentError unless both are the same memory."""
    halves = [x if isinstance(x, (tuple, list)) else (x[:, 0], x[:, 1]) for x in (p, d)]
    places = [[(x.data_ptr(), x.shape, x.stride()) for x in half] for half in halves]
    if places[0] != places[1]:
        reason = (
            "is another cache than paged_kv_cache_p; one launch reads one cache. Give the same, or "
            "run the two by BatchPrefillWithPagedKVCacheWrapper and BatchDecodeWithPaged"
            "KVCacheWrapper"
        )
        raise ArgumentError(name="paged_kv_cache_d", reason=reason)
