"""A variant of one's own with tensors: a temperature per head, and a boost for marked keys."""

import torch

import warploom as wl

# kernels for GPUs compute in 16-bit types, those for CPUs in float32 too
DEVICE, DTYPE = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)

HEADS, LENGTH, DIM = 4, 160, 64


class Highlight(wl.Variant):
    """Sharpen heads differently, lift marked keys, and scale the output by how sure the row is."""

    temperature = wl.Tensor("float32", ("q_head",))
    marked = wl.Tensor("bool", ("batch", "kv_pos"))
    boost = wl.Scalar("float32", default=2.0)

    def logits_transform(self, logits, at):
        lift = wl.where(self.marked[at.batch, at.kv_pos], self.boost, 0.0)
        return logits / self.temperature[at.q_head] + lift

    def logits_mask(self, at):
        return at.kv_pos <= at.q_pos

    def output_transform(self, o, at):
        return o * wl.sigmoid(at.lse)


def expected(q, k, v, temperature, marked, boost):
    q, k, v = (x.float() for x in (q, k, v))
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * DIM**-0.5
    logits = logits / temperature[:, None, None] + boost * marked[:, None, None, :]
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=q.device).triu(1)
    logits = logits.masked_fill(future, -torch.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), v)
    return out * logits.logsumexp(-1).sigmoid().transpose(1, 2)[..., None]


def main() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, LENGTH, HEADS, DIM, device=DEVICE, dtype=DTYPE)
    temperature = torch.rand(HEADS, device=DEVICE) + 0.5
    marked = torch.rand(2, LENGTH, device=DEVICE) < 0.1
    variant = Highlight(temperature=temperature)
    for boost in (2.0, 4.0):  # a new value is no new kernel
        out = wl.attention(q, k, v, variant=variant, marked=marked, boost=boost)
        error = (out - expected(q, k, v, temperature, marked, boost)).abs().max().item()
        print(f"boost {boost}: max difference {error:.1e}")
        assert error < 5e-3


if __name__ == "__main__":
    main()
