"""What `optimize` is asked for: checked once, before anything is traced, and handed on whole."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import SupportsIndex, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pbjax.arguments import check_type, whole_number, whole_numbers
from pbjax.device import Device, find_device
from pbjax.errors import DeviceError, InputError, InputTypeError
from pbjax.fusion import Patterns, Selection, selection_of
from pbjax.graph.functional import Model
from pbjax.graph.placement import placed
from pbjax.planning.plan import Plan
from pbjax.planning.profiling import Profile
from pbjax.runtime.phases import Progress
from pbjax.tuning.named_inputs import InputNames

type PathText = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A call of `pbjax.optimize`, where its arguments are described.

    Attributes:
      model: The model.
      inputs: Example inputs of a call.
      variables: What `init` of an unbound linen module returned.
      batch_axes: Where the batch is in the inputs, like in_axes of vmap.
      split: Sizes of the sub-batches that are to run; None to search.
      plan: The plan that is to run; None without one.
      profile: The measured table or its file; None for the tables that ship.
      device: Peak rates of the first device of JAX.
      buckets: Further batch sizes.
      unroll: Blocks in one step of the split program's loop; None lets several compete.
      fuse: What to replace by kernels.
      state: Number of the input that is carried from call to call; None without state.
      progress: Called as progress(phase, done, total, item).
    """

    model: Model
    inputs: tuple[object, ...]
    variables: Mapping[str, object] | None = None
    batch_axes: object = 0
    split: tuple[int, ...] | None = None
    plan: Plan | None = None
    profile: Profile | PathText | None = None
    device: Device = field(default_factory=lambda: this_device(None))
    buckets: tuple[int, ...] = ()
    unroll: int | None = None
    fuse: Selection = field(default_factory=lambda: selection_of("auto"))
    state: int | None = None
    progress: Progress | None = None

    @classmethod
    def of(
        cls,
        model: Model,
        inputs: Sequence[object],
        *,
        variables: Mapping[str, object] | None = None,
        batch_axes: object = 0,
        split: Sequence[SupportsIndex] | None = None,
        plan: Plan | PathText | None = None,
        profile: Profile | PathText | None = None,
        device: Device | None = None,
        buckets: Sequence[SupportsIndex] | None = None,
        unroll: int | None = None,
        fuse: Patterns = "auto",
        state: int | None = None,
        progress: Progress | None = None,
    ) -> "Request":
        """Checks the arguments of `optimize` that need no tracing.

        Raises:
          InputError: An argument has a wrong value, or two exclude each other.
          InputTypeError: An argument has a wrong type.
          FileError: The plan's file is missing or corrupt.
          DeviceError: The device is not of the kind that JAX runs on.
        """
        _check_types(plan=plan, profile=profile, device=device, progress=progress)
        _refuse_tracing(inputs)
        named = InputNames.of(model) if callable(model) else InputNames()
        if named.are_keys_of(inputs):
            (by_name,) = inputs
            inputs = named.in_order("optimize", (), cast(Mapping[str, object], by_name))
        return cls(
            model=model,
            inputs=tuple(jax.tree.map(placed, tuple(inputs))),
            variables=variables,
            batch_axes=batch_axes,
            split=None if split is None else tuple(whole_numbers("optimize(split)", split)),
            plan=plan if plan is None or isinstance(plan, Plan) else Plan.load(plan),
            profile=profile,
            device=this_device(device),
            buckets=() if buckets is None else tuple(whole_numbers("optimize(buckets)", buckets)),
            unroll=None if unroll is None else whole_number("optimize(unroll)", unroll),
            fuse=selection_of(fuse),
            state=None if state is None else whole_number("optimize(state)", state),
            progress=progress,
        )

    def __post_init__(self):
        """Refuses values that no model can be given, and two answers to one question."""
        if self.unroll is not None and self.unroll < 1:
            raise InputError(
                f"optimize(unroll={self.unroll}): not a number of blocks; 1 or more is allowed; "
                "leave out unroll= to have several compete"
            )
        if self.split is not None and self.plan is not None:
            raise InputError(
                f"optimize(split={self.split}, plan=...): both say what to run; one of them is "
                "allowed; leave out the other"
            )
        if self.state is not None:
            self._check_step()

    def _check_step(self) -> None:
        options = {
            "profile": self.profile,
            "buckets": self.buckets or None,
            "unroll": self.unroll,
        }
        given = [name for name, value in options.items() if value is not None]
        if given:
            raise InputError(
                f"optimize(state=...): {given[0]}= is given too, which is for functions without "
                f"state; a step is predicted by what its kernels take; leave out {given[0]}="
            )

    @property
    def names(self) -> InputNames:
        """The model's names of the inputs."""
        return InputNames.of(self.model).planned(self.inputs)

    @cached_property
    def leaves(self) -> tuple[Array, ...]:
        """Leaves of the example inputs.

        Raises:
          InputTypeError: One is only a shape.
        """
        leaves = jax.tree.leaves(self.inputs)
        for leaf in leaves:
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise InputTypeError(
                    f"optimize: an input is the shape {leaf}; arrays are needed, since programs "
                    "are compared and timed with their values; pass an example, such as jnp.zeros "
                    "of that shape"
                )
        return tuple(jnp.asarray(leaf) for leaf in leaves)

    def batch_sizes(self, batch_size: int) -> tuple[int, ...]:
        """The batch sizes to compile a program for, ascending.

        Args:
          batch_size: Rows of the example, the largest.

        Raises:
          InputError: A size is larger than the example's batch, or split or plan are for one size.
        """
        sizes = tuple(sorted({*self.buckets, batch_size}))
        if sizes[0] < 1 or sizes[-1] > batch_size:
            raise InputError(
                f"optimize(buckets={self.buckets}): the example has {batch_size} rows; buckets "
                f"from 1 to {batch_size} are allowed; pass an example of the largest batch"
            )
        if len(sizes) > 1 and (self.split is not None or self.plan is not None):
            raise InputError(
                f"optimize(buckets={sizes}): split= or plan= is given too, which is for one batch "
                "size; give either; leave out buckets= or the other"
            )
        return sizes


def _refuse_tracing(inputs: Sequence[object]) -> None:
    """Refuses to optimise inside of a transformation, where nothing can be measured."""
    made_here = jnp.zeros(())  # traced inside jax.jit, whatever the inputs are
    if any(isinstance(x, jax.core.Tracer) for x in (made_here, *jax.tree.leaves(inputs))):
        raise InputTypeError(
            "optimize: it is called while JAX traces a function, as inside jax.jit, vmap or grad; "
            "programs are compiled and measured, which takes arrays; call it outside of them, and "
            "what it returns too"
        )


def this_device(given: Device | None) -> Device:
    """The rates of the first device of JAX, unless others are given for its kind.

    Raises:
      DeviceError: They are of another kind, or nothing is known about this one.
    """
    kind = jax.devices()[0].device_kind
    if given is None:
        return find_device(kind, num_cores=os.cpu_count() or 1)
    if given.kind != kind:
        raise DeviceError(
            f"optimize(device=...): it is {given.kind!r}; programs are measured on the first "
            f"device of JAX, which is {kind!r}; give other figures for that kind, or leave out "
            "device="
        )
    return given


def _check_types(*, plan: object, profile: object, device: object, progress: object) -> None:
    file, found = (str, os.PathLike), "such as pbjax.device.find_device(kind)"
    if plan is not None:
        check_type("optimize(plan)", plan, (Plan, *file), "a pbjax.Plan, or its file,")
    if profile is not None:
        check_type("optimize(profile)", profile, (Profile, *file), "a pbjax.Profile, or its file,")
    if device is not None:
        check_type("optimize(device)", device, (Device,), f"a pbjax.Device, {found},")
    if progress is not None and not callable(progress):
        raise InputTypeError(
            f"optimize(progress): a {type(progress).__name__}; a function of (phase, done, total, "
            "item) is allowed; pass a function, or leave out progress="
        )
