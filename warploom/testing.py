"""Property tests of a user's variant: random batches on every back end, against its functors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, TypeVar

from warploom.errors import ArgumentError, MissingPackage

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from warploom.dsl.types.formats import KVFormat
    from warploom.dsl.variants.variant import Variant
    from warploom.runtime.launching.pretransformed_keys import Way
    from warploom.runtime.trials.case import Case, Setup
    from warploom.runtime.trials.trials import MakeInputs

__all__ = ["CheckFailed", "cases", "check", "setups"]

_Name = TypeVar("_Name", str, str | None)
_KEYS = (0, 1, 2, 3, 15, 16, 17, 31, 33, 64, 65, 127, 129, 200, 300)
_ROWS = (0, 1, 1, 2, 3, 5, 16, 17, 33, 65)
_GROUPS = (1, 2, 3, 4, 8)  # query heads of a key/value head
_KV_DTYPES = (None, "float8_e4m3fn", None, "float8_e5m2", None, "int8")


class CheckFailed(AssertionError):
    """A back end disagrees with a variant's functors.

    Attributes:
        case: the smallest failing batch that was found; `mismatch(variant, case)` runs it again.
    """

    def __init__(self, text: str, case: Case) -> None:
        super().__init__(text)
        self.case = case


def check(
    variant: Variant | type[Variant] | None,
    *,
    formats: Sequence[KVFormat] | None = None,
    dtypes: Sequence[str] = ("float32", "bfloat16", "float16"),
    head_dims: Sequence[int] = (64,),
    kv_dtypes: Sequence[str | None] | None = None,
    devices: Sequence[str] | None = None,
    inputs: MakeInputs | None = None,
    max_examples: int = 60,
    seed: int = 0,
) -> None:
    """Compare every back end of this machine with the variant's functors, run by NumPy in float64.

    Batches are small and nasty: requests with no query or no key, one key, lengths around tile
    borders, more queries than keys, grouped heads, shuffled pages. A failure is shrunk to the
    smallest batch. The allowed error is twice that of a careless computation in the same dtype.

    Args:
        variant: the variant; fields get random values of the shapes that their axes ask for, and
            bound scalars keep theirs. The size of a dimension of no axis is that of the position
            which indexes it. Where the index is computed, no size is known: bind the tensor, whose
            values are then repeated or cut to the heads and lengths of each batch, or let `inputs`
            give it.
        formats: KV formats to draw from; one of each kind by default.
        dtypes: of q, k and v; float32 runs on the CPU only.
        head_dims: head dimensions to draw from.
        kv_dtypes: of k and v, where None is the dtype of q; by default every second kernel has an
            8-bit one. On CUDA these need head dimensions that are multiples of 16.
        devices: "cpu", "cuda"; all that this machine has by default.
        inputs: `inputs(case, rng)` gives values of fields by name, where random ones would make no
            sense. `case` has num_q_heads, num_kv_heads, q_lens and kv_lens (a length for each
            request) and setup, with head_dim, dtype and device; `rng` is NumPy's generator.
        max_examples: batches to try.
        seed: of the drawing; the same one draws the same batches.

    Raises:
        CheckFailed: with a report of the smallest failing batch.
        MissingInput: the size of an unbound tensor is unknown; found before anything is compiled.
        MissingPackage: hypothesis is not installed.
        ArgumentError: no examples, or `inputs` that is no function.
    """
    from warploom.dsl.variants.variant import as_variant
    from warploom.runtime.declaring.declare import checked_count

    variant = as_variant(variant)
    checked_count("max_examples", max_examples)
    if not (inputs is None or callable(inputs)):
        reason = f"is {inputs!r}; expected a function of (case, rng) that gives values by name"
        raise ArgumentError(name="inputs", reason=reason)
    chosen = setups(
        formats=formats, dtypes=dtypes, head_dims=head_dims, kv_dtypes=kv_dtypes, devices=devices
    )
    _draw_once(variant, chosen, inputs)
    subjects = warm_up([(variant, setup) for setup in chosen])
    run_property(subjects, inputs, max_examples, seed)


def _draw_once(variant: Variant, chosen: Sequence[Setup], inputs: MakeInputs | None) -> None:
    """Draw the inputs of an ordinary batch, to find what is missing before a long compile."""
    import numpy as np

    from warploom.runtime.trials.case import Case
    from warploom.runtime.trials.random_inputs import random_inputs

    for setup in chosen[:1]:
        case, rng = (
            Case(setup, (3, 3), (20, 20), num_kv_heads=2, group_size=2),
            np.random.default_rng,
        )
        given = {} if inputs is None else inputs(case, rng(0))
        random_inputs(variant, case, rng(0), set(given))


def setups(
    formats: Sequence[KVFormat] | None = None,
    dtypes: Sequence[str] = ("float32", "bfloat16", "float16"),
    head_dims: Sequence[int] = (64,),
    kv_dtypes: Sequence[str | None] | None = None,
    devices: Sequence[str] | None = None,
) -> list[Setup]:
    """Few kernels that together meet each format, dtype, head dimension, device and tile.

    Formats, dtypes, dimensions and tiles are walked through in step, not multiplied, since each
    combination is one more kernel to compile.
    """
    import torch

    from warploom.dsl.types.formats import BlockSparse, Dense, Paged, Ragged, Rolling
    from warploom.runtime.trials.case import Setup

    if formats is None:
        formats = (
            Ragged(),
            Paged(16),
            Dense(layout="HND"),
            BlockSparse(block=(32, 16)),
            Rolling(50, 4),
        )
    dtypes, kv_dtypes = _listed(dtypes), None if kv_dtypes is None else _listed(kv_dtypes)
    devices = None if devices is None else _listed(devices)
    if devices is None:
        devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    found = []
    for device in devices:
        usable = [dtype for dtype in dtypes if device == "cpu" or dtype != "float32"]
        asked = (formats, usable, head_dims, kv_dtypes or ())
        for i in range(max(map(len, asked)) if usable else 0):
            dim = head_dims[i % len(head_dims)]
            dtype, narrow = usable[i % len(usable)], kv_dtypes or _KV_DTYPES
            stored = narrow[i % len(narrow)]
            if device == "cuda" and dim % 16:
                stored = None
            found.append(Setup(formats[i % len(formats)], dtype, dim, dim, device, kv_dtype=stored))
    return found


def _listed(names: Sequence[_Name] | str) -> Sequence[_Name | str]:
    """One name counts as a list of it, and not of its letters."""
    return (names,) if isinstance(names, str) else names


def cases(setup: Setup) -> SearchStrategy[Case]:
    """Batches for one kernel."""
    from warploom.runtime.formats import format_of
    from warploom.runtime.trials.case import Case

    _need_hypothesis()
    from hypothesis import strategies as st

    decode = None if setup.tile is None else setup.tile.decode
    most = max(_GROUPS) if decode is None else decode.rows  # more are refused
    kv_len = st.one_of(st.sampled_from(_KEYS), st.integers(0, 80))
    q_len = st.one_of(st.sampled_from(_ROWS), st.integers(0, 40))
    if format_of(setup.kv_format).batched:
        lengths = st.builds(
            lambda q, kv: ((q,) * len(kv), tuple(kv)),
            q_len,
            st.lists(kv_len, min_size=1, max_size=3),
        )
    else:
        lengths = st.lists(st.tuples(q_len, kv_len), min_size=1, max_size=4).map(
            lambda pairs: (tuple(q for q, _ in pairs), tuple(kv for _, kv in pairs))
        )
    return st.builds(
        lambda lens, heads, group, scale, seed, sm_limit: Case(
            setup, lens[0], lens[1], heads, group, scale, seed, sm_limit
        ),
        lengths,
        st.integers(1, 3),
        st.sampled_from([group for group in _GROUPS if group <= most]),
        st.sampled_from((1.0, 0.1, 4.0)),
        st.integers(0, 1000),
        st.sampled_from((None, 1, 2, 3)),
    )


def run_property(
    subjects: Sequence[tuple[Variant, Setup]],
    inputs: MakeInputs | None,
    max_examples: int,
    seed: int = 0,
) -> None:
    """Draw a kernel and a batch, run, compare; raise CheckFailed with the smallest failure."""
    _need_hypothesis()
    import hypothesis
    from hypothesis import strategies as st

    from warploom.runtime.trials.trials import mismatch

    slow, large = hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large
    drawn = st.integers(0, len(subjects) - 1).flatmap(
        lambda i: st.tuples(st.just(subjects[i][0]), cases(subjects[i][1]))
    )

    @hypothesis.settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        print_blob=False,
        report_multiple_bugs=False,
        verbosity=hypothesis.Verbosity.quiet,
        suppress_health_check=[slow, large],
    )
    @hypothesis.seed(seed)
    @hypothesis.given(drawn)
    def one(subject: tuple[Variant, Case]) -> None:
        variant, case = subject
        try:
            found = mismatch(variant, case, inputs)
        except Exception as error:
            raise CheckFailed(
                _report(variant, case, f"{type(error).__name__}: {error}"), case
            ) from error
        if found is not None:
            raise CheckFailed(_report(variant, case, found), case)

    try:
        one()
    except CheckFailed as failure:
        raise CheckFailed(str(failure), failure.case) from failure.__cause__


def warm_up(
    subjects: Sequence[tuple[Variant, Setup]], progress: bool | None = None
) -> list[tuple[Variant, Setup]]:
    """Compile all kernels in parallel; returns the subjects, each with a tile of its own."""
    from warploom.codegen.build import build_all
    from warploom.codegen.source import TileChoice
    from warploom.runtime.wrappers.wrapper import AttentionWrapper

    found, jobs = [], []
    for i, (variant, setup) in enumerate(subjects):
        wrapper = AttentionWrapper(
            variant,
            kv_format=setup.kv_format,
            num_q_heads=1,
            head_dim=setup.head_dim,
            head_dim_v=setup.head_dim_v,
            dtype=setup.dtype,
            kv_dtype=setup.kv_dtype,
            device=setup.device,
            key_transform=setup.key_transform,
        )
        if setup.tile is None:
            choices = wrapper.choices()
            choice = choices[i % len(choices)]
            way: Way = "before" if choice.pretransformed_keys else "fused"
            setup = replace(setup, tile=choice.tile, key_transform=way)
        else:
            before = setup.key_transform == "before"
            choice = TileChoice(setup.tile, pretransformed_keys=before)
        jobs += wrapper.build_jobs([choice])
        found.append((variant, setup))
    build_all(jobs, progress=progress)
    return found


def _report(variant: Variant, case: Case, found: str) -> str:
    return f"{variant!r} fails on\n  {case}\n  {found}"


def _need_hypothesis() -> None:
    try:
        import_module("hypothesis")
    except ImportError as error:
        raise MissingPackage(
            what="warploom.testing", package="hypothesis", requirement="hypothesis>=6.100"
        ) from error
