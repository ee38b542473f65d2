"""Compares programs with the model, on fresh random inputs, by the one tolerance rule."""

from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, jaxprs_in_params
from jaxtyping import Array

from pallas_kernels.testing import tolerance
from pbjax.errors import FusionError, VerificationError
from pbjax.graph.trace import Aval, Graph

CONTRACTIONS = ("dot_general", "conv_general_dilated")

# Integers chosen by comparing floats (argmax, top-k) may flip where two candidates nearly tie.
FLIPPED_SHARE = 0.01


def fresh_inputs(
    inputs: Sequence[Array], in_axes: Sequence[int | None], seed: int
) -> tuple[Array, ...]:
    """Random inputs that resemble the example.

    Rows are drawn with replacement from the example, the same ones for every input, so that ids and
    their mask stay together. Floats are then drawn again with the example's mean and spread;
    integers with more than two values are drawn again from its range.

    Args:
      inputs: Leaves of the example inputs.
      in_axes: Batch axis of each; None keeps the input unchanged.
      seed: Seed of the random numbers.
    """
    rng = np.random.default_rng(seed)
    sizes = [x.shape[axis] for x, axis in zip(inputs, in_axes, strict=True) if axis is not None]
    rows = rng.integers(0, sizes[0], sizes[0])
    fresh = []
    for x, axis in zip(inputs, in_axes, strict=True):
        if axis is None:
            fresh.append(x)
        elif _is_key(x):
            fresh.append(jnp.take(x, rows, axis=axis))
        else:
            values = _redrawn(rng, np.take(np.asarray(x), rows, axis=axis))
            fresh.append(jnp.asarray(values, x.dtype))
    return tuple(fresh)


def _is_key(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _redrawn(rng: np.random.Generator, values: np.ndarray) -> np.ndarray:
    if values.size == 0 or values.dtype == bool:
        return values
    low, high = values.min(), values.max()
    if np.issubdtype(values.dtype, np.integer):
        return rng.integers(low, high, values.shape, endpoint=True) if high - low > 1 else values
    wide = values.astype(np.float64)
    # Not np.unique, which would sort the pixels of a batch for seconds.
    if not np.all(np.isfinite(wide)) or np.isin(wide, (wide.min(), wide.max())).all():
        return values  # an additive or multiplicative mask
    return rng.normal(wide.mean(), wide.std(), values.shape)


def largest_difference(
    graph: Graph, found: Sequence[Array], expected: Sequence[Array], name: str = "split"
) -> float:
    """Compares the outputs of a program with those of the model.

    Args:
      graph: The graph of both, for the length of its sums and the number of roundings.
      found: Flattened outputs of the program.
      expected: Flattened outputs of the model as it was given, from the same inputs.
      name: Name of the program: unsplit (with kernels), sequential or split.

    Returns:
      The largest absolute difference.

    Raises:
      VerificationError: An output differs by more than its dtype allows, or in shape or dtype.
    """
    worst = 0.0
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise VerificationError(
                f"optimize: output {index} of the {name} program is {a.dtype}{list(a.shape)}, of "
                f"the model {b.dtype}{list(b.shape)}; both must be equal; this is a fault of "
                "pbjax: please report the model"
            )
        if _is_key(a):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        worst = max(worst, _difference(graph, (index, name), a, b))
    return worst


def _difference(graph: Graph, place: tuple[int, str], found: Array, expected: Array) -> float:
    if jnp.iscomplexobj(found):
        found, expected = (jnp.stack([x.real, x.imag]) for x in (found, expected))
    if not jnp.issubdtype(found.dtype, jnp.floating):
        error, allowed = float(_flipped(found, expected)), FLIPPED_SHARE
    else:
        error, magnitude = map(float, error_and_magnitude(found, expected))
        allowed = allowed_difference(graph, found.dtype, magnitude)
    if error > allowed:
        index, name = place
        if name == "unsplit":  # without fusion this program is the model itself
            raise FusionError(
                f"optimize: output {index} of the model with kernels differs by {error:.3g} from "
                f"its own; {allowed:.3g} is allowed for {found.dtype}; pass fuse='none'"
            )
        raise VerificationError(
            f"optimize: output {index} of the {name} program differs by {error:.3g} from the "
            f"model's; {allowed:.3g} is allowed for {found.dtype}; use the unsplit model, and "
            "please report it"
        )
    return error


# Runs on the device: NumPy takes half a minute to compare a gigabyte of a vocabulary's scores.
@jax.jit
def error_and_magnitude(found: Array, expected: Array) -> tuple[Array, Array]:
    """Largest difference, infinite where non-finite values differ, and largest finite magnitude."""
    wide = jnp.promote_types(found.dtype, jnp.float32)
    a, b = found.astype(wide), expected.astype(wide)
    finite = jnp.isfinite(a) & jnp.isfinite(b)
    alike = finite | (a == b) | (jnp.isnan(a) & jnp.isnan(b))
    errors = jnp.where(finite, jnp.abs(a - b), jnp.where(alike, 0.0, jnp.inf))
    magnitudes = jnp.where(finite, jnp.abs(b), 0.0)
    return jnp.max(errors, initial=0.0), jnp.max(magnitudes, initial=0.0)


@jax.jit
def _flipped(found: Array, expected: Array) -> Array:
    """The share of values that differ."""
    return jnp.mean(found != expected, dtype=jnp.float32)


def allowed_difference(graph: Graph, dtype: np.dtype, magnitude: float) -> float:
    """The largest allowed difference between two programs of a graph in an output.

    Args:
      graph: The graph of both.
      dtype: Dtype of the output.
      magnitude: Its largest absolute value.
    """
    found = [c for operation in graph.operations for c in _contractions(operation.equation)]
    bound = tolerance(
        dtype,
        reduction=max((length for length, _ in found), default=1),
        magnitude=magnitude,
        roundings=max(len(found), 1),
        inner_dtype=max(
            [dtype, *(_rounds_to(d) for _, d in found)], key=lambda d: jnp.finfo(d).eps
        ),
    )
    return bound.absolute + bound.relative * magnitude


def _contractions(equation: JaxprEqn) -> list[tuple[int, np.dtype]]:
    """(Length of the last axis, dtype) of every contraction of an equation, in loops too."""
    if equation.primitive.name in CONTRACTIONS:
        operand = cast(Aval, equation.invars[0].aval)
        return [(operand.shape[-1] if operand.shape else 1, operand.dtype)]
    inner = [
        c for body in jaxprs_in_params(equation.params) for e in body.eqns for c in _contractions(e)
    ]
    return inner * equation.params.get("length", 1) if equation.primitive.name == "scan" else inner


def _rounds_to(dtype: np.dtype) -> np.dtype:
    """The dtype that a contraction rounds to: on a GPU float32 means TF32, 10 bits as in f16."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return np.dtype(np.float32)
    on_tensor_cores = jax.default_backend() == "gpu" and dtype == np.float32
    return np.dtype(np.float16) if on_tensor_cores else dtype
