"""The tensors of one batch: in warploom's format, and as the reference sees them."""

import itertools

import numpy as np
import torch


def draw_input(field, sizes, generator):
    """A tensor of a field, as it is given."""
    name, dtype = field["dtype"], getattr(torch, field["dtype"])
    shape = [
        n if role is None else sizes[role]
        for n, role in zip(field["sizes"], field["roles"], strict=False)
    ]
    if name == "bool":
        return torch.rand(shape, generator=generator) < 0.6
    if dtype.is_floating_point:
        return (torch.randn(shape, generator=generator) * 1.5).to(dtype)
    info = torch.iinfo(torch.int32 if name == "int64" else dtype)
    low, high = (info.min, info.max + 1) if field["wide"] else (max(info.min, -9), 10)
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def exact(tensor):
    kind = torch.float64 if tensor.dtype.is_floating_point else torch.int64
    return tensor.cpu() if tensor.dtype == torch.bool else tensor.cpu().to(kind)


def gapped(x, strided):
    """The same values, in memory with gaps if asked for."""
    if not strided or x.numel() == 0:
        return x
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 16), 7.0).to(x.dtype).to(x.device)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


class Batch:
    """The tensors of one batch, in warploom's format, and its requests as the reference sees them.

    Args:
        spec: the case.
        lengths: (query rows, keys) of each request.
        seed: of the values.
    """

    def __init__(self, spec, lengths, seed):
        self.spec, self.lengths = spec, lengths
        self.generator = torch.Generator().manual_seed(seed)
        self.random = np.random.default_rng(seed)
        self.dtype = getattr(torch, spec["dtype"])
        self.kv_dtype = getattr(torch, spec["kv_dtype"] or spec["dtype"])
        self.device = torch.device(spec["device"])
        (self.hq, self.hk), (self.d, self.dv) = spec["heads"], spec["dims"]
        self.rows = [q for q, _ in lengths]
        self.keys = [k for _, k in lengths]
        self.q = self.values(sum(self.rows), self.hq, self.d, self.dtype, spec["q_size"])
        self.open = [torch.ones(1, q, k, dtype=torch.bool) for q, k in lengths]
        self.plan, self.positional = {}, []
        getattr(self, "_" + spec["format"][0])(*spec["format"][1:])

    def values(self, n, heads, dim, dtype, size=1.0):
        size = 20.0 if dtype == torch.int8 else size
        x = torch.randn(n, heads, dim, generator=self.generator) * size
        return x.to(self.dtype).to(dtype)

    def given(self, x):
        """On the device, [..., token, head, dim] or as the layout has it."""
        if self.spec["layout"] == "HND":
            x = x.transpose(-3, -2)
            x = x if self.spec["strided"] else x.contiguous()
        return gapped(x.to(self.device), self.spec["strided"])

    def per_request(self, k, v):
        """Keys and values of a packed [token, head, dim] pair, one request after another."""
        ends = np.cumsum([0, *self.keys])
        self.logical = [
            tuple(x[a:b].transpose(0, 1) for x in (k, v)) for a, b in itertools.pairwise(ends)
        ]

    def _ragged(self):
        k, v = (self.values(sum(self.keys), self.hk, n, self.kv_dtype) for n in (self.d, self.dv))
        self.per_request(k, v)
        self.kv = (self.given(k), self.given(v))
        self.positional = [self.indptr(self.rows), self.indptr(self.keys)]

    def _dense(self):
        most, count = max(self.keys), len(self.lengths)
        k, v = (
            self.values(count * most, self.hk, n, self.kv_dtype).view(count, most, self.hk, n)
            for n in (self.d, self.dv)
        )
        self.logical = [
            tuple(x[b, :n].transpose(0, 1) for x in (k, v)) for b, n in enumerate(self.keys)
        ]
        self.kv = (self.given(k), self.given(v))

    def _block_sparse(self, br, bc):
        k, v = (self.values(sum(self.keys), self.hk, n, self.kv_dtype) for n in (self.d, self.dv))
        self.per_request(k, v)
        self.kv = (self.given(k), self.given(v))
        counts, names, self.open = [], [], []
        for q, n in self.lengths:
            listed = self.random.random((-(-q // br), -(-n // bc))) < self.random.random()
            counts += list(listed.sum(1))
            names += list(np.nonzero(listed)[1])
            wide = torch.from_numpy(listed.repeat(br, 0).repeat(bc, 1)[None, :q, :n].copy())
            self.open.append(wide)
        self.plan = {
            "qo_indptr": self.indptr(self.rows), "kv_indptr": self.indptr(counts),
            "kv_indices": np.array(names, np.int32), "kv_lens": np.array(self.keys, np.int32),
        }  # fmt: skip

    def pool(self, page, pages):
        k, v = (
            self.values(pages * page, self.hk, n, self.kv_dtype).view(pages, page, self.hk, n)
            for n in (self.d, self.dv)
        )
        if self.d == self.dv and self.spec["joined"]:
            both = torch.stack([k, v], 1)  # [page, 2, token, head, dim]
            self.kv = self.given(both)
        else:
            self.kv = (self.given(k), self.given(v))
        return k, v

    def tables(self, counts, share, deeper):
        """Pages of each request: `share` are those of all, `deeper` more those of its neighbour."""
        groups = -(-len(counts) // 2)
        pages = self.random.permutation(sum(counts) + share + groups * deeper + 8)
        tables, used = [], share + groups * deeper
        for b, count in enumerate(counts):
            second = share + b // 2 * deeper
            known = np.concatenate([pages[:share], pages[second : second + deeper]])[:count]
            own = count - len(known)
            tables.append(np.concatenate([known, pages[used : used + own]]))
            used += own
        return tables, len(pages)

    def _paged(self, page, share=0, deeper=0):
        counts = [-(-n // page) for n in self.keys]
        tables, pages = self.tables(counts, share, deeper)
        k, v = self.pool(page, pages)
        self.logical = []
        for table, n in zip(tables, self.keys, strict=False):
            index = torch.from_numpy(table)
            self.logical.append(tuple(x[index].flatten(0, 1)[:n].transpose(0, 1) for x in (k, v)))
        last = [
            n - max(c - 1, 0) * page if n else 1 for n, c in zip(self.keys, counts, strict=False)
        ]
        joined = np.concatenate(tables).astype(np.int32) if tables else np.zeros(0, np.int32)
        self.positional = [self.indptr(self.rows), self.indptr(counts), joined,
                           np.array(last, np.int32)]  # fmt: skip

    def _composed(self, page, share, deeper):
        share = min(share, max([-(-n // page) for n in self.keys], default=0))
        # the page that a request's keys end in is read in part, so that it may be shared, too
        self._paged(page, share, deeper)

    def _selection(self, page):
        counts = [-(-n // page) for n in self.keys]
        budget = max([*counts, 1]) + 1
        pages = budget + 5
        k, v = self.pool(page, pages)
        table = np.stack([
            [self.random.permutation(pages)[:budget] for _ in range(self.hk)] for _ in counts
        ]).astype(np.int32)  # fmt: skip
        self.logical = []
        for entry, n in zip(table, self.keys, strict=False):
            pairs = []
            for x in (k, v):
                heads = [
                    x[torch.from_numpy(e).long(), :, h].flatten(0, 1)[:n]
                    for h, e in enumerate(entry)
                ]
                pairs.append(torch.stack(heads))
            self.logical.append(tuple(pairs))
        last = [
            n - max(c - 1, 0) * page if n else 1 for n, c in zip(self.keys, counts, strict=False)
        ]
        named = torch.from_numpy(table).to(self.device)
        last = np.array(last, np.int32)
        self.positional = [self.indptr(self.rows), self.indptr(counts), named, last]

    def _rolling(self, window, sinks, positions):
        k, v = (self.values(sum(self.keys), self.hk, n, self.kv_dtype) for n in (self.d, self.dv))
        self.per_request(k, v)
        self.positional = [self.indptr(self.rows), self.indptr(self.keys)]
        caches = [
            torch.full((len(self.keys), sinks + window, *x.shape[1:]), 5.0).to(x.dtype)
            for x in (k, v)
        ]
        self.open = []
        for b, (rows, n) in enumerate(self.lengths):
            for cache, whole in zip(caches, self.logical[b], strict=True):
                tokens = whole.transpose(0, 1)
                cache[b, : min(n, sinks)] = tokens[:sinks]
                for i, token in enumerate(tokens[sinks:]):  # later ones take the place of earlier
                    cache[b, sinks + i % window] = token
            kept = torch.arange(n)
            kept = (kept < sinks) | (kept >= n - window)
            if positions == "cache":  # nobody has heard of the others
                self.logical[b] = tuple(x[:, kept] for x in self.logical[b])
                self.keys[b], kept = int(kept.sum()), kept[kept]
            self.open.append(kept.expand(1, rows, len(kept)))
        self.lengths = list(zip(self.rows, self.keys, strict=True))
        self.kv = tuple(map(self.given, caches))

    @staticmethod
    def indptr(lengths):
        return np.cumsum([0, *lengths]).astype(np.int32)

    @property
    def sizes(self):
        """What each role of an input ranges over."""
        longest = max([*self.keys, 1])
        return {"batch": len(self.lengths), "q_head": self.hq, "kv_head": self.hk, "lane": self.d,
                "q_pos": longest, "kv_pos": longest, "q_row": max(self.total_rows, 1),
                "q_idx": max([*self.rows, 1])}  # fmt: skip

    @property
    def total_rows(self):
        return max(self.rows) if self.spec["format"][0] == "dense" else sum(self.rows)

    def requests(self):
        """Each request for the reference: q, k, v, `open`, and `at` for each hook."""
        begin = 0
        for b, ((rows, _keys), (k, v)) in enumerate(zip(self.lengths, self.logical, strict=False)):
            q = self.q[begin : begin + rows].transpose(0, 1)
            first = 0 if self.spec["format"][0] == "dense" else begin
            yield {"q": q, "k": k, "v": v, "open": self.open[b], "at": self.at(b, first)}
            begin += rows

    def at(self, b, first_row):
        rows, keys = self.lengths[b]
        n = torch.tensor
        own = {"batch": n(b), "q_len": n(rows), "kv_len": n(keys),
               "num_q_heads": n(self.hq), "num_kv_heads": n(self.hk)}  # fmt: skip
        index = torch.arange(rows)[None, :, None]
        head = torch.arange(self.hq)[:, None, None]
        query = {**own, "q_idx": index, "q_pos": index + keys - rows, "q_row": index + first_row,
                 "q_head": head, "kv_head": head // (self.hq // self.hk)}  # fmt: skip
        kv = torch.arange(keys)
        shared = {
            **own,
            "kv_head": torch.arange(self.hk)[:, None, None],
            "kv_pos": kv[None, :, None],
        }
        lanes = {
            x: {"lane": torch.arange(x)[None, None], "head_dim": n(x)} for x in (self.d, self.dv)
        }
        return {"query": {**query, **lanes[self.d]}, "key": {**shared, **lanes[self.d]},
                "value": {**shared, **lanes[self.dv]}, "output": {**query, **lanes[self.dv]},
                "logits": {**query, "kv_pos": kv[None, None]}}  # fmt: skip
