"""Tables of docs/distributed.md: what context parallelism sends, hides and should gain."""

from __future__ import annotations

from warploom.serving.distributed.scaling import (
    Estimate,
    Heads,
    Machine,
    all_gather,
    decode,
    hiding_tokens,
    ring,
)

# Heads of the models' attention layers, bf16.
MODELS = {
    "Llama 3.1 8B": Heads(32, 8, 128),
    "Llama 3.1 70B": Heads(64, 8, 128),
    "Qwen3 235B-A22B": Heads(64, 4, 128),
}
# Assumed rates: attention at 600 TFLOP/s and 4 of 4.8 TB/s, NVLink 4, 400 Gb/s InfiniBand for
# each GPU, and what an exchange costs without bytes.
H200 = Machine(600e12, 4.0e12, 8, 450e9, 50e9, 15e-6, 30e-6)
WORLDS = (2, 8, 64)
ROWS, CONTEXT, PROMPT = 16, 131072, 131072


def table(header: str, rows: list[list[str]]) -> None:
    print(f"| {header} |")
    print("| " + " | ".join("---" for _ in header.split("|")) + " |")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def described(found: Estimate) -> list[str]:
    sent = f"{found.sent / 1e6:,.2f} MB" if found.sent < 1e8 else f"{found.sent / 1e6:,.0f} MB"
    times = [f"{1e6 * x:,.0f}" for x in (found.compute, found.exchange, found.seconds)]
    return [sent, *times, f"{100 * found.hidden:.0f} %", f"{found.speedup:.1f}"]


def main() -> None:
    columns = "a rank sends | attention, us | exchange, us | together, us | hidden | speed-up"
    print(f"Decode, {ROWS} requests of {CONTEXT} tokens\n")
    found = [
        [name, str(world), "own" if own else "all",
         *described(decode(heads, H200, rows=ROWS, tokens=CONTEXT, world=world, own_heads=own))]
        for name, heads in MODELS.items()
        for world in WORLDS
        for own in (False, True)
    ]  # fmt: skip
    table(f"model | GPUs | heads | {columns}", found)
    print(f"Causal prefill of {PROMPT} tokens\n")
    found = [
        [name, str(world), method.__name__,
         *described(method(heads, H200, tokens=PROMPT, world=world))]
        for name, heads in MODELS.items()
        for world in WORLDS
        for method in (ring, all_gather)
    ]  # fmt: skip
    table(f"model | GPUs | method | {columns}", found)
    print("Tokens of a rank from which on a causal ring hides its exchanges\n")
    found = [
        [name, *(f"{hiding_tokens(heads, H200.flops, link):,}" for link in (450e9, 50e9))]
        for name, heads in MODELS.items()
    ]
    table("model | NVLink | InfiniBand", found)


if __name__ == "__main__":
    main()
