"""What transformers calls for each layer of a step of continuous batching."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from warploom.dsl.library.attention_sink import AttentionSink
from warploom.dsl.library.causal import Causal
from warploom.dsl.library.sliding_window import SlidingWindow
from warploom.dsl.library.soft_cap import SoftCap
from warploom.dsl.types.formats import KVFormat, Paged, Ragged
from warploom.dsl.variants.variant import Variant
from warploom.engine_errors import UnsupportedByEngine
from warploom.engines.transformers import NAME_BY_TABLES
from warploom.engines.transformers.decoding import Decodes, bounds_of, plans_on
from warploom.engines.transformers.masks import MaskOnDemand
from warploom.runtime.calls import huggingface
from warploom.runtime.wrappers.wrapper import AttentionWrapper
from warploom.scheduler.bounds import Bounds


def attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | MaskOnDemand | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Write the new tokens of a step to the paged cache, and attend to it.

    Args:
        module: the layer.
        query: [1, q_heads, rows, head_dim], the rows of all requests.
        key, value: [1, kv_heads, rows, head_dim].
        attention_mask: what `make_mask_or_none` returned; without effect in continuous batching.
        dropout: must be 0.
        scaling: factor of q.k; 1/sqrt(head_dim) by default.
        sliding_window: keys that a query sees, its own included.
        softcap: bound of the logits.
        s_aux: [q_heads] learned sink logits.
        cache: the `PagedAttentionCache`; without one this is `attn_implementation="warploom"`.
        **kwargs: lengths and indices of the step, from transformers.

    Returns:
        [1, rows, q_heads, head_dim], and None for the weights.

    Raises:
        UnsupportedByEngine: dropout, a mask beside the paged cache, or capture of a CUDA graph.
    """
    if isinstance(attention_mask, MaskOnDemand):
        attention_mask = attention_mask.mask if cache is None else None
    if cache is None:
        return huggingface.attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
            sliding_window=sliding_window, softcap=softcap, s_aux=s_aux, **kwargs,
        )  # fmt: skip
    _refuse(dropout, attention_mask)
    if value.shape[3] % 8 or query.shape[3] % 8:
        raise _unsupported(f"heads of {query.shape[3]} lanes", "kernels take multiples of 8")
    call = _Call(
        query[0].transpose(0, 1),
        query.shape[3] ** -0.5 if scaling is None else scaling,
        sliding_window,
        softcap,
        None if s_aux is None else s_aux.float(),
    )
    out = _of_cache(cache).attend(module.layer_idx, call, key, value, cache, kwargs)
    return out.unsqueeze(0), None


@dataclass(frozen=True)
class _Call:
    """Queries of a layer [rows, q_heads, head_dim], and what it computes."""

    query: torch.Tensor
    scaling: float
    window: int | None
    cap: float | None
    sink: torch.Tensor | None

    @property
    def variant(self) -> Variant:
        made: Variant = Causal()
        if self.cap is not None:
            made = SoftCap(self.cap) & made
        if self.window is not None:
            made = made & SlidingWindow(self.window - 1)
        return made if self.sink is None else made & AttentionSink()

    @property
    def inputs(self) -> dict[str, Any]:
        """Values of the variant's fields."""
        return {} if self.sink is None else {"sink": self.sink}


@dataclass
class _Planned:
    """A wrapper, the step that it was planned for last, and where that step's tokens are kept."""

    wrapper: AttentionWrapper
    step: object = None
    place: tuple[torch.Tensor, torch.Tensor] | None = None  # page and slot of each new token
    decodes: Decodes | None = None  # if the device planned
    is_captured: bool = False  # the plan lies in a CUDA graph, and holds for its replays alone


@dataclass
class _Attending:
    """The wrappers of one cache: one for each kind of layer and storage, planned once a step."""

    made: dict[Hashable, _Planned] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        call: _Call,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: Any,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """Layers that keep all tokens read pages where they lie; others what the cache returns.

        A cache for sliding windows is a ring, whose oldest tokens the new ones overwrite. Its
        keys are put in order by transformers, and so are those of steps that read nothing old.
        Steps that only decode come with block tables on some devices, and without lists then; a
        GPU plans these by itself.
        """
        allocator = cache.layer_to_allocator[layer]
        step = kwargs["read_index"]  # a new list in each step, the same in all of its layers
        tables = kwargs.get("block_table")
        if tables is not None and plans_on(call.query.device):
            kv = kwargs["cu_seq_lens_k"][allocator.layer_type]
            lengths = kv, tables[allocator.index]
            return self._decode(call, (key, value), allocator, layer, step, lengths)
        _refuse_capture(call.query)
        read, write = step[allocator.index], kwargs["write_index"][allocator.index]
        qo, kv = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"][allocator.layer_type]
        if tables is not None or (allocator.layer_type == "full_attention" and len(read)):
            page = allocator.tokens_per_page
            k, v = allocator.get_cache_for_block_table(layer)
            planned = self._wrapper(call, Paged(page), k.shape[2])
            if planned.step is not step:
                lens = _on_host(kv)
                if tables is None:
                    planned.place, lists = (write // page, write % page), _pages(lens, read, page)
                else:
                    planned.place, lists = _tabled(lens, tables[allocator.index], page)
                planned.wrapper.plan(_on_host(qo), *lists)
            if planned.place is not None:
                new = len(planned.place[0])
                k[planned.place], v[planned.place] = (x[0, :, :new].transpose(0, 1)
                                                      for x in (key, value))  # fmt: skip
        else:
            key, value = cache.update(key, value, layer, dict(kwargs))
            k, v = (x[0].transpose(0, 1) for x in (key, value))
            planned = self._wrapper(call, Ragged(), k.shape[1])
            if planned.step is not step:
                planned.wrapper.plan(_on_host(qo), _on_host(kv))
        planned.step = step
        rows = planned.wrapper.planned.batch.q_rows if planned.wrapper.planned else len(call.query)
        out = torch.empty_like(call.query, memory_format=torch.contiguous_format)
        out[rows:].zero_()  # of rows that only fill the batch
        planned.wrapper.run(call.query[:rows], (k, v), out=out[:rows], **call.inputs)
        return out

    def _decode(
        self,
        call: _Call,
        new: tuple[torch.Tensor, torch.Tensor],
        allocator: Any,
        layer: int,
        step: object,
        lengths: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """A step of decodes, planned by the device from block tables.

        A step is captured after it has run once, so that nothing is compiled or allocated then;
        and it is planned again then, for its replays.

        Args:
            call: queries.
            new: keys and values, as `attention_forward` takes them.
            allocator: knows where they are kept.
            layer: its number.
            step: the same object in all layers of a step.
            lengths: see `Decodes.of`.
        """
        page = allocator.tokens_per_page
        k, v = allocator.get_cache_for_block_table(layer)
        bounds = bounds_of(lengths[1], page)
        planned = self._wrapper(call, Paged(page), k.shape[2], bounds)
        is_captured = _is_captured(call.query)
        if planned.step is not step or planned.is_captured != is_captured:
            planned.step = None  # in case that it is refused
            planned.decodes = Decodes.of(*lengths, page)
            planned.wrapper.plan(*planned.decodes.lists, q_rows=len(call.query))
            planned.step, planned.is_captured = step, is_captured
        assert planned.decodes is not None
        for cache, tokens in zip((k, v), new, strict=True):
            planned.decodes.write(cache, tokens[0].transpose(0, 1))
        out = torch.empty_like(call.query, memory_format=torch.contiguous_format)
        planned.wrapper.run(call.query, (k, v), out=out, **call.inputs)
        return out

    def _wrapper(
        self, call: _Call, stored: KVFormat, kv_heads: int, bounds: Bounds | None = None
    ) -> _Planned:
        _, q_heads, head_dim = call.query.shape
        key = (stored, q_heads, kv_heads, head_dim, call.scaling, call.window, call.cap,
               call.sink is not None, bounds)  # fmt: skip
        if key not in self.made:
            wrapper = AttentionWrapper(
                call.variant, kv_format=stored, num_q_heads=q_heads, num_kv_heads=kv_heads,
                head_dim=head_dim, sm_scale=call.scaling, dtype=call.query.dtype,
                device=call.query.device, bounds=bounds, cuda_graph=bounds is not None,
            )  # fmt: skip
            self.made[key] = _Planned(wrapper)
        return self.made[key]


_ATTENDING: WeakKeyDictionary[Any, _Attending] = WeakKeyDictionary()


def _of_cache(cache: Any) -> _Attending:
    found = _ATTENDING.get(cache)
    if found is None:
        found = _ATTENDING[cache] = _Attending()
    return found


def _on_host(indptr: torch.Tensor) -> np.ndarray[Any, Any]:
    """Waits for the device, once for each plan."""
    return indptr.cpu().numpy().astype(np.int32)


def _pages(
    indptr: np.ndarray[Any, Any], read: torch.Tensor, page: int
) -> tuple[np.ndarray[Any, Any], torch.Tensor, np.ndarray[Any, Any]]:
    """kv_indptr, kv_indices and last_page_len of requests.

    Args:
        indptr: [requests + 1], in tokens.
        read: places of all tokens in the cache, in which those of a page follow each other.
        page: tokens in a page.
    """
    lens = np.diff(indptr)
    used = -(-lens // page)
    pages = np.zeros(len(indptr), np.int32)
    np.cumsum(used, out=pages[1:])
    first = np.repeat(indptr[:-1] - page * pages[:-1], used) + page * np.arange(pages[-1])
    places = read[torch.from_numpy(first).to(read.device)] // page
    return pages, places.int(), (lens - 1) % page + 1


def _tabled(
    indptr: np.ndarray[Any, Any], table: torch.Tensor, page: int
) -> tuple[
    tuple[torch.Tensor, torch.Tensor],
    tuple[np.ndarray[Any, Any], torch.Tensor, np.ndarray[Any, Any]],
]:
    """Page and slot of each request's newest token, and what `_pages` returns.

    Requests that only fill the batch come last, have no tokens, and are written nowhere.

    Args:
        indptr: [requests + 1], in tokens.
        table: [requests, most pages] int32, the pages of each request.
        page: tokens in a page.
    """
    lens = np.diff(indptr)
    used = -(-lens // page)
    pages = np.zeros(len(indptr), np.int32)
    np.cumsum(used, out=pages[1:])
    rows = table.shape[1] * np.arange(len(lens))
    entries = np.repeat(rows - pages[:-1], used) + np.arange(pages[-1])
    newest = (rows + used - 1)[lens > 0]
    slots = torch.from_numpy((lens[lens > 0] - 1) % page).to(table.device, torch.int64)
    flat = table.flatten()
    listed, last = (flat[torch.from_numpy(x).to(table.device)] for x in (entries, newest))
    return (last.long(), slots), (pages, listed, (lens - 1) % page + 1)


def _refuse(dropout: float, mask: torch.Tensor | None) -> None:
    if dropout != 0.0:
        raise _unsupported("dropout", "it serves inference")
    if mask is not None:
        raise _unsupported("a mask of the caller's", "requests see what their model says")


def _refuse_capture(query: torch.Tensor) -> None:
    if _is_captured(query):
        reason = "the host plans steps that read prompts, which a replay would not do again"
        remedy = (
            "Pass ContinuousBatchingConfig(use_cuda_graph=(False, True)): graphs for steps that "
            f"only decode, under the name {NAME_BY_TABLES!r}. Or use_cuda_graph=False."
        )
        raise _unsupported("CUDA graphs of other steps than decodes", reason, remedy)


def _is_captured(query: torch.Tensor) -> bool:
    return query.is_cuda and torch.cuda.is_current_stream_capturing()


def _unsupported(
    what: str, reason: str, remedy: str = "Load the model with attn_implementation='sdpa'."
) -> UnsupportedByEngine:
    engine = "transformers' continuous batching"
    return UnsupportedByEngine(what=what, engine=engine, reason=reason, remedy=remedy)
