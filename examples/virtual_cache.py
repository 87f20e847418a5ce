"""Two models share one pool of memory, and each request's keys lie in one piece at fixed addresses.

Memory is mapped as requests grow, ahead of the tokens that need it. The requests of the first model
end, and the second one, which is out of memory until then, takes their pages without a copy. The
page tables that kernels read have one entry for each request.
"""

from typing import Any

import rich
import torch

import warploom as wl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
HEADS, KV_HEADS, DIM = 8, 2, 64
SHAPE = {"num_kv_heads": KV_HEADS, "head_dim": DIM, "dtype": DTYPE}
POOL = 24 << 20  # bytes; pages have 2 MiB


def new_tokens(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, DIM, device=DEVICE, dtype=DTYPE)


def generate(cache: wl.VirtualCache, prompts: dict[str, int], steps: int) -> None:
    """Grow all requests together; each step's attention is compared with that over its own keys."""
    attention = wl.AttentionWrapper(
        wl.Causal(), kv_format=cache.kv_format, num_q_heads=HEADS, device=DEVICE, **SHAPE
    )
    rows = torch.arange(len(prompts) + 1, dtype=torch.int32)
    for request, tokens in prompts.items():
        cache.reserve(request, tokens)  # so many pages are this request's from now on
        cache.grow(request, tokens)  # and have addresses
        for x in cache.view(request):
            x.copy_(new_tokens(tokens, KV_HEADS))
    for _ in range(steps):
        for request in prompts:
            cache.grow(request, cache.length(request) + 1)
        tables = cache.tables(prompts)
        k, v, q = (new_tokens(len(prompts), heads) for heads in (KV_HEADS, KV_HEADS, HEADS))
        wl.append(k, v, cache.kv(), rows, **tables)
        attention.plan(rows, **tables)
        out = attention.run(q, cache.kv())
        cache.map_ahead(prompts, 64)  # while the device is at work
        for i, request in enumerate(prompts):
            k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in cache.view(request))
            weights = (torch.einsum("hd,thd->ht", q[i], k) * DIM**-0.5).softmax(-1)
            expected = torch.einsum("ht,thd->hd", weights, v)
            torch.testing.assert_close(out[i], expected, rtol=2e-2, atol=2e-2)


@torch.no_grad()
def main() -> None:
    sizes: dict[str, Any] = {**SHAPE, "max_requests": 16, "max_tokens": 32_768}
    with (
        wl.MemoryPool(POOL, DEVICE) as pool,
        wl.VirtualCache(pool, name="first", **sizes) as first,
        wl.VirtualCache(pool, name="second", **sizes, guaranteed_bytes=4 << 20) as second,
    ):
        address = first.kv()[0].data_ptr()
        generate(first, {"a": 3000, "b": 40, "c": 700}, steps=4)
        generate(second, {"x": 500}, steps=4)
        rich.print(pool)
        try:
            second.reserve("y", 20_000)
        except Exception as error:  # one of warploom.memory_errors, which says what to do
            print(f"refused: {error}\n")
        else:
            raise AssertionError("the first model has left room")
        for request in "abc":
            first.release(request)
        generate(second, {"y": 20_000}, steps=2)
        rich.print(pool)
        assert first.kv()[0].data_ptr() == address


if __name__ == "__main__":
    main()
