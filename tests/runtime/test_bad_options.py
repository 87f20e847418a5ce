"""Options, numbers and inputs that say nothing sensible are refused where they are given."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import warploom as wl
from warploom import errors, testing

SHAPE: dict[str, Any] = {"num_q_heads": 2, "head_dim": 16, "device": "cpu", "dtype": "float32"}
Q = torch.zeros(1, 3, 2, 16)


@pytest.mark.parametrize("name", ["cuda_graph", "batch_invariant"])
def test_flags_of_wrappers_are_bools(name: str) -> None:
    with pytest.raises(errors.ArgumentError, match=f"{name}: is 'no'; expected True or False"):
        wl.AttentionWrapper(**{**SHAPE, name: "no"})


@pytest.mark.parametrize("name", ["max_requests", "max_q_rows"])
def test_bounds_that_admit_no_query(name: str) -> None:
    numbers = {"max_requests": 2, "max_q_rows": 4, "max_kv_len": 9, name: 0}
    with pytest.raises(errors.ArgumentError, match=rf"Bounds\.{name}: is 0, which admits no query"):
        wl.AttentionWrapper(**SHAPE, bounds=wl.Bounds(**numbers))


@pytest.mark.parametrize("backend", [None, "reference"])
def test_the_flag_of_runs_is_a_bool(backend: Any) -> None:
    wrapper = wl.AttentionWrapper(**SHAPE, backend=backend)
    wrapper.plan([0, 3], [0, 3])
    wrong: Any = "no"
    with pytest.raises(errors.ArgumentError, match="return_lse: is 'no'"):
        wrapper.run(Q[0], (Q[0], Q[0]), return_lse=wrong)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"return_lse": "no"}, "return_lse"),
        ({"lse_base": []}, "lse_base"),
        ({"lse_base": 2}, "lse_base"),
        ({"backend": []}, "backend"),
        ({"backend": 3}, "backend"),
        ({"variant": "causal"}, "variant: 'causal' is no Variant; .*warploom.Causal"),
    ],
)
def test_options_of_attention(given: dict[str, Any], name: str) -> None:
    with pytest.raises(errors.ArgumentError, match=name):
        wl.attention(Q, Q, Q, **given)


@pytest.mark.parametrize("name", ["num_q_heads", "num_kv_heads"])
def test_heads_are_no_astronomical_number(name: str) -> None:
    with pytest.raises(errors.ArgumentError, match=r"num_q_heads: .*at most 65536"):
        wl.AttentionWrapper(**{**SHAPE, "num_q_heads": 2**40, name: 2**40})


@pytest.mark.parametrize(
    "make",
    [
        lambda: wl.KVScale(k=math.nan),
        lambda: wl.KVScale(v=-0.5),
        lambda: wl.KVScale(v=math.inf),
        lambda: wl.QKNorm(eps=-1e-6),
        lambda: wl.QKNorm(eps=math.inf),
    ],
)
def test_numbers_of_variants(make: Callable[[], object]) -> None:
    with pytest.raises(errors.ArgumentError, match=r"not above 0|negative or not"):
        make()


@pytest.mark.parametrize(
    ("dtype", "wrong", "right"),
    [
        ("uint8", (-1, 256), (0, 255)),
        ("int8", (-129, 128), (-128, 127)),
        ("int32", (-(2**31) - 1, 2**31), (-(2**31), 2**31 - 1)),
        ("int64", (-(2**31) - 1, 2**31), (-(2**31), 2**31 - 1)),
        ("bool", (2, -1), (0, True)),
    ],
)
def test_scalars_hold_what_their_type_holds(dtype: str, wrong: Any, right: Any) -> None:
    class Holds(wl.Variant):
        number = wl.Scalar(dtype)

        def logits_mask(self, at: wl.Position) -> Any:
            return (at.kv_pos < 2) | (at.kv_pos == wl.to_int(self.number))

    for value in right:
        assert wl.attention(Q, Q, Q, variant=Holds(number=value)).shape == Q.shape
    for value in wrong:
        with pytest.raises(errors.FieldMisuse, match=f"got {value}; expected"):
            Holds(number=value)
        with pytest.raises(errors.WarploomError, match="number"):
            wl.attention(Q, Q, Q, variant=Holds(), number=value)


def test_a_packed_mask_is_called_by_its_name() -> None:
    with pytest.raises(errors.FieldMisuse, match="field 'packed_mask' of TreeMask"):
        wl.TreeMask("x")


@pytest.mark.parametrize("field", ["workspace", "kv_indices"])
def test_names_of_wrappers_arguments_are_no_fields(field: str) -> None:
    with pytest.raises(errors.FieldMisuse, match="reserved"):
        type("Odd", (wl.Variant,), {field: wl.Tensor("float32", (None,))})


def test_pictures_have_a_largest_size(tmp_path: Any) -> None:
    with pytest.raises(errors.ArgumentError, match=r"q_len: .* elements are too many"):
        wl.draw_mask(wl.Causal(), tmp_path / "mask.png", q_len=2**31)


@pytest.mark.parametrize(
    ("given", "name"), [({"max_examples": 0}, "max_examples"), ({"inputs": {"a": 1}}, "inputs")]
)
def test_property_tests_of_nothing(given: dict[str, Any], name: str) -> None:
    with pytest.raises(errors.ArgumentError, match=name):
        testing.check(wl.Causal(), **given)


def test_one_type_is_a_list_of_it() -> None:
    found = testing.setups(dtypes="float32", kv_dtypes="float8_e5m2", devices="cpu")
    assert {setup.dtype for setup in found} == {"float32"}
    assert {setup.kv_dtype for setup in found} == {"float8_e5m2"}


@pytest.mark.parametrize(("language", "text"), [("cuda", 3), ("cpp", b"")])
def test_custom_functions_are_text(language: str, text: Any) -> None:
    texts: dict[str, Any] = {"cuda": "WL_FN float f(float x) { return x; }", language: text}
    with pytest.raises(errors.ArgumentError, match=f"{language}: .*expected source text"):
        wl.custom_function("f", python=lambda x: x, **texts)


def test_one_float_mask_is_no_list() -> None:
    with pytest.raises(errors.ArgumentError, match="the mask holds"):
        wl.block_rows(torch.zeros(4, 4), (2, 2))


def test_one_scale_is_not_one_for_each_head() -> None:
    several: Any = torch.ones(2)
    text = r"of shape \(2,\); .* as wl.HeadKVScale and wl.TokenKVScale do\."
    with pytest.raises(errors.FieldMisuse, match=text):
        wl.KVScale(k=several)
    wrapper = wl.AttentionWrapper(wl.KVScale(1.0, 1.0), **SHAPE, backend="reference")
    wrapper.plan([0, 3], [0, 3])
    with pytest.raises(errors.WrongShape, match=r"one number, .* as wl.HeadKVScale"):
        wrapper.run(Q[0], (Q[0], Q[0]), v_scale=several)
