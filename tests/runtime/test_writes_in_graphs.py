"""What a compiled function writes to tensors that a variant or wrapper holds, calls in it read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import warploom as wl

KEYS, DIM = 10, 32


class Biased(wl.Variant):
    bias = wl.Tensor("float32", ("kv_pos",))

    def logits_transform(self, logits: Any, at: Any) -> Any:
        return logits + self.bias[at.kv_pos]


def flexed(bias: torch.Tensor) -> wl.Variant:
    return wl.flex(lambda score, batch, head, q_idx, kv_idx: score + bias[kv_idx])


MADE: dict[str, Callable[[torch.Tensor], wl.Variant]] = {
    "field": lambda bias: Biased(bias=bias),
    "chain": lambda bias: Biased(bias=bias) & wl.SoftCap(1e5),
    "mod": flexed,
    "mod in a chain": lambda bias: flexed(bias) & wl.SoftCap(1e5),
}


def exact(q: Any, k: Any, v: Any, bias: torch.Tensor) -> torch.Tensor:
    logits = torch.einsum("...qhd,...khd->...hqk", q, k).double() * DIM**-0.5 + bias
    return torch.einsum("...hqk,...khd->...qhd", logits.softmax(-1), v.double()).float()


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.some(5)
def test_calls_read_what_was_written_before_them(made: str, backend: str) -> None:
    """Calls with equal arguments are not one: what they read has changed between them."""
    q, k, v = torch.randn(3, 2, KEYS, 4, DIM)
    bias, step = torch.zeros(KEYS), torch.arange(KEYS) / 4
    variant = MADE[made](bias)

    def computed(q: Any, k: Any, v: Any) -> tuple[torch.Tensor, torch.Tensor]:
        before = wl.attention(q, k, v, variant=variant)
        bias.add_(step)
        return before, wl.attention(q, k, v, variant=variant)

    torch._dynamo.reset()
    compiled = torch.compile(computed, fullgraph=True, backend=backend)
    for done in range(3):
        before, after = compiled(q, k, v)
        assert_close(before, exact(q, k, v, done * step))
        assert_close(after, exact(q, k, v, (done + 1) * step))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_runs_read_what_was_written_before_them(backend: str) -> None:
    q, k, v = torch.randn(3, KEYS, 4, DIM)
    bias = torch.zeros(KEYS)
    wrapper = wl.AttentionWrapper(
        Biased(bias=bias), num_q_heads=4, head_dim=DIM, dtype="float32", device="cpu"
    )
    wrapper.plan([0, KEYS], [0, KEYS])

    def computed(new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = wrapper.run(q, (k, v))
        bias.copy_(new)
        return before, wrapper.run(q, (k, v))

    torch._dynamo.reset()
    compiled = torch.compile(computed, fullgraph=True, backend=backend)
    last = torch.zeros(KEYS)
    for _ in range(3):
        new = torch.randn(KEYS)
        before, after = compiled(new)
        assert_close(before, exact(q, k, v, last))
        assert_close(after, exact(q, k, v, new))
        last = new


class Drifting(torch.nn.Module):
    """Attention beside a buffer that each forward moves."""

    bias: torch.Tensor

    def __init__(self, made: str) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(KEYS))
        self.variant = MADE[made](self.bias)

    def forward(self, q: Any, k: Any, v: Any) -> torch.Tensor:
        self.bias.add_(torch.arange(KEYS) / 4)
        out: torch.Tensor = wl.attention(q, k, v, variant=self.variant)
        return out


@pytest.mark.parametrize("made", ["field", "mod"])
def test_buffers_of_modules_move_first(made: str) -> None:
    q, k, v = torch.randn(3, 2, KEYS, 4, DIM)
    torch._dynamo.reset()
    module = Drifting(made)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for done in (1, 2):
        assert_close(compiled(q, k, v), exact(q, k, v, done * torch.arange(KEYS) / 4))
