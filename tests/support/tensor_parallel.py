"""One rank of a tensor-parallel model, with and without prefetches.

python THIS RANK FOLDER [DEVICE], which is cpu (gloo) or cuda (NCCL, a GPU for each rank).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config as inductor
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from warploom.prefetch import Collective, Overlap, SafeBudget, inductor_pass, prefetch_pass

WIDTH, RANKS = 64, 2
WEIGHT = 2 * WIDTH // RANKS * WIDTH * 4  # bytes of a rank's part
BUDGET = WEIGHT + WEIGHT // 2


class Layer(nn.Module):
    """Two products between collectives, as attention and an MLP are; no pointwise code."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH // RANKS, bias=False)
        self.down = nn.Linear(2 * WIDTH // RANKS, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        group: Any = dist.group.WORLD
        return functional.all_reduce(self.down(self.up(x)), "sum", group)


class GatheredLayer(Layer):
    """The same where ranks share out the rows between layers: gathered before, scattered behind."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        group: Any = dist.group.WORLD
        y = self.down(self.up(functional.all_gather_tensor(x, 0, group)))
        return x + functional.reduce_scatter_tensor(y, "sum", 0, group)


class Block(nn.Module):
    """Attention and an MLP with residuals, to be cut by DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 16)).transpose(0, 1) for layer in self.qkv)
        heads = torch.softmax(q @ k.mT, -1) @ v
        x = x + self.out(heads.transpose(0, 1).flatten(1))
        return x + self.down(torch.relu(self.up(x)))


def cut_block(mesh: Any) -> nn.Module:
    plan: dict[str, Any] = {f"qkv.{i}": ColwiseParallel() for i in range(3)}
    plan |= {"out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    blocks = [Block().to(mesh.device_type) for _ in range(2)]
    return nn.Sequential(*(parallelize_module(block, mesh, plan) for block in blocks))


def traced(model: nn.Module, x: torch.Tensor, change: Callable[[Any], Any]) -> torch.Tensor:
    """The model's graph as AOTAutograd makes it, changed, run by the interpreter."""

    def compiler(module: Any, _: Any) -> Any:
        change(module)
        return module

    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend=aot_autograd(fw_compiler=compiler))
    out: torch.Tensor = compiled(x)
    return out


def of_dtensor(device: str) -> dict[str, Any]:
    mesh, x = init_device_mesh(device, (RANKS,)), torch.randn(5, WIDTH, device=device)
    model = cut_block(mesh)
    graphs: list[str] = []
    inserted: list[Any] = []

    def change(module: Any) -> None:
        inserted.extend(prefetch_pass(module, 1 << 20))
        graphs.append("\n".join(str(node.target) for node in module.graph.nodes))

    with torch.no_grad():
        before = traced(model, x, lambda _: None)
        after = traced(model, x, change)
    counts = [len(one.tensors) for one in inserted]
    return {"same": torch.equal(before, after), "graph": graphs[0], "counts": counts}


def of_gathers(device: str) -> dict[str, Any]:
    """Rows shared out, and budgets that are chosen by constants of no GPU."""
    overlap = Overlap(1e12, 0.0, 1e9, float(1 << 20), 1e15, 0.0, 0.0, 0.0)
    model = nn.Sequential(GatheredLayer(), GatheredLayer()).to(device)
    x = torch.randn(4, WIDTH, device=device)
    asked: list[tuple[str, int]] = []
    inserted: list[Any] = []

    def seconds(collective: Collective) -> float:
        asked.append((collective.name.rpartition("::")[2], collective.bytes))
        return 30e-6

    def change(module: Any) -> None:
        inserted.extend(prefetch_pass(module, SafeBudget(overlap, seconds)))

    with torch.no_grad():
        before = traced(model, x, lambda _: None)
        after = traced(model, x, change)
    sizes = [one.bytes for one in inserted]
    return {"same": torch.equal(before, after), "bytes": sizes, "asked": asked}


def of_inductor(device: str) -> dict[str, Any]:
    model, x = nn.Sequential(Layer(), Layer()).to(device), torch.randn(5, WIDTH, device=device)
    own = inductor_pass(BUDGET)
    with torch.no_grad():
        before = model(x)
        inductor.post_grad_custom_post_pass = own
        after, code = run_and_get_code(torch.compile(model), x)
    names = "_c10d_functional", "warploom"
    called = [
        line for line in code[0].splitlines() if any(f"ops.{name}." in line for name in names)
    ]
    return {
        "same": torch.equal(before, after),
        "bytes": [one.bytes for one in own.inserted[0]],
        "calls": [line.partition(".default")[0].rpartition(".")[2] for line in called],
    }


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    device = "cuda" if "cuda" in sys.argv[3:] else "cpu"
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    inductor.force_disable_caches = True  # a graph from there runs no pass
    torch.manual_seed(0)
    store = dist.FileStore(str(folder / "store"), RANKS)  # pyright: ignore[reportPrivateImportUsage]
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=RANKS)
    found = {"inductor": of_inductor(device)}
    inductor.post_grad_custom_post_pass = None
    found["dtensor"] = of_dtensor(device)
    found["gathers"] = of_gathers(device)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
