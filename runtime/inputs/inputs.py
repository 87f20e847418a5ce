"""A variant's extra scalars and tensors: origin of values, checks, and kernel parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from warploom.dsl.graphs import rotations
from warploom.dsl.graphs.loads import direct_indices
from warploom.dsl.types.axes import check_axes
from warploom.dsl.types.ir import walk
from warploom.dsl.types.spec import TensorField, TracedVariant
from warploom.errors import (
    FrozenByGraph,
    MissingInput,
    PlanMismatch,
    UnknownInput,
    WrongShape,
)
from warploom.runtime.devices.params import Members, write_array
from warploom.runtime.formats.batch import Batch
from warploom.runtime.inputs.args import Geometry
from warploom.runtime.inputs.axes import (
    BATCH_AXES,
    axis_sizes,
    check_captured,
    lane_sizes,
    reserved_sizes,
)
from warploom.runtime.inputs.lengths import LengthsCheck
from warploom.runtime.inputs.missing import missing_input, read_values, stale_shape, unknown_input
from warploom.runtime.inputs.offer import NOTHING, Offer, OfferedTensor
from warploom.runtime.inputs.outputs import as_given, check_rows_apart, given_to_run
from warploom.runtime.inputs.types import check_type
from warploom.runtime.inputs.values import (
    Number,
    as_input,
    as_seen_input,
    checked_scalar,
    extended,
    lies_in,
    refuse_large_on_device,
    with_an_element,
)
from warploom.scheduler.model.bounds import Bounds

_NONE: frozenset[str] = frozenset()


class Inputs:
    """Values of one wrapper's extra inputs.

    Values come from the variant's construction, from `plan` and from `run`; the later value wins. A
    value given to `run` holds for that run only. Host tensors that the mask reads are copied: the
    plan is made for their values, so the kernel must read the same values. The next plan reads the
    host tensors again.

    Frozen inputs belong to a wrapper for CUDA graphs: captured launches read tensors by address,
    size and stride, so all three stay from the first plan on. Copies go to memory whose size is
    reserved by the bounds, and the last entries are repeated up to that size: loads clamp their
    indices, so this changes no value. Other tensors are read in place, and no plan accepts another.

    Attributes:
        names: names of all inputs.
        outputs: names of the tensors that the kernel writes; they are never copied.
        scalars: planned values by name.
        tensors: planned tensors by name, on the wrapper's device.
        known: host values of planned tensors that the mask reads.
        learnt: planned tensors that require a gradient, as they were given.
        overridden: whether the last run wrote values of its own, which must be undone.
    """

    def __init__(
        self,
        traced: TracedVariant,
        geometry: Geometry,
        frozen: Bounds | None = None,
        call: str = "",
    ) -> None:
        """Start with the fields' defaults.

        Args:
            traced: the variant.
            geometry: heads and device that tensors must agree with.
            frozen: bounds of all batches, if a captured CUDA graph reads the inputs, so that they
                may not move between plans.
            call: the function that takes the inputs, for messages; `plan` and `run` by default.

        Raises:
            ArgumentError: the variant rotates more lanes than the geometry has.
        """
        rotations.check(traced, geometry.head_dim_qk, geometry.head_dim_v)
        self._traced = traced
        self._name, self._call = traced.name, call
        self._scalar_fields = {field.name: field for field in traced.scalars}
        self._tensor_fields = {field.name: field for field in traced.tensors}
        self.names = [*self._scalar_fields, *self._tensor_fields]
        self.outputs = traced.output_names
        self._geometry = geometry
        self._frozen = frozen is not None
        self._settled = False  # whether a plan was made
        self._reserved = {} if frozen is None else reserved_sizes(frozen)
        self._direct = direct_indices(traced)
        self._lanes = lane_sizes(traced, geometry.head_dim_qk, geometry.head_dim_v)
        self._own: dict[str, torch.Tensor] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        mask = traced.hooks.get("logits_mask")
        nodes = [] if mask is None else list(walk(mask))
        self.mask_scalars = frozenset(str(n.attr) for n in nodes if n.op == "scalar")
        self.mask_tensors = frozenset(str(n.attr) for n in nodes if n.op == "load")
        self._batch: Batch | None = None
        self._batch_sizes: dict[str, int] | None = None
        self._lengths: LengthsCheck | None = None  # checks values given to runs
        self.scalars: dict[str, Number] = {
            field.name: field.default for field in traced.scalars if field.default is not None
        }
        self.tensors: dict[str, torch.Tensor] = {}
        self.known: dict[str, np.ndarray[Any, Any]] = {}
        self.learnt: dict[str, torch.Tensor] = {}
        self._sources: dict[str, Any] = {}  # host tensors of the mask, as given,
        self._held: dict[str, torch.Tensor] = {}  # and copies of them
        self.overridden = False
        self._is_written = False  # whether the block holds `scalars`
        self._written: dict[str, Any] | None = None  # the last run's values, if all are scalars
        self._fixed = _NONE
        self._checks_runs = geometry.device.type == "cpu"  # on a GPU a check would wait for it

    def for_runs(self) -> dict[str, torch.Tensor]:
        """Planned tensors that a run may replace by others."""
        fixed = self._fixed | self.mask_tensors
        return {name: tensor for name, tensor in self.tensors.items() if name not in fixed}

    @property
    def incomplete(self) -> bool:
        """True if an input has no value yet, so that `run` must give one."""
        return len(self.scalars) + len(self.tensors) < len(self.names)

    @property
    def follow_batches(self) -> bool:
        """True if each plan must read planned tensors, or check them against the batch."""
        return bool(self._sources) or any(
            field.captured or name in self.outputs or not BATCH_AXES.isdisjoint(field.axes)
            for name in self.tensors
            for field in (self._tensor_fields[name],)
        )

    def read(self, given: dict[str, Any]) -> dict[str, Any]:
        """The values that graphs read; raises UnknownInput for the first name of no field."""
        return read_values(self._traced, given, self._unknown)

    def _unknown(self, name: str) -> UnknownInput:
        fields = [*self.names, *self._traced.unread]
        return unknown_input(self._name, name, fields, self._call)

    def bind(self, given: Mapping[str, Any]) -> None:
        """Check values and store them for later runs; raises as `offer` does."""
        self.keep(self.offer(given))

    def offer(self, given: Mapping[str, Any]) -> Offer:
        """Check values without storing them.

        Raises:
            UnknownInput, WrongDType, WrongDevice, WrongShape: an input is not as declared.
            FrozenByGraph: captured launches could not see the change.
        """
        if not given:
            return NOTHING
        offer = Offer({}, {})
        for name, value in given.items():
            if name in self._tensor_fields:
                offer.tensors[name] = self._offered(self._tensor_fields[name], value)
            else:
                offer.scalars[name] = self._thawed(name, self._scalar(name, value))
        return offer

    def keep(self, offer: Offer) -> None:
        """Store checked values for later runs."""
        if offer.scalars:
            self._is_written = False
            self.scalars.update(offer.scalars)
        for name, tensor in offer.tensors.items():
            self._keep_tensor(name, tensor)

    def rewritten(self) -> dict[str, Any]:
        """Host tensors of the mask whose contents have changed since they were copied."""
        if not self._sources:
            return {}
        return {name: source for name, source in self._sources.items() if self._differs(name)}

    def _differs(self, name: str) -> bool:
        now = as_input(self._tensor_fields[name], self._sources[name])
        copied = self._held[name][tuple(map(slice, self._shapes[name]))]
        if now.dtype == torch.bfloat16:  # NumPy has no bfloat16
            now, copied = now.float(), copied.float()
        return not np.array_equal(now.numpy(), copied.numpy(), equal_nan=True)

    def for_batch(self, batch: Batch, lengths: LengthsCheck | None = None) -> None:
        """Set the batch that tensors are checked against, and the variant's own check."""
        self._fixed = _NONE
        self._lengths = lengths if self._checks_runs else None
        self._batch = batch
        self._batch_sizes = None

    @property
    def _sizes(self) -> dict[str, int]:
        """Axis sizes of the batch, computed when a tensor is first checked."""
        if self._batch_sizes is None:
            batch = self._batch
            self._batch_sizes = {} if batch is None else axis_sizes(self._geometry, batch)
        return self._batch_sizes

    def fix(self, names: frozenset[str]) -> None:
        """Let runs refuse other tensors than the planned ones: the device planned with these."""
        self._fixed = names

    def check_planned(self, offer: Offer) -> dict[str, np.ndarray[Any, Any]]:
        """Check values against the batch: offered ones, and stored ones that they do not replace.

        Returns the host values that the mask will read once the offer is stored.

        Raises:
            WrongShape: a tensor is too small.
            MissingInput: the mask needs a scalar that has no value.
        """
        shapes = self._shapes
        if offer.tensors:
            offered = {name: tuple(x.tensor.shape) for name, x in offer.tensors.items()}
            shapes = {**shapes, **offered}
        for name, shape in shapes.items():
            try:
                self._check_sizes(self._tensor_fields[name], shape)
            except WrongShape as error:
                raise error if name in offer.tensors else stale_shape(error) from None
        if self.mask_scalars:
            for name in sorted(self.mask_scalars.difference(self.scalars, offer.scalars)):
                raise self._missing(name)
        if not offer.tensors:
            return self.known
        new = {name: tensor.known for name, tensor in offer.tensors.items()}
        return {name: x for name, x in {**self.known, **new}.items() if x is not None}

    def write_planned(self, block: Members) -> None:
        """Write all stored values; `block` must be the same at each call."""
        if self.overridden or not self._is_written:
            for name, value in self.scalars.items():
                block.set(f"x_{name}", value)
        for name, tensor in self.tensors.items():  # always, since a tensor may have moved
            write_array(block, name, *_address(tensor))
        self.overridden, self._written = False, None
        self._settled = self._is_written = True

    def write_given(self, given: Mapping[str, Any], block: Members) -> dict[str, torch.Tensor]:
        """Write the values given to `run`, after undoing those of the previous run.

        Returns the given tensors by field, which must live until the launch.

        Raises:
            UnknownInput, WrongDType, WrongDevice, WrongShape: an input is not as declared.
            PlanMismatch: the mask reads an input, and the plan was made for another value of it.
            MissingInput: an input has no value.
            ArgumentError: the variant's `check_lengths` refuses a host tensor of the mask.
        """
        if self._repeats(given):
            return {}
        if self.overridden:
            self.write_planned(block)
        values = self.check_given(given)
        self.overridden, self._written = bool(values), None  # first: an interrupt may come
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                write_array(block, name, *_address(value))
            else:
                block.set(f"x_{name}", value)
        is_plain = all(isinstance(value, (int, float)) for value in given.values())
        self._written = dict(given) if is_plain else None
        return {name: x for name, x in values.items() if isinstance(x, torch.Tensor)}

    def seen(self, name: str, value: Any) -> Number | torch.Tensor:
        """A value as an operator takes it; raises as `write_given` does."""
        return as_seen_input(self._scalar_fields.get(name) or self._tensor_fields[name], value)

    def _repeats(self, given: Mapping[str, Any]) -> bool:
        """True for the identical scalar objects of the last run, such as another layer's run."""
        written = self._written
        if written is None or len(written) != len(given):
            return False
        for name, value in given.items():  # noqa: SIM110  (a generator costs more)
            if written.get(name, self) is not value:
                return False
        return True

    def check_given(self, given: Mapping[str, Any]) -> dict[str, Number | torch.Tensor]:
        """Check the inputs of one run; raises as `write_given` does."""
        values: dict[str, Number | torch.Tensor] = {}
        for name, value in given.items():
            if name in self._tensor_fields:
                field = self._tensor_fields[name]
                if name in self._sources or name in self._fixed:
                    if name in self._sources and value is self._sources[name]:
                        if self._differs(name):
                            raise PlanMismatch(name=name, got="changed", expected="what it held")
                        continue  # the planned copy has its values
                    if value is not self.tensors[name]:
                        expected = "the values of the one given before"
                        raise PlanMismatch(name=name, got="another tensor", expected=expected)
                tensor = given_to_run(field, value)
                check_type(field, tensor, self._geometry.device, self._name)
                refuse_large_on_device(field, value, tensor)
                self._check_sizes(field, tuple(tensor.shape))
                values[name] = with_an_element(tensor)
            elif name not in self._traced.unread:
                values[name] = self._scalar(name, value)
                if name in self.mask_scalars and values[name] != self.scalars[name]:
                    raise PlanMismatch(name=name, got=value, expected=self.scalars[name])
        for name in self.names:
            if not (name in given or name in self.scalars or name in self.tensors):
                raise self._missing(name)
        if self._lengths is not None:
            self._lengths.of_run(given, values, self.known)
        return values

    def _thawed(self, name: str, value: Number) -> Number:
        before = self.scalars.get(name)
        if self._frozen and self._settled and name in self.mask_scalars and value != before:
            remedy = "Declare it as a Tensor, whose values may change in place"
            raise FrozenByGraph(name=name, got=value, expected=before, remedy=remedy)
        return value

    def _offered(self, field: TensorField, value: Any) -> OfferedTensor:
        name = field.name
        tensor = as_given(field, value)
        is_copied = tensor.device.type == "cpu" and name not in self.outputs
        device = tensor.device if is_copied else self._geometry.device
        check_type(field, tensor, device, self._name)
        placed = self._place(field, tensor, self._frozen and not lies_in(value, tensor))
        if self._frozen and self._settled and name in self.tensors:
            got, before = _address(placed), _address(self.tensors[name])
            if got != before:
                remedy = "Write new values into the first tensor"
                raise FrozenByGraph(name=name, got=got, expected=before, remedy=remedy)
        held = None
        if tensor.device.type == "cpu" and name in self.mask_tensors:
            held = extended(tensor, tuple(placed.shape)).clone()
        return OfferedTensor(value, tensor, placed, held)

    def _keep_tensor(self, name: str, new: OfferedTensor) -> None:
        for kept in (self.known, self.learnt, self._sources, self._held):
            kept.pop(name, None)
        if isinstance(new.source, torch.Tensor) and new.source.requires_grad:
            self.learnt[name] = new.source
        if new.held is not None:
            self._sources[name], self._held[name] = new.source, new.held
        if new.known is not None:
            self.known[name] = new.known
        if new.placed is not new.tensor:
            self._own[name] = new.placed.copy_(extended(new.tensor, tuple(new.placed.shape)))
        self.tensors[name] = new.placed
        self._shapes[name] = tuple(new.tensor.shape)

    def _place(self, field: TensorField, tensor: torch.Tensor, moves: bool) -> torch.Tensor:
        """The tensor itself, or own memory to copy it to; a newly made one (`moves`) is copied."""
        device = self._geometry.device
        shared = device.type == "cpu" and field.name not in self.mask_tensors and not moves
        is_used = tensor.device.type != "cpu" or field.name in self.outputs
        if tensor.numel() and (is_used or shared):
            return tensor
        own = self._own.get(field.name)
        shape = tuple(max(size, 1) for size in tensor.shape)
        if self._frozen:
            reserved = [self._reserved.get(axis or "", 0) for axis in field.axes]
            held = reserved if own is None else own.shape
            shape = tuple(max(size) for size in zip(shape, held, strict=True))
        if own is None or own.shape != shape:
            own = torch.empty(shape, dtype=tensor.dtype, device=device)
        return own

    def _scalar(self, name: str, value: Any) -> Number:
        field = self._scalar_fields.get(name)
        if field is None:
            raise self._unknown(name)
        return checked_scalar(field, value)

    def _check_sizes(self, field: TensorField, shape: tuple[int, ...]) -> None:
        sizes = self._sizes | self._lanes.get(field.name, {})
        check_axes(field, shape, sizes)
        check_rows_apart(field, self._geometry, self._batch)
        if field.captured:  # for declared fields, an axis None may have any size
            check_captured(field, shape, self._direct[field.name], sizes)

    def _missing(self, name: str) -> MissingInput:
        return missing_input(self._traced, name, self._sizes | self._lanes.get(name, {}))


def _address(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """What a captured launch reads of a tensor: address, shape and strides."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
