"""The place of the batch in the inputs of a call."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from pbjax.errors import InputError, InputTypeError

type _ArrayLike = Array | np.ndarray | jax.ShapeDtypeStruct


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAxes:
    """The place of the batch in the inputs of a call.

    Attributes:
      tree: Structure of the inputs.
      axes: Batch axis of each leaf; None for a leaf that all rows share.
      batch_size: Rows of the batch.
    """

    tree: jax.tree_util.PyTreeDef
    axes: tuple[int | None, ...]
    batch_size: int


def find_batch(inputs: Sequence[object], batch_axes: object) -> BatchAxes:
    """Reads the batch size off the inputs.

    Raises:
      InputError: No input has a batch axis, an input lacks its axis, or sizes differ.
    """
    if not inputs:
        raise InputError(
            "optimize(model): there are no example inputs; their shapes say what to plan for; pass "
            "the inputs of a call after the model"
        )
    axes = tuple(_spread(batch_axes, tuple(inputs)))
    refuse_lists("optimize: inputs", inputs)
    leaves, tree = jax.tree.flatten(tuple(inputs))
    sizes = {}
    for (path, leaf), axis in zip(
        jax.tree_util.tree_flatten_with_path(tuple(inputs))[0], axes, strict=True
    ):
        name = f"inputs{jax.tree_util.keystr(path)}"
        _check_array(name, leaf)
        if axis is not None:
            sizes[name] = _size(name, leaf, axis)
    if not sizes:
        raise InputError(
            f"optimize(batch_axes={batch_axes}): none of {len(leaves)} input arrays has a batch "
            "axis; at least one must; give it in batch_axes="
        )
    if len(set(sizes.values())) > 1 or 0 in sizes.values():
        found = ", ".join(f"{name} has {size} rows" for name, size in sizes.items())
        raise InputError(
            f"optimize(batch_axes={batch_axes}): {found}; all must have the same number of rows, "
            "one or more; correct batch_axes= (None for an input that all rows share)"
        )
    return BatchAxes(tree=tree, axes=axes, batch_size=next(iter(sizes.values())))


def _spread(batch_axes: object, inputs: tuple[object, ...]) -> list[Any]:
    """One axis for each leaf of the inputs, as it was given: not checked yet."""
    whole = batch_axes if isinstance(batch_axes, tuple) else (batch_axes,) * len(inputs)
    # Held in a leaf of its own, an axis of None differs from an input of None, which has no leaf.
    held = jax.tree.map(_Axis, whole, is_leaf=lambda axis: axis is None)
    try:
        spread = jax.tree.broadcast(held, inputs)
    except ValueError as error:
        raise InputError(
            f"optimize(batch_axes={batch_axes}): does not fit {len(inputs)} inputs; an axis, None, "
            "or one entry per input are allowed; give batch_axes= the structure of the inputs"
        ) from error
    return [leaf.axis for leaf in jax.tree.leaves(spread)]


@dataclass(frozen=True, slots=True)
class _Axis:
    axis: Any


def _check_array(name: str, leaf: object) -> None:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise InputTypeError(
            f"optimize: {name} is a {type(leaf).__name__}; inputs must be arrays or pytrees of "
            "arrays; wrap it in jnp.asarray, or bind it with functools.partial"
        )
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted():
        raise InputError(
            f"optimize: {name} was used up, as a state is by a call of its step; an array with "
            "values is needed; make it anew"
        )


def refuse_lists(what: str, inputs: Sequence[object]) -> None:
    """Refuses lists and tuples of numbers, which JAX takes for as many inputs.

    Raises:
      InputTypeError: An input is one.
    """
    for index, value in enumerate(inputs):
        leaves = jax.tree.leaves(value)
        if isinstance(value, list | tuple) and any(isinstance(x, int | float) for x in leaves):
            place = f"[{index}]" if what.endswith("s") else str(index)
            raise InputTypeError(
                f"{what}{place} is a {type(value).__name__} of numbers; arrays or pytrees of "
                "arrays are allowed; pass jnp.asarray of it"
            )


def _size(name: str, leaf: _ArrayLike, axis: object) -> int:
    shape = leaf.shape
    if not shape:
        raise InputError(
            f"optimize(batch_axes={axis}): {name} is a scalar, which has no rows; an axis of the "
            "batch is needed, or None for an input that all rows share; give batch_axes=, such as "
            "(0, None)"
        )
    if not isinstance(axis, int) or not 0 <= axis < len(shape):
        raise InputError(
            f"optimize(batch_axes={axis}): {name} has shape {tuple(shape)}; an axis from 0 to "
            f"{len(shape) - 1} or None is allowed; correct batch_axes="
        )
    return shape[axis]


def inputs_at(
    batch: BatchAxes, leaves: Sequence[_ArrayLike], batch_size: int
) -> tuple[object, ...]:
    """The shapes of the inputs of a call with another batch size.

    Args:
      batch: The place of the batch in the inputs.
      leaves: Leaves of the example inputs.
      batch_size: Rows of that call.
    """
    # What JAX makes of a dtype: 64-bit numbers of numpy become 32-bit ones.
    as_read = partial(jax.dtypes.canonicalize_dtype, allow_extended_dtype=True)
    shapes = [
        jax.ShapeDtypeStruct(_resized(leaf.shape, axis, batch_size), as_read(leaf.dtype))
        for leaf, axis in zip(leaves, batch.axes, strict=True)
    ]
    return jax.tree.unflatten(batch.tree, shapes)


def _resized(shape: tuple[int, ...], axis: int | None, batch_size: int) -> tuple[int, ...]:
    return shape if axis is None else (*shape[:axis], batch_size, *shape[axis + 1 :])
