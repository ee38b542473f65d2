"""Arrays of a call: what they are checked for, and how a smaller batch is padded."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from pbjax.errors import InputError, InputTypeError
from pbjax.graph.placement import is_elsewhere, placed

type Dtype = Any  # of numpy, or one of JAX's own, as random keys have


def run_here[Out](program: Callable[..., Out], *arguments: Any) -> Out:
    """Calls a compiled program; only one that refuses arrays elsewhere gets them moved here."""
    try:
        return program(*arguments)
    except ValueError:
        if not any(map(is_elsewhere, jax.tree.leaves(arguments))):
            raise
    return program(*jax.tree.map(placed, arguments))


def refuse_traced(what: str, leaves: Sequence[Any]) -> None:
    """Raises InputTypeError where an input is being traced."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise InputTypeError(
            f"{what}: an input is being traced, as inside jax.jit, vmap or grad; a compiled "
            "program takes arrays; call it outside of them, or transform the model before "
            "optimizing it"
        )


def check_alike(
    what: str, leaves: Sequence[Any], signature: Sequence[tuple[tuple[int, ...], Dtype]]
) -> None:
    """Raises InputError unless leaves have the shapes and dtypes that were planned for."""
    for index, (leaf, (shape, dtype)) in enumerate(zip(leaves, signature, strict=True)):
        if getattr(leaf, "shape", None) != shape or not _same_dtype(leaf.dtype, dtype):
            raise InputError(
                f"{what} {index} is {described(leaf)}; {dtype}{list(shape)} was planned for; "
                "pass that, or optimize again for the new shape"
            )


def _same_dtype(found: Dtype, planned: Dtype) -> bool:
    """Whether JAX takes one for the other: it reads 64-bit numbers of numpy as 32-bit ones."""
    as_read = partial(jax.dtypes.canonicalize_dtype, allow_extended_dtype=True)
    return found == planned or as_read(found) == planned


def size_of(x: object, axis: int) -> int | None:
    """Length of an axis; None for what has no such axis."""
    shape = getattr(x, "shape", ())
    return shape[axis] if axis < len(shape) else None


def described(x: object) -> str:
    """Dtype and shape of an array, or the type of what is none."""
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, Array | np.ndarray) else type(x).__name__


def on_host(x: Array | np.ndarray, change: Callable[[np.ndarray], np.ndarray]) -> Array:
    """Changes an array on the host, where no new shape has to be compiled; keys by their data."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = on_host(jax.random.key_data(x), change)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jax.device_put(change(np.asarray(x)))


def repeat_last(values: np.ndarray, *, axis: int, size: int) -> np.ndarray:
    """Repeats the last row."""
    missing = size - values.shape[axis]
    last = np.take(values, [-1], axis=axis)
    return np.concatenate([values, np.repeat(last, missing, axis=axis)], axis=axis)
