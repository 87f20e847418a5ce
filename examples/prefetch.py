"""Weights and keys come to L2 while a collective runs; the layer computes the same."""

import torch
from torch.fx import symbolic_trace

import warploom as wl
from warploom.prefetch import H200_OVERLAP, SafeBudget, beside, beside_pages, prefetch_pass

# kernels for GPUs compute in 16-bit types, those for CPUs in float32 too
DEVICE, DTYPE = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 16
HIDDEN, FFN = HEADS * DIM, 1024
OPTIONS = {"device": DEVICE, "dtype": DTYPE}


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    """What another GPU would add; a collective on the current stream."""
    return x + x


class MLP(torch.nn.Module):
    """As a rank computes it: the sum of all ranks comes first, and is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(HIDDEN, FFN, bias=False, **OPTIONS)
        self.down = torch.nn.Linear(FFN, HIDDEN, bias=False, **OPTIONS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        summed = torch.ops._c10d_functional.all_reduce(x, "sum", "ranks")
        return self.down(torch.relu(self.up(torch.ops._c10d_functional.wait_tensor(summed))))


def by_hand() -> None:
    """Projections beside one collective, and the pages of the plan behind them."""
    torch.manual_seed(0)
    attention = wl.AttentionWrapper(
        wl.Causal(), kv_format=wl.Paged(PAGE), num_q_heads=HEADS, num_kv_heads=KV_HEADS,
        head_dim=DIM, **OPTIONS,
    )  # fmt: skip
    attention.plan([0, 1, 2], [0, 4, 7], [3, 1, 4, 8, 5, 9, 2], [16, 6])
    cache = torch.randn(10, 2, PAGE, KV_HEADS, DIM, **OPTIONS)
    weight, x = torch.randn(HIDDEN, HIDDEN, **OPTIONS), torch.randn(2, HIDDEN, **OPTIONS)
    weight /= HIDDEN**0.5

    def step() -> torch.Tensor:
        q = torch.nn.functional.linear(all_reduce(x), weight)
        return attention.run(q.view(2, HEADS, DIM), cache)

    expected = step()
    with beside(weight, 1 << 20) as weights, beside_pages(attention, cache, 1 << 20) as pages:
        y = all_reduce(x)
    out = attention.run(torch.nn.functional.linear(y, weight).view(2, HEADS, DIM), cache)
    assert torch.equal(out, expected)
    print(f"by hand: {weights} bytes of weights and {pages} of pages, and the same result")


def by_pass() -> None:
    """What a compiler's graph gets."""
    for inserted in prefetch_pass(symbolic_trace(MLP()), 3 << 20):
        print(f"by the pass: {', '.join(inserted.tensors)} beside {inserted.collective}")
    mlp = MLP()
    chosen = prefetch_pass(symbolic_trace(mlp), SafeBudget(H200_OVERLAP, 10e-6))
    size = sum(weight.nbytes for weight in mlp.parameters()) / 1e6
    print(f"by a budget that is chosen for an H200: {len(chosen)}, since {size:.0f} MB do not pay")


def main() -> None:
    by_hand()
    by_pass()
    size = 3 * 8192 * 28672 // 8 * 2  # the MLP of a 70B model on one of eight devices, 16 bits
    budget, sms = SafeBudget(H200_OVERLAP, 10e-6).best(size)
    saved = H200_OVERLAP.saved(10e-6, size, budget, sms)
    asked = f"{budget / 1e6:.0f} MB by {sms} CTAs"
    print(f"told for an H200: {asked} save {1e6 * saved:.1f} us behind 10 us")


if __name__ == "__main__":
    main()
