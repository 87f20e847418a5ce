"""Wrappers and appenders say what to keep instead of a copy of them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import warploom as wl
from warploom.errors import WrongCall

HEADS: dict[str, Any] = {"num_kv_heads": 2, "head_dim": 16, "dtype": "float32", "device": "cpu"}
PAGES = wl.Paged(4)


def planned() -> wl.AttentionWrapper:
    made = wl.AttentionWrapper(wl.Causal(), num_q_heads=4, **HEADS)
    made.plan([0, 2], [0, 3])
    return made


MADE: dict[str, tuple[Callable[[], Any], str]] = {
    "wrapper": (planned, "AttentionDeclaration"),
    "selection": (
        lambda: wl.PageSelectionWrapper(kv_format=PAGES, num_q_heads=4, **HEADS),
        "PageSelectionDeclaration",
    ),
    "appender": (lambda: wl.Appender(kv_format=PAGES, **HEADS), "AppenderDeclaration"),
}


@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy, pickle.dumps])
@pytest.mark.parametrize("name", MADE)
def test_copies_are_refused_with_what_to_keep(name: str, way: Callable[[Any], Any]) -> None:
    make, declaration = MADE[name]
    module = torch.nn.Module()
    module.attention = make()
    for whole in (module.attention, [module]):
        if whole is not module.attention and way is copy.copy:
            continue  # of a list, which holds the same module
        with pytest.raises(WrongCall, match=f"one device. Keep a {declaration}, and"):
            way(whole)
