"""Generate for a batch whose prompts share a prefix: its pages are written once and listed by all.

A step counts up the lengths, plans, appends, attends in all layers and picks the next tokens, from
tensors on the device alone. On a GPU it is one CUDA graph, and a loop of its replays needs neither
the host nor a wait for the device. Each request reads the prefix for itself here: `wl.Composed`
reads it once for all (`shared_prefix.py`), but such plans are made on the host, between replays.
"""

import torch
from paged_llama import DEVICE, PAGE, PagedLlama, is_greedy, small_llama

import warploom as wl

PREFIX, SUFFIXES, NEW = 64, [3, 17, 1, 30, 8, 12], 24  # tokens
SHARED, OWN = PREFIX // PAGE, 4  # pages of the prefix, and of each request behind it


def page_table(pages: torch.Tensor, lens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """kv_indptr, kv_indices and last_page_len of requests that fill their rows of `pages`."""
    used = (lens + PAGE - 1) // PAGE
    indptr = torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
    unused = (torch.arange(pages.shape[1], device=DEVICE) >= used[:, None]).int()
    indices = pages.flatten()[unused.flatten().argsort(stable=True)]  # those in use come first
    return indptr, indices, (lens - 1) % PAGE + 1


class Generation:
    """A batch that grows by one token for each request and step."""

    def __init__(self, model, prefix: torch.Tensor, suffixes: list[torch.Tensor]) -> None:
        """Write the prompts to the cache: the prefix once, then all suffixes. Pick first tokens."""
        requests = len(suffixes)
        ids = torch.arange(SHARED + requests * OWN, dtype=torch.int32, device=DEVICE)
        shared, own = ids[:SHARED].expand(requests, -1), ids[SHARED:].view(requests, -1)
        self.pages = torch.cat((shared, own), 1)  # all that each request will ever need
        self.rows = torch.arange(requests + 1, dtype=torch.int32, device=DEVICE)
        added = torch.tensor([len(suffix) for suffix in suffixes], device=DEVICE)
        ends = torch.nn.functional.pad(added.cumsum(0, dtype=torch.int32), (1, 0))
        self.lens = (PREFIX + added).int()
        bounds = wl.Bounds(requests, requests, self.pages.shape[1] * PAGE, self.pages.numel())
        prompts = PagedLlama(model, len(ids))
        self.llama = PagedLlama(model, len(ids), bounds=bounds, cuda_graph=DEVICE == "cuda")
        self.llama.caches = prompts.caches
        prompts(prefix, ([0, PREFIX], [0, SHARED], [*range(SHARED)], [PAGE]))
        logits = prompts(torch.cat(suffixes), (ends, *page_table(self.pages, self.lens)))
        self.tokens = logits[ends[1:] - 1].argmax(-1)
        self.count = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        self.new = self.tokens[:, None].repeat(1, NEW)

    def step(self) -> None:
        tables = self.rows, *page_table(self.pages, self.lens.add_(1))
        self.tokens.copy_(self.llama(self.tokens, tables).argmax(-1))
        self.new.index_copy_(1, self.count.add_(1), self.tokens[:, None])

    def captured(self) -> torch.cuda.CUDAGraph:
        """A step as a CUDA graph. Capturing takes none, and wants that one was taken before."""
        graph = torch.cuda.CUDAGraph()
        with wl.forbid_compilation(), torch.cuda.graph(graph):
            self.step()
        return graph


@torch.no_grad()
def main() -> None:
    model = small_llama()
    given = torch.randint(0, 97, (PREFIX + sum(SUFFIXES),)).to(DEVICE)
    prefix, *suffixes = given.split([PREFIX, *SUFFIXES])
    generation = Generation(model, prefix, suffixes)
    generation.step()  # builds and loads the kernels, which a capture must not do
    step = generation.captured().replay if DEVICE == "cuda" else generation.step
    for _ in range(NEW - 2):
        step()
    for new, suffix in zip(generation.new, suffixes, strict=True):
        assert is_greedy(model, torch.cat((prefix, suffix)), new), new
        print(f"{PREFIX} + {len(suffix):2} tokens -> {new[:8].tolist()} ...: SDPA's own choice")


if __name__ == "__main__":
    main()
