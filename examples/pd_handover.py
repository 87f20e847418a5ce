"""Prefill in one process, decode in another: the cache's pages move, tokens are the same."""

import multiprocessing
import socket

import torch

import warploom as wl
import warploom.distributed as wld

HEADS, KV_HEADS, DIM, PAGE, VOCABULARY, STEPS = 4, 2, 32, 8, 50, 6
PROMPT = [7, 3, 19, 42, 4, 8, 15, 16, 23, 1, 2, 11]


class Model:
    """One layer with random weights, the same in every process, and its paged cache."""

    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(1)
        widths = (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM)
        self.embed = torch.randn(VOCABULARY, 64, generator=rng)
        self.project = [torch.randn(64, n, generator=rng) / 8 for n in widths]
        self.unembed = torch.randn(HEADS * DIM, VOCABULARY, generator=rng)
        self.cache = torch.zeros(2, 32, PAGE, KV_HEADS, DIM).unbind()
        self.attention = wl.AttentionWrapper(
            wl.Causal() & wl.Rope(), kv_format=wl.Paged(PAGE), num_q_heads=HEADS,
            num_kv_heads=KV_HEADS, head_dim=DIM, dtype="float32", device="cpu",
        )  # fmt: skip

    def next_token(self, tokens: list[int], pages: list[int], length: int) -> int:
        """Append tokens to a cache that then holds `length`, and choose the next one."""
        x = self.embed[tokens]
        q, k, v = ((x @ w).unflatten(1, (-1, DIM)) for w in self.project)
        used = pages[: -(-length // PAGE)]
        plan = [[0, len(tokens)], [0, len(used)], used, [(length - 1) % PAGE + 1]]
        wl.append(k, v, self.cache, *plan)
        self.attention.plan(*plan)
        out = self.attention.run(q, self.cache)
        return int((out[-1].flatten() @ self.unembed).argmax())

    def decode(self, token: int, pages: list[int], length: int) -> list[int]:
        tokens = [token]
        for step in range(1, STEPS):
            tokens.append(self.next_token(tokens[-1:], pages, length + step))
        return tokens


def prefill(connection: socket.socket) -> None:
    model, pages = Model(), [5, 9, 2]
    first = model.next_token(PROMPT, pages, len(PROMPT))
    request = {"length": len(PROMPT), "token": first}
    wld.PageSender(model.cache, connection).send(pages, request)


def main() -> None:
    here, there = socket.socketpair()
    context = multiprocessing.get_context("fork")  # nothing runs yet that a fork could break
    prefiller = context.Process(target=prefill, args=(there,))
    prefiller.start()
    there.close()
    model = Model()
    receiver = wld.PageReceiver(model.cache, here, timeout=120)
    request, pages = receiver.receive([17, 4, 30, 11])
    tokens = model.decode(request["token"], pages, request["length"])
    prefiller.join()

    alone, own = Model(), [5, 9, 2]
    expected = alone.decode(alone.next_token(PROMPT, own, len(PROMPT)), own, len(PROMPT))
    print(f"pages 5, 9, 2 became {pages}; tokens here {tokens}, in one process {expected}")
    assert tokens == expected


if __name__ == "__main__":
    main()
