"""What stands in a hook is a method that ends, and `softmax` is a bool."""

from __future__ import annotations

from typing import Any

import pytest

import warploom as wl
from warploom.dsl.variants.trace import trace
from warploom.errors import EndlessFunctor, NoFunctor


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"softmax": "no"}, "softmax of Made is 'no'; expected True or False"),
        ({"softmax": 0}, "softmax of Made is 0; expected True or False"),
        ({"logits_mask": None}, "logits_mask of Made is None; .* where all keys are visible"),
        ({"key_transform": 3}, "key_transform of Made is 3; expected a method, or no key_trans"),
    ],
)
def test_class_bodies(body: dict[str, Any], text: str, placed: Any) -> None:
    with pytest.raises(NoFunctor, match=text) as caught:
        type("Made", (wl.Variant,), body)
    assert placed(caught.value, 'type("Made"')


@pytest.mark.parametrize(("name", "value"), [("softmax", "no"), ("logits_mask", None)])
def test_instances_are_checked_as_they_are_traced(name: str, value: Any) -> None:
    class Late(wl.Variant):
        def __init__(self) -> None:
            setattr(self, name, value)

    for variant in (Late(), wl.Causal() & Late()):
        with pytest.raises(NoFunctor, match=f"{name} of Late is {value!r}"):
            trace(variant)


def test_flags_and_hooks_may_be_any_descriptor() -> None:
    class Described(wl.Variant):
        softmax = False
        logits_mask = staticmethod(lambda at: at.kv_pos < 3)  # type: ignore[assignment]  # pyright: ignore

    assert list(trace(Described()).hooks) == ["logits_mask"]


def _deeper(x: Any) -> Any:
    return _deeper(x + 1)


class OfItself(wl.Variant):
    def logits_transform(self, logits: Any, at: wl.Position) -> Any:
        return self.logits_transform(logits, at) * 2


class OfHelper(wl.Variant):
    def logits_mask(self, at: wl.Position) -> Any:
        return _deeper(at.kv_pos) > 3


def _score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return _score(score, b, h, q_idx, kv_idx)


@pytest.mark.parametrize(
    ("make", "hook", "line"),
    [
        (OfItself, "logits_transform of OfItself", "self.logits_transform(logits, at)"),
        (OfHelper, "logits_mask of OfHelper", "_deeper(x + 1)"),
        (lambda: wl.flex(_score), "score_mod of flex__score", "_score(score, b, h"),
    ],
)
def test_functors_that_call_themselves(make: Any, hook: str, line: str, placed: Any) -> None:
    with pytest.raises(EndlessFunctor, match=f"{hook} calls itself without end") as caught:
        trace(make())
    assert placed(caught.value, line)
