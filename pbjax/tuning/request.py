"""What `optimize` is given: refused by name, before anything is traced, if it is of no use."""

import os
from collections.abc import Sequence
from typing import SupportsIndex

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pbjax.arguments import check_type, whole_number
from pbjax.device import Device, find_device
from pbjax.errors import DeviceError, InputError, InputTypeError
from pbjax.planning.plan import Plan
from pbjax.planning.profiling import Profile
from pbjax.tuning.choices import whole_numbers


def check_types(*, plan: object, profile: object, device: object, progress: object) -> None:
    """Refuses a plan, profile, device or progress that is none.

    Raises:
      InputTypeError: One is of another type.
    """
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
            "item) is allowed; pass such, or leave out progress="
        )


def arrays(inputs: Sequence[object]) -> list[Array]:
    """The leaves of example inputs.

    Raises:
      InputTypeError: One is only a shape.
    """
    leaves = jax.tree.leaves(inputs)
    for leaf in leaves:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise InputTypeError(
                f"optimize: an input is the shape {leaf}; arrays are needed, since programs are "
                "compared and timed with their values; pass an example, such as jnp.zeros of that "
                "shape"
            )
    return [jnp.asarray(leaf) for leaf in leaves]


def this_device(given: Device | None) -> Device:
    """The figures of the first device of JAX, unless others are given for its kind.

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


def loaded(plan: Plan | str | os.PathLike[str] | None) -> Plan | None:
    """The plan, read if it is a file.

    Raises:
      FileError: The file is missing or corrupt.
    """
    return plan if plan is None or isinstance(plan, Plan) else Plan.load(plan)


def check_step_options(**options: object) -> None:
    """Refuses what does not apply to a function with state."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise InputError(
            f"optimize(state=...): {given[0]}= is given too, which is for functions without state; "
            f"a step is predicted by what its kernels take; leave out {given[0]}="
        )


def check_split_or_plan(split: object, plan: object) -> None:
    """Refuses two answers to what is to be run."""
    if split is not None and plan is not None:
        raise InputError(
            f"optimize(split={split}, plan=...): both say what to run; one of them is allowed; "
            "leave out the other"
        )


def checked_unroll(unroll: object) -> int | None:
    """The number of blocks in a step of the loop, as Python's own.

    Raises:
      InputTypeError: It is no whole number.
      InputError: It is less than 1.
    """
    number = None if unroll is None else whole_number("optimize(unroll)", unroll)
    if number is not None and number < 1:
        raise InputError(
            f"optimize(unroll={number}): not a number of blocks; 1 or more is allowed; leave out "
            "unroll= to have several compete"
        )
    return number


def bucket_sizes(
    batch_size: int,
    buckets: Sequence[SupportsIndex] | None,
    split: Sequence[SupportsIndex] | None,
    plan: object,
) -> tuple[int, ...]:
    """The batch sizes to compile a program for, ascending.

    Args:
      batch_size: Of the example, the largest.
      buckets: Further sizes.
      split: Sizes of sub-batches, or None.
      plan: A plan, or None.

    Raises:
      InputTypeError: The sizes are no whole numbers.
      InputError: A size is larger than the example's batch, or split or plan are for one size.
    """
    declared = whole_numbers("buckets", () if buckets is None else buckets)
    sizes = tuple(sorted({*declared, batch_size}))
    if sizes[0] < 1 or sizes[-1] > batch_size:
        raise InputError(
            f"optimize(buckets={declared}): the example has {batch_size} rows; buckets "
            f"from 1 to {batch_size} are allowed; pass an example of the largest batch"
        )
    if len(sizes) > 1 and (split is not None or plan is not None):
        raise InputError(
            f"optimize(buckets={sizes}): split= or plan= is given too, which is for one batch "
            "size; give either; leave out buckets= or the other"
        )
    return sizes
