"""What `pack_masks` takes, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import warploom as wl
from warploom.errors import ArgumentError, WrongDType


def test_a_single_mask_is_no_list_of_masks() -> None:
    with pytest.raises(ArgumentError, match=r"masks\[0\] has shape \(9,\); .* 2 dimensions"):
        wl.pack_masks(np.ones((4, 9), bool))  # pyright: ignore[reportArgumentType]
    bits, offsets = wl.pack_masks([np.ones((4, 9), bool), np.ones((0, 3), bool)])
    assert offsets.tolist() == [0, 5, 5]
    assert len(bits) == 5


@pytest.mark.parametrize(
    ("mask", "held"),
    [
        (torch.zeros(2, 3), "torch.float32"),
        (torch.zeros(2, 3, dtype=torch.bfloat16), "torch.bfloat16"),
        (np.zeros((2, 3), np.float16), "float16"),
        ([[0.0, -math.inf]], "float64"),
        (np.array([[0, -10000]]), "other integers than 0 and 1"),
    ],
)
def test_masks_that_are_added_to_logits_are_not_packed_as_their_opposite(mask, held) -> None:
    with pytest.raises(ArgumentError, match=rf"masks\[1\] holds {held}; .*`mask > -inf`"):
        wl.pack_masks([np.ones((2, 3), bool), mask])


def test_masks_may_be_of_0_and_1() -> None:
    visible = np.array([[True, False, True]])
    for mask in (visible.astype(np.uint8), torch.tensor(visible).long(), visible.tolist()):
        assert wl.pack_masks([mask])[0].tolist() == [5]


@pytest.mark.parametrize("masks", [None, 3, True])
def test_what_is_no_list_of_masks_is_told_so(masks) -> None:
    with pytest.raises(ArgumentError, match=rf"masks: is {masks}; expected a list of masks, one"):
        wl.pack_masks(masks)


def test_masks_that_were_not_packed_are_told_to_be() -> None:
    shape: dict[str, Any] = {"num_q_heads": 1, "head_dim": 16, "dtype": "float32"}
    unpacked = wl.PackedMask(torch.ones(40).bool(), torch.tensor([0, 40]).int())
    with pytest.raises(WrongDType, match=r"Pack a mask with wl\.pack_masks\.$"):
        wl.AttentionWrapper(unpacked, **shape)


def test_masks_without_a_pair_can_be_planned() -> None:
    packed, offsets = wl.pack_masks([np.zeros((0, 5), bool), np.zeros((3, 0), bool)])
    assert packed.dtype == np.uint8
    assert offsets.tolist() == [0, 0, 0]
    shape: dict[str, Any] = {"num_q_heads": 1, "head_dim": 16, "dtype": "float32"}
    wrapper = wl.AttentionWrapper(wl.PackedMask(packed, offsets), **shape, device="cpu")
    wrapper.plan([0, 0, 3], [0, 5, 5])
    out = wrapper.run(torch.ones(3, 1, 16), (torch.ones(5, 1, 16), torch.ones(5, 1, 16)))
    assert not out.any()
