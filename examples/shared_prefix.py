"""Requests that begin with the same tokens: the pages they share are read once for all of them."""

import numpy as np
import torch

import warploom as wl

# kernels for GPUs compute in 16-bit types, those for CPUs in float32 too
DEVICE, DTYPE = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)

Q_HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 16
SYSTEM, TOOLS, REQUESTS = 1024, 512, 12


def main() -> None:
    generator = np.random.default_rng(0)
    system, tools = (generator.integers(0, 32000, n).tolist() for n in (SYSTEM, TOOLS))
    sequences = []
    for request in range(REQUESTS):  # two levels: all share the system prompt, half the tools
        own = generator.integers(0, 32000, 40 + 7 * request).tolist()
        sequences.append([*system, *(tools if request % 2 else []), *own])
    tree = wl.RadixTree.from_tokens(sequences, PAGE)
    table = wl.compose(tree)  # kv_indptr, kv_indices, last_page_len, as any paged cache has them

    torch.manual_seed(0)
    q = torch.randn(REQUESTS, Q_HEADS, DIM, device=DEVICE, dtype=DTYPE)
    cache = torch.randn(tree.num_pages, 2, PAGE, KV_HEADS, DIM, device=DEVICE, dtype=DTYPE)
    results = []
    for kv_format in (wl.Composed(PAGE), wl.Paged(PAGE)):
        attention = wl.AttentionWrapper(
            wl.Causal() & wl.Alibi(),
            kv_format=kv_format,
            num_q_heads=Q_HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            dtype=DTYPE,
            device=DEVICE,
        )
        attention.plan(list(range(REQUESTS + 1)), **table)
        results.append(attention.run(q, cache))
        if kv_format.composed:
            print(attention.explain().facts["shared prefixes"])

    listed = sum(-(-len(tokens) // PAGE) for tokens in sequences)
    error = (results[0] - results[1]).abs().max().item()
    print(f"{tree.num_pages} pages in place of {listed}; both formats agree to {error:.1e}")
    assert error < 5e-3


if __name__ == "__main__":
    main()
