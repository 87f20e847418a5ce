"""One CUDA graph for every batch: capture once, then re-plan with other lengths and replay."""

import numpy as np
import torch

import warploom as wl

HEADS, KV_HEADS, DIM, PAGE, PAGES = 32, 8, 128, 16, 4096
BOUNDS = wl.Bounds(max_requests=64, max_q_rows=64, max_kv_len=2048, max_blocks=PAGES)


def page_table(kv_lens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    pages = -(-kv_lens // PAGE)
    indptr = np.concatenate([[0], pages.cumsum()]).astype(np.int32)
    indices = np.random.default_rng(0).permutation(PAGES)[: indptr[-1]].astype(np.int32)
    return indptr, indices, ((kv_lens - 1) % PAGE + 1).astype(np.int32)


def main() -> None:
    if not torch.cuda.is_available():
        print("skipped: CUDA graphs need an NVIDIA GPU, and none was found")
        return
    torch.manual_seed(0)
    shape = {"num_q_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "dtype": "bfloat16"}
    attention = wl.AttentionWrapper(
        wl.Causal(), kv_format=wl.Paged(PAGE), bounds=BOUNDS, cuda_graph=True, **shape
    )
    eager = wl.AttentionWrapper(wl.Causal(), kv_format=wl.Paged(PAGE), **shape)
    cache = torch.randn(2, PAGES, PAGE, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(BOUNDS.max_requests, HEADS, DIM, device="cuda", dtype=torch.bfloat16)

    generator = np.random.default_rng(1)
    graph = torch.cuda.CUDAGraph()
    captured = None
    for requests in (64, 3, 17, 0, 40):
        lens = generator.integers(1, BOUNDS.max_kv_len // 4, requests)
        batch = (np.arange(requests + 1, dtype=np.int32), *page_table(lens))
        attention.plan(*batch)
        if captured is None:
            attention.run(q, tuple(cache))  # loads the kernel, which capture forbids
            with torch.cuda.graph(graph):
                captured = attention.run(q, tuple(cache))
        graph.replay()
        eager.plan(*batch)
        expected = eager.run(q[:requests], tuple(cache))
        torch.testing.assert_close(captured[:requests], expected, rtol=2e-2, atol=2e-2)
        print(f"{requests:3} requests, {lens.sum():6} keys: the replay is right")


if __name__ == "__main__":
    main()
