"""Causal prefill, batch 16, 16 heads of 128, fp16, 1k to 16k tokens: TFLOP/s beside the peers.

    python benchmarks/prefill.py [--quick] [--only warploom,"sdpa cuDNN"] [--out FOLDER]

Only the visible half of the score matrix counts as work.
"""

from __future__ import annotations

import torch
from harness import (
    QUICK,
    Case,
    Check,
    Effort,
    Report,
    arguments,
    chosen,
    copies_needed,
    matmul_ceiling,
    time_one,
)
from peers import PREFILL, Prefill

LENGTHS = (1024, 2048, 4096, 8192, 16384)
TOLERANCE = 2e-3  # relative, fp16 against float64; a wrong mask or scale is far above it


def make_inputs(shape: tuple[int, int, int, int], device: torch.device) -> Prefill:
    """Tensors as a projection leaves them: [batch, length, heads, dim] in memory."""
    batch, heads, length, dim = shape
    made = (
        torch.randn(batch, length, heads, dim, device=device, dtype=torch.float16) for _ in range(3)
    )
    return Prefill(*(x.transpose(1, 2) for x in made))


def check_against_float64(inputs: Prefill) -> Check:
    """Compares 64 sampled rows, the first and last among them, of four (batch, head) pairs."""
    batch, heads, length, dim = inputs.q.shape
    rows = torch.linspace(0, length - 1, min(64, length), device=inputs.q.device).long()
    pairs = sorted({(0, 0), (0, heads - 1), (batch // 2, heads // 2), (batch - 1, heads - 1)})
    hidden = torch.arange(length, device=rows.device)[None, :] > rows[:, None]

    def truth(pair: tuple[int, int]) -> torch.Tensor:
        q, k, v = (x[pair].double() for x in (inputs.q, inputs.k, inputs.v))
        logits = (q[rows] @ k.T) * dim**-0.5
        return logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v

    expected = torch.stack([truth(pair) for pair in pairs])

    def relative_error(output: torch.Tensor) -> float:
        got = torch.stack([output[pair][rows].double() for pair in pairs])
        return float((got - expected).norm() / expected.norm())

    return Check(relative_error, TOLERANCE)


def case_of(batch: int, heads: int, length: int, dim: int) -> Case:
    visible = batch * heads * length * (length + 1) // 2
    return Case(
        name=f"causal {length // 1024}k" if length >= 1024 else f"causal {length}",
        work=4 * dim * visible / 1e12,
        unit="TFLOP/s",
        input_bytes=3 * batch * heads * length * dim * 2,
        params={
            "batch": batch, "heads": heads, "length": length, "head_dim": dim, "dtype": "float16"
        },
    )  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    options = arguments(__doc__ or "", argv)
    device: torch.device = options.device
    effort = QUICK if options.quick else Effort()
    on_gpu = device.type == "cuda"
    batch, heads, dim = (16, 16, 128) if on_gpu else (1, 2, 64)
    lengths = LENGTHS if on_gpu else (256,)
    torch.manual_seed(0)
    report = Report("prefill", device, options.out)
    report.add(matmul_ceiling("prefill", torch.float16, device, effort))
    for length in lengths[::2] if options.quick else lengths:
        case = case_of(batch, heads, length, dim)
        shape = (batch, heads, length, dim)
        inputs = [make_inputs(shape, device) for _ in range(copies_needed(case, device))]
        check = check_against_float64(inputs[0])
        for implementation in chosen(PREFILL, options.only):
            report.add(time_one("prefill", case, implementation, inputs, check, effort, device))
    report.finish()


if __name__ == "__main__":
    main()
