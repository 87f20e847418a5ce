"""Generate for a batch whose prompts share a prefix: its pages are written once and listed by all.

A step appends, attends in all layers and picks the next tokens. On a GPU it is one CUDA graph,
captured once; between replays the host counts up the lengths and plans, which waits for nothing.
"""

import numpy as np
import torch
from paged_llama import DEVICE, PAGE, PagedLlama, small_llama

import warploom as wl

SUFFIXES, NEW, SHARED, OWN = np.array([3, 17, 1, 30, 8, 12]), 24, 4, 4  # tokens; pages
REQUESTS, PREFIX = len(SUFFIXES), SHARED * PAGE
BOUNDS = wl.Bounds(REQUESTS, REQUESTS, (SHARED + OWN) * PAGE, REQUESTS * (SHARED + OWN))


def tables(rows: np.ndarray, lens: np.ndarray) -> tuple[np.ndarray, ...]:
    """qo_indptr, kv_indptr, kv_indices, last_page_len: shared pages, then each request's own."""
    pages = -(-lens // PAGE)
    own = SHARED + np.arange(REQUESTS * OWN).reshape(REQUESTS, OWN)
    lists = [np.append(np.arange(SHARED), own[i])[:count] for i, count in enumerate(pages)]
    parts = [0, *rows.cumsum()], [0, *pages.cumsum()], np.concatenate(lists), (lens - 1) % PAGE + 1
    return tuple(np.asarray(part, np.int32) for part in parts)


class Decoder:
    """Steps of one token a request; replays of one graph on a GPU."""

    def __init__(self, llama: PagedLlama, tokens: torch.Tensor) -> None:
        self.llama, self.tokens, self.graph = llama, tokens, None
        room = REQUESTS + 1, REQUESTS + 1, BOUNDS.max_blocks, REQUESTS
        self.tables = [torch.zeros(size, dtype=torch.int32, device=DEVICE) for size in room]

    def compute(self) -> None:
        self.tokens.copy_(self.llama(self.tokens, self.tables).argmax(-1))

    def step(self, lens: np.ndarray) -> torch.Tensor:
        batch = tables(np.ones(REQUESTS, int), lens)
        for held, part in zip(self.tables, batch, strict=True):
            held[: len(part)].copy_(torch.from_numpy(part))
        self.llama.attention.plan(*batch)
        if DEVICE == "cuda" and self.graph is None:
            given = self.tokens.clone()
            self.compute()  # loads the kernels; the replay below writes the same again
            self.tokens.copy_(given)
            self.graph = torch.cuda.CUDAGraph()
            with wl.forbid_compilation(), torch.cuda.graph(self.graph):
                self.compute()
        self.compute() if self.graph is None else self.graph.replay()
        return self.tokens.clone()


def is_greedy(model, prompt: torch.Tensor, new: torch.Tensor) -> bool:
    """True if each new token is SDPA's first choice after those before it; fp16 may tie two."""
    scores = model(torch.cat((prompt, new))[None]).logits[0, len(prompt) - 1 : -1].float()
    missed = scores.amax(-1) - scores.gather(1, new[:, None])[:, 0]
    return bool((missed <= (0.0 if DEVICE == "cpu" else 4e-3 * scores.abs().amax())).all())


@torch.no_grad()
def main() -> None:
    model, pages = small_llama(), SHARED + REQUESTS * OWN
    given = torch.randint(0, 97, (PREFIX + SUFFIXES.sum(),)).to(DEVICE)
    prefix, *suffixes = given.split([PREFIX, *SUFFIXES.tolist()])
    llama = PagedLlama(model, pages)
    decoding = PagedLlama(model, pages, bounds=BOUNDS, cuda_graph=DEVICE == "cuda")
    decoding.caches = llama.caches
    llama.planned(prefix, ([0, PREFIX], [0, SHARED], [*range(SHARED)], [PAGE]))  # once for all
    logits = llama.planned(torch.cat(suffixes), tables(SUFFIXES, PREFIX + SUFFIXES))
    decoder = Decoder(decoding, logits[SUFFIXES.cumsum() - 1].argmax(-1))
    tokens = [decoder.tokens.clone(), *(decoder.step(PREFIX + SUFFIXES + i) for i in range(1, NEW))]
    for new, suffix in zip(torch.stack(tokens, 1), suffixes, strict=True):
        assert is_greedy(model, torch.cat((prefix, suffix)), new), new
        print(f"{PREFIX} + {len(suffix):2} tokens -> {new[:8].tolist()} ...: SDPA's own choice")


if __name__ == "__main__":
    main()
