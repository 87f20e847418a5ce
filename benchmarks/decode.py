"""Decode over a paged cache, 32 query and 8 key/value heads of 128, bf16: GB/s beside the peers.

    python benchmarks/decode.py [--quick] [--only warploom,FlexAttention] [--out FOLDER]

Work is what must be moved: keys and values once, queries and outputs once. SDPA and FlexAttention
have no page table; they read a dense copy of the same keys and values.
"""

from __future__ import annotations

import torch
from harness import (
    QUICK,
    Case,
    Check,
    Effort,
    Report,
    arguments,
    chosen,
    copies_needed,
    copy_ceiling,
    time_one,
)
from peers import DECODE, Decode

PAGE = 16
CASES = ((16, 1024), (16, 8192), (128, 1024), (128, 8192))
TOLERANCE = 1e-2  # relative, bf16 against float64


def make_inputs(
    batch: int, length: int, heads: tuple[int, int, int], indices: torch.Tensor, device: str
) -> Decode:
    """Random caches behind one page table, and their dense copies. `heads`: query, kv, dim."""
    q_heads, kv_heads, dim = heads
    shape = (len(indices), PAGE, kv_heads, dim)
    caches = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2)]
    order = indices.long().to(device)
    k, v = (
        cache[order].view(batch, length, kv_heads, dim).transpose(1, 2).contiguous()
        for cache in caches
    )
    return Decode(
        q=torch.randn(batch, q_heads, dim, device=device, dtype=torch.bfloat16),
        k_cache=caches[0],
        v_cache=caches[1],
        indptr=torch.arange(batch + 1, dtype=torch.int32) * (length // PAGE),
        indices=indices,
        last_page_len=torch.full((batch,), PAGE, dtype=torch.int32),
        k=k,
        v=v,
    )


def check_against_float64(inputs: Decode) -> Check:
    """Compares all heads of the first, middle and last request."""
    batch, q_heads, dim = inputs.q.shape
    requests = sorted({0, batch // 2, batch - 1})
    group = q_heads // inputs.k.shape[1]

    def truth(request: int) -> torch.Tensor:
        k, v = (x[request].double().repeat_interleave(group, 0) for x in (inputs.k, inputs.v))
        logits = torch.einsum("hd,hnd->hn", inputs.q[request].double(), k) * dim**-0.5
        return torch.einsum("hn,hnd->hd", logits.softmax(-1), v)

    expected = torch.stack([truth(request) for request in requests])

    def relative_error(output: torch.Tensor) -> float:
        return float((output[requests].double() - expected).norm() / expected.norm())

    return Check(relative_error, TOLERANCE)


def case_of(batch: int, length: int, heads: tuple[int, int, int]) -> Case:
    q_heads, kv_heads, dim = heads
    cache = 2 * batch * length * kv_heads * dim * 2
    return Case(
        name=f"batch {batch}, {length} keys",
        work=(cache + 2 * batch * q_heads * dim * 2) / 1e9,
        unit="GB/s",
        input_bytes=cache,
        params={
            "batch": batch, "q_heads": q_heads, "kv_heads": kv_heads, "length": length,
            "head_dim": dim, "page_size": PAGE, "dtype": "bfloat16",
        },
    )  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    options = arguments(__doc__ or "", argv)
    device: torch.device = options.device
    effort = QUICK if options.quick else Effort()
    on_gpu = device.type == "cuda"
    heads = (32, 8, 128) if on_gpu else (4, 2, 64)
    cases = CASES if on_gpu else ((2, 128),)
    torch.manual_seed(0)
    report = Report("decode", device, options.out)
    report.add(copy_ceiling("decode", device, effort))
    for batch, length in cases[::2] if options.quick else cases:
        case = case_of(batch, length, heads)
        indices = torch.randperm(batch * length // PAGE).to(torch.int32)  # one plan for all copies
        inputs = [
            make_inputs(batch, length, heads, indices, str(device))
            for _ in range(copies_needed(case, device))
        ]
        check = check_against_float64(inputs[0])
        for implementation in chosen(DECODE, options.only):
            report.add(time_one("decode", case, implementation, inputs, check, effort, device))
    report.finish()


if __name__ == "__main__":
    main()
