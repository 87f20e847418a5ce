"""A decoding step served by graphs: captured when a batch needs one, in memory that all share."""

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import warploom as wl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there by a twin that records operators
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
HEADS, KV_HEADS, DIM, PAGE, PAGES, LAYERS = 8, 2, 64, 16, 512, 4
# One request more than are served: rows of padding are those of a request without keys.
BOUNDS = wl.Bounds(max_requests=33, max_q_rows=32, max_kv_len=512, max_blocks=PAGES)


def main() -> None:
    torch.manual_seed(0)
    attention = wl.AttentionWrapper(
        wl.Causal(), kv_format=wl.Paged(PAGE), num_q_heads=HEADS, num_kv_heads=KV_HEADS,
        head_dim=DIM, dtype=str(DTYPE).removeprefix("torch."), device=DEVICE, bounds=BOUNDS,
        cuda_graph=True,
    )  # fmt: skip
    width = HEADS * DIM
    made = {"device": DEVICE, "dtype": DTYPE}
    embedding = torch.randn(1000, width, **made)
    weights = [torch.randn(width, width, **made) / width**0.5 for _ in range(LAYERS)]
    caches = torch.randn(LAYERS, PAGES, 2, PAGE, KV_HEADS, DIM, **made)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        x = embedding[tokens]
        for weight, cache in zip(weights, caches, strict=True):
            q = (x @ weight).view(-1, HEADS, DIM)
            x = torch.nn.functional.normalize(x + attention.run(q, cache).flatten(1)) * width**0.5
        return (x @ embedding.T).argmax(1)

    def plan(kv_lens: np.ndarray, padded: int) -> None:
        rows, pages = len(kv_lens), -(-kv_lens // PAGE)
        ends, more = [0, *np.cumsum(pages).tolist()], padded > rows
        listed = np.random.default_rng(0).permutation(PAGES)[: ends[-1]]
        attention.plan(
            [*range(rows + 1), *[padded] * more], [*ends, *[ends[-1]] * more],
            kv_indices=listed.tolist(),
            last_page_len=[*((kv_lens - 1) % PAGE + 1).tolist(), *[0] * more],
        )  # fmt: skip

    pool = wl.GraphPool(
        wl.GraphPiece(step, captured="full"),
        inputs={"tokens": wl.GraphInput(torch.int64)},
        bounds=BOUNDS,
        device=DEVICE,
    )
    table = Table("requests", "rows with padding", "mode", "tokens of the eager step")
    generator = np.random.default_rng(1)
    for rows in (5, 1, 32, 7, 5, 18):
        kv_lens = generator.integers(1, 200, rows)
        tokens = torch.from_numpy(generator.integers(0, 1000, rows)).to(DEVICE)
        choice = pool.choose(rows)
        plan(kv_lens, choice.padded_rows)
        found = pool.run({"tokens": tokens}).clone()
        padding = torch.zeros(choice.padded_rows - rows, dtype=torch.int64, device=DEVICE)
        expected = step(torch.cat([tokens, padding]))  # of as many rows: products round alike
        assert torch.equal(found, expected[:rows]), "a replay is the step"
        table.add_row(str(rows), str(choice.padded_rows), choice.mode, f"all {rows}")
    told = pool.stats()
    Console().print(table)
    print(f"{told.captures} captures served {sum(told.runs.values())} steps on {DEVICE}")
    pool.close()


if __name__ == "__main__":
    main()
