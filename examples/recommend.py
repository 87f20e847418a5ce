"""Items recommended by a model that writes three tokens for each, in beams over one history.

The model is one layer of random weights; what matters is around it. All beams read the pages of the
user's history once (`Composed`), beams are reordered by their page tables alone, and only tokens of
items that exist are chosen. Pages hold one token, so nothing is ever copied.
"""

from typing import Any

import numpy as np
import rich
import torch
from rich.table import Table

import warploom as wl
from warploom.recommendation import BeamPages, BeamSearch, ItemMask, ItemTable

# kernels for GPUs compute in 16-bit types, those for CPUs in float32 too
DEVICE, DTYPE = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)
VOCAB, HIDDEN, HEADS, KV_HEADS, DIM = 256, 128, 4, 2, 64
HISTORY, WIDTH, STEPS, ITEMS = 600, 128, 3, 5000


def main() -> None:
    torch.manual_seed(0)
    generator = np.random.default_rng(0)
    items = np.unique(generator.integers(0, VOCAB, (ITEMS, STEPS)), axis=0)
    history = generator.integers(0, VOCAB, HISTORY)

    sizes = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
    weights = {n: torch.randn(HIDDEN, w, device=DEVICE) / HIDDEN**0.5 for n, w in sizes.items()}
    embedding = torch.randn(VOCAB, HIDDEN, device=DEVICE)
    out = torch.randn(HEADS * DIM, HIDDEN, device=DEVICE) / DIM**0.5
    attention = wl.AttentionWrapper(
        wl.Causal(),
        kv_format=wl.Composed(1),
        num_q_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype=DTYPE,
        device=DEVICE,
    )
    own = BeamPages.pages_needed(WIDTH, STEPS, HISTORY, page_size=1)
    cache = torch.zeros(HISTORY + own, 2, 1, KV_HEADS, DIM, device=DEVICE, dtype=DTYPE)
    pages = BeamPages(
        range(HISTORY), HISTORY, range(HISTORY, HISTORY + own), page_size=1, width=WIDTH
    )

    def forward(tokens: Any, rows: int) -> torch.Tensor:
        """Logits behind each row, of which each beam has as many."""
        x = embedding[torch.as_tensor(tokens, device=DEVICE)]
        q, k, v = ((x @ weights[name]).view(len(x), -1, DIM).to(DTYPE) for name in "qkv")
        indptr, tables = np.arange(len(pages) + 1) * rows, pages.tables()
        wl.append(k, v, cache, indptr, **tables)
        attention.plan(indptr, **tables)
        read: torch.Tensor = attention.run(q, cache).flatten(1).float()
        return torch.matmul(x + read @ out, embedding.T) / HIDDEN**0.5

    search = BeamSearch(ItemMask(ItemTable(items, VOCAB), WIDTH, DEVICE), WIDTH)
    chosen = search.step(forward(history, HISTORY)[-1:])
    while search.level < STEPS:
        copies = pages.advance(chosen.parents)
        assert len(copies.source) == 0  # pages of one token are never copied
        logits = forward(chosen.tokens, 1)
        chosen = search.step(logits)
        print(f"step {search.level}: looked at {chosen.seen} of {chosen.candidates} candidates")

    found = search.results()
    assert (items[found.items] == found.tokens).all() and len(set(found.items)) == WIDTH
    table = Table("item", "tokens", "log-probability", title=f"best of {len(items)} items")
    for item, tokens, score in list(zip(*found, strict=True))[:8]:
        table.add_row(str(item), " ".join(map(str, tokens)), f"{score:.3f}")
    rich.print(table)
    print(attention.explain().facts["shared prefixes"])


if __name__ == "__main__":
    main()
