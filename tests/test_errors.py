"""The catalogue of errors: where they are found, and what they keep on the way to a process."""

from __future__ import annotations

import pickle

import pytest

from warploom import errors, graph_errors, variant_errors


def test_errors_of_variants_are_found_beside_the_others() -> None:
    defined = [found for found in vars(variant_errors).values() if isinstance(found, type)]
    found = [getattr(errors, one.__name__, None) for one in defined]
    assert errors.VariantError in defined and found == defined


@pytest.mark.parametrize(
    "error",
    [
        errors.WrongCall(function="run", reason="no", hint=" Yes."),
        errors.BoundsExceeded(name="max_requests", got=3, bound=2),
        errors.FieldMisuse(name="left", variant="Window", reason="is a list"),
    ],
)
def test_errors_cross_processes(error: errors.WarploomError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), again.facts) == (str(error), error.facts)


def test_wrong_arguments_are_python_s_own_kinds_of_error() -> None:
    """So that code which catches those of other libraries catches these."""
    assert issubclass(errors.WrongShape, ValueError)
    assert issubclass(errors.WrongCall, TypeError) and issubclass(errors.WrongCall, ValueError)
    assert not issubclass(errors.CompileError, ValueError)


def test_reasons_of_others_end_as_our_sentences_do() -> None:
    error = graph_errors.CaptureFailed(what="step", reason="RuntimeError: it waits.")
    for each in error, pickle.loads(pickle.dumps(error)):
        assert "could not be captured: RuntimeError: it waits. Nothing in a step" in str(each)
