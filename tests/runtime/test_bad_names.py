"""Names that FlashInfer, FlexAttention and engines have, and warploom has not, are answered."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import warploom as wl
from warploom import errors

SHAPE: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": "float32"}
ROWS = torch.zeros(3, 4, 16)
KEYS = torch.zeros(5, 2, 16)
MAKE: Any = wl.AttentionWrapper


def planned(variant: Any = None) -> Any:
    attention = wl.AttentionWrapper(variant, **SHAPE, device="cpu", backend="reference")
    attention.plan([0, 3], [0, 5])
    return attention


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("explain", r"method of wrappers: attention.explain\(\)"),
        ("softmax", "a variant with softmax = False does without"),
        ("and_masks", "chained by &"),
        ("or_masks", r"joined by \| in one mask_mod"),
        ("noop_mask", "without a mask all keys are visible"),
        ("BatchMLAPagedAttentionWrapper", "MLA is not there yet"),
        ("VariableBlockSparseAttentionWrapper", r"warploom.BlockSparse\(block=\(R, C\)\)"),
        ("segment_packbits", "warploom.pack_masks"),
        ("RoPE", "Did you mean 'Rope'"),
        ("alibi", "Did you mean 'Alibi'"),
    ],
)
def test_names_of_the_package(name: str, text: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}'.*{text}"):
        getattr(wl, name)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("head_dim_qk", "It is called head_dim"),
        ("head_dim_vo", "It is called head_dim_v"),
        ("o_data_type", "The output has the type of q, which is called dtype"),
        ("use_tensor_cores", "tiles, on tensor cores or not, are chosen"),
        ("float_workspace_buffer", "take workspace=... of yours"),
        ("jit_args", "warploom.Variant"),
        ("paged_kv_indptr_buffer", r"cuda_graph=True and bounds=warploom.Bounds\(...\)"),
        ("qo_indptr_buf", r"bounds=warploom.Bounds\(...\)"),
        ("rope_scale", r"warploom.Rope\(...\)"),
        ("decode", r"tile=warploom.TileConfig\(rows, keys, decode=warploom.TileConfig"),
    ],
)
def test_names_of_constructors(name: str, text: str) -> None:
    with pytest.raises(errors.WrongCall, match=f"it takes no '{name}'. .*{text}"):
        MAKE(**{**SHAPE, name: 16})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("softmax_scale", "called scale"),
        ("layout", r"give x\.transpose\(1, 2\), or call warploom\.attention, which takes a layout"),
        ("is_causal", r"mask_mod=.*q_idx >= kv_idx; give torch's create_block_mask\(mask_mod"),
        ("attn_mask", r"mask\[b, q_idx, kv_idx\]; give torch's create_block_mask"),
        ("attn_bias", r"score_mod: .* score \+ bias\[h, q_idx, kv_idx\]"),
        ("alibi_slopes", r"score_mod: .* slopes\[h\] \* \(kv_idx - q_idx\)"),
        ("softcap", r"score_mod: .* cap \* torch\.tanh\(score / cap\)"),
        ("window_size", r"mask_mod=.*\(q_idx - kv_idx <= left\)"),
        ("mask_mod", r"Give torch's create_block_mask\(mask_mod, B, H, .*\) as block_mask"),
        ("variant", r"warploom\.attention\(q, k, v, variant=warploom\.flex\(.*layout='HND'\)\."),
        ("kv_lens", r"as kv_lens, or plan a wrapper"),
        ("sinks", r"& warploom\.AttentionSink\(sink\), layout='HND'"),
        ("dropout_p", "serves inference, which drops nothing"),
        ("BLOCK_M", "tiles are chosen for the batch"),
        ("q", "called query"),
        ("q_idx", r"counts rows from 0 here, .*q_idx='position'\)"),
    ],
)
def test_names_of_flex_attention(name: str, text: str) -> None:
    flex_attention: Any = wl.flex_attention
    with pytest.raises(errors.WrongCall, match=f"it takes no '{name}'. .*{text}"):
        flex_attention(ROWS[None], ROWS[None], ROWS[None], **{name: 1})


@pytest.mark.parametrize(("name", "text"), [("layout", "layout='HND'"), ("scale", "sm_scale=...")])
def test_names_of_flex(name: str, text: str) -> None:
    flex: Any = wl.flex
    with pytest.raises(errors.WrongCall, match=f"no '{name}'. It belongs to the call: .*{text}"):
        flex(**{name: 1})


@pytest.mark.parametrize(
    ("names", "bound"),
    [
        (("max_batch", "max_batch_size", "max_seqs"), "max_requests"),
        (("max_tokens", "max_num_batched_tokens"), "max_q_rows"),
        (("max_seq_len", "max_model_len"), "max_kv_len"),
        (("max_pages",), "max_blocks"),
    ],
)
def test_names_of_bounds(names: tuple[str, ...], bound: str) -> None:
    make: Any = wl.Bounds
    for name in names:
        with pytest.raises(errors.WrongCall, match=f"no '{name}'. It is called {bound}.$"):
            make(**{name: 3})


@pytest.mark.parametrize("kind", [wl.KVScale, wl.HeadKVScale, wl.TokenKVScale])
@pytest.mark.parametrize("name", ["k", "v"])
def test_scales_have_other_names_where_they_are_made(kind: Any, name: str) -> None:
    field = f"{name}_scale"
    text = rf"no '{field}'. It is called {name} here \({field} in plan and run\).$"
    with pytest.raises(errors.WrongCall, match=text):
        kind(**{field: 0.5})


def test_sinks_of_a_sink() -> None:
    make: Any = wl.AttentionSink
    with pytest.raises(errors.WrongCall, match=r"no 'sinks'. It is called sink.$"):
        make(sinks=torch.zeros(4))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("num_qo_heads", r"option of the wrapper: AttentionWrapper\(..., num_q_heads=...\)"),
        ("head_dim_vo", r"AttentionWrapper\(..., head_dim_v=...\)"),
        ("num_kv_heads", r"AttentionWrapper\(..., num_kv_heads=...\)"),
        ("non_blocking", "plan waits for nothing but index arrays that lie on a GPU"),
        ("max_sequence_kv", "lengths follow from the index arrays"),
        ("fixed_split_size", "batch_invariant=True"),
    ],
)
def test_names_of_plans(name: str, text: str) -> None:
    with pytest.raises(errors.UnknownInput, match=f"no input '{name}'. .*{text}"):
        planned().plan([0, 3], [0, 5], **{name: 16})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sinks", r"warploom.AttentionSink\(sink\), whose field is sink"),
        ("q_scale", "Queries of 8 bits are not taken"),
        ("enable_pdl", "launches overlap where the GPU can do it"),
    ],
)
def test_names_of_runs(name: str, text: str) -> None:
    for variant in (None, wl.KVScale(1.0, 1.0)):  # whose k_scale is no q_scale
        with pytest.raises(errors.UnknownInput, match=f"no input '{name}'. .*{text}"):
            planned(variant).run(ROWS, (KEYS, KEYS), **{name: 0.5})


class Scaled(wl.Variant):
    """A scale that no append applies."""

    k_scale = wl.Scalar("float32")

    def logits_transform(self, logits: Any, at: wl.Position) -> Any:
        return logits * self.k_scale


PAGES = {"kv_indptr": [0, 1], "kv_indices": [0], "last_page_len": [3]}


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"kv_layout": "HND"}, errors.WrongCall, "takes no 'kv_layout'. It is called layout.$"),
        (
            {"k_scale": 0.5},
            errors.UnknownInput,
            "^append without a variant has no input 'k_scale'. What is stored is divided by .* "
            "key_transform and value_transform of a variant of your own",
        ),
        (
            {"variant": wl.QKNorm(), "q_weight": torch.ones(16), "k_weight": torch.ones(16)},
            errors.UnreadInput,
            "does not read 'q_weight' of QKNorm: .* Leave it out. It takes: norm_eps, k_weight",
        ),
        (
            {"variant": Scaled(), "k_scale": 0.5},
            errors.UnreadInput,
            "not read 'k_scale' of Scaled: .* is divided by .* It takes: no field of it",
        ),
    ],
)
def test_names_of_appends(given: Any, error: type[Exception], text: str) -> None:
    cache = torch.zeros(2, 2, 4, 2, 16)
    with pytest.raises(error, match=text):
        wl.append(KEYS[:3], KEYS[:3], cache, [0, 3], **PAGES, **given)


def test_an_appender_says_which_fields_it_does_not_read() -> None:
    appender = wl.Appender(
        wl.QKNorm(), kv_format=wl.Paged(4), num_kv_heads=2, head_dim=16, dtype="float32",
        device="cpu",
    )  # fmt: skip
    given = KEYS[:3], KEYS[:3], torch.zeros(2, 2, 4, 2, 16), [0, 3]
    with pytest.raises(errors.UnreadInput, match="does not read 'q_weight' of QKNorm"):
        appender(*given, **PAGES, q_weight=torch.ones(16), k_weight=torch.ones(16))
    with pytest.raises(errors.UnknownInput, match=r"no input 'kweight'\. Did you mean 'k_w"):
        appender(*given, **PAGES, kweight=torch.ones(16))


@pytest.mark.parametrize(("layout", "other"), [("NHD", "HND"), ("HND", "NHD")])
def test_caches_of_the_other_layout_are_recognised(layout: Any, other: str) -> None:
    cache = torch.zeros(2, 2, *((2, 4) if layout == "NHD" else (4, 2)), 16)
    appender = wl.Appender(
        kv_format=wl.Paged(4, layout=layout), num_kv_heads=2, head_dim=16, dtype="float32",
        device="cpu",
    )  # fmt: skip
    for call in appender, lambda *given, **table: wl.append(*given, **table, layout=layout):
        with pytest.raises(errors.WrongShape, match=f"k cache .*; layout='{other}' would fit it"):
            call(KEYS[:3], KEYS[:3], cache, [0, 3], **PAGES)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"dtype": "fp16"}, "float16"),
        ({"dtype": "half"}, "float16"),
        ({"dtype": "bf16"}, "bfloat16"),
        ({"kv_dtype": "fp8"}, "float8_e4m3fn"),
        ({"kv_dtype": "float8_e4m3"}, "float8_e4m3fn"),
        ({"kv_dtype": "fp8_e5m2"}, "float8_e5m2"),
    ],
)
def test_names_of_types(given: Any, meant: str) -> None:
    with pytest.raises(errors.UnsupportedSpec, match=rf"Did you mean '{meant}'\?$"):
        MAKE(**{**SHAPE, **given}, device="cpu")
    with pytest.raises(errors.ArgumentError, match=f"which may mean '{meant}'; expected one of"):
        wl.Appender(kv_format=wl.Paged(4), num_kv_heads=2, head_dim=16, device="cpu", **given)


def test_names_of_types_of_fields() -> None:
    with pytest.raises(errors.WrongDeclaration, match=r"'half' is none .* mean 'float16'\?"):
        wl.Scalar("half")
    with pytest.raises(errors.WrongDeclaration, match=r"'fp8' is none of [^.]*, bool\.\n"):
        wl.Scalar("fp8")  # no field has it


PAIR = r"'(k|key_cache)' is no .* 'kv'. Keys and values are one argument: run\(q, \(k, v\)\)"


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "missing required arguments: 'q', 'kv'. Write run"),
        ({"q": ROWS}, r"missing a required argument: 'kv'. Write run\(q, kv\)"),
        ({"q": ROWS, "paged_kv_cache": KEYS}, "'paged_kv_cache' is no .* It is called kv"),
        ({"q": ROWS, "k": KEYS, "v": KEYS}, PAIR),
        ({"q": ROWS, "cap": 3.0, "key_cache": KEYS}, PAIR),
        ({"query": ROWS, "kv": (KEYS, KEYS)}, "'query' is no .* It is called q"),
        ({"q": ROWS, "return_lse": True, "max_scores": ROWS}, "missing a required .* 'kv'"),
    ],
)
def test_runs_without_an_argument(given: Any, text: str, backend: Any) -> None:
    attention = wl.AttentionWrapper(wl.SoftCap(9.0), **SHAPE, device="cpu", backend=backend)
    run: Any = attention.run
    reason = rf"^AttentionWrapper.run\(\): .*{text}"
    with pytest.raises(errors.WrongCall, match=reason):
        run(**given)
    attention.plan([0, 3], [0, 5])
    for _ in range(2):  # also where tensors like these are known
        with pytest.raises(errors.WrongCall, match=reason):
            run(**given)
        run(ROWS, (KEYS, KEYS))
    with pytest.raises(TypeError):
        run(**given)


def test_keys_and_values_are_one_argument() -> None:
    with pytest.raises(errors.UnknownInput, match=r"no input 'v'. Keys and values are one arg"):
        planned().run(ROWS, KEYS, v=KEYS)
