"""Compares programs with the model, on fresh random inputs, by the one tolerance rule."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, jaxprs_in_params
from jaxtyping import Array

from pallas_kernels.testing import tolerance
from pbjax.graph.trace import Aval, Graph
from pbjax.runtime.near_ties import near_ties

CONTRACTIONS = ("dot_general", "conv_general_dilated")

# Integers may follow from comparisons of floats that no ranking shows, such as a threshold.
FLIPPED_SHARE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far outputs of a program are from those of the model.

    Attributes:
      largest: The largest absolute difference of numbers, or share of integers that differ; near-
        ties of a ranking do not count.
      fault: What is beyond the rule, and what is allowed; empty if nothing is.
    """

    largest: float = 0.0
    fault: str = ""

    def __or__(self, other: "Difference") -> "Difference":
        """The larger of two, and the first fault."""
        return Difference(largest=max(self.largest, other.largest), fault=self.fault or other.fault)


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
    if np.iscomplexobj(values):
        return _redrawn(rng, values.real) + 1j * _redrawn(rng, values.imag)
    low, high = values.min(), values.max()
    if np.issubdtype(values.dtype, np.integer):
        return rng.integers(low, high, values.shape, endpoint=True) if high - low > 1 else values
    wide = values.astype(np.float64)
    # Not np.unique, which would sort the pixels of a batch for seconds.
    if not np.all(np.isfinite(wide)) or np.isin(wide, (wide.min(), wide.max())).all():
        return values  # an additive or multiplicative mask
    return rng.normal(wide.mean(), wide.std(), values.shape)


def compare(
    graph: Graph, found: Sequence[Array], expected: Sequence[Array], values: Sequence[Array] = ()
) -> Difference:
    """Compares the outputs of a program with those of the model.

    Args:
      graph: The model's own graph, for the length of its sums and the number of roundings.
      found: Flattened outputs of the program.
      expected: Flattened outputs of the model as it was given, from the same inputs.
      values: Weights and inputs of the graph, with which near-ties are told; none are without them.
    """
    pairs = enumerate(zip(found, expected, strict=True))
    worst = Difference()
    for index, (a, b) in pairs:
        worst |= compare_output(graph, f"output {index}", a, b, index, values)
    return worst


def compare_output(
    graph: Graph,
    name: str,
    found: Array,
    expected: Array,
    output: int | None = None,
    values: Sequence[Array] = (),
) -> Difference:
    """Compares one output of a program with that of the model.

    Args:
      graph: As in `compare`.
      name: What the output is called in a fault.
      found: The output of the program.
      expected: The output of the model.
      output: Its number among the graph's outputs; None if it is a part of one.
      values: As in `compare`.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return Difference(
            largest=float("inf"),
            fault=f"{name} is {found.dtype}{list(found.shape)}, the model's {expected.dtype}"
            f"{list(expected.shape)}; both must be equal",
        )
    error, allowed = _error(graph, found, expected)
    if not error <= allowed and output is not None and values:
        found = _without_near_ties(graph, found, expected, output, values)
        error, allowed = _error(graph, found, expected)
    fault = ""
    if not error <= allowed:
        fault = (
            f"{name} differs by {error:.3g} from the model's; {allowed:.3g} is allowed for "
            f"{found.dtype}"
        )
    return Difference(largest=error, fault=fault)


def _is_exact(x: Array) -> bool:
    return not jnp.issubdtype(x.dtype, jnp.inexact)


def _plain(x: Array) -> Array:
    """The numbers that are compared: the data of keys, the two parts of complex numbers."""
    if _is_key(x):
        return jax.random.key_data(x)
    return jnp.stack([x.real, x.imag]) if jnp.iscomplexobj(x) else x


def _error(graph: Graph, found: Array, expected: Array) -> tuple[float, float]:
    """How far two arrays differ, and how far they may."""
    found, expected = _plain(found), _plain(expected)
    if _is_exact(found):
        return float(_flipped(found, expected)), FLIPPED_SHARE
    error, magnitude = map(float, error_and_magnitude(found, expected))
    return error, allowed_difference(graph, found.dtype, magnitude)


def _without_near_ties(
    graph: Graph, found: Array, expected: Array, output: int, values: Sequence[Array]
) -> Array:
    """What was found, with what is expected wherever a near-tie may have fallen otherwise."""
    if _is_key(found) or jnp.iscomplexobj(found):
        return found
    bound = 0.0
    if not _is_exact(found):
        bound = _error(graph, found, expected)[1]
    wrong = unlike = _unlike(found, expected, bound)
    for other in near_ties(graph, values, output, partial(allowed_difference, graph)):
        wrong = wrong & _unlike(found, other, bound)
        if not jnp.any(wrong):
            break
    return jnp.where(unlike & ~wrong, expected, found)


@jax.jit
def _unlike(found: Array, expected: Array, bound: float | Array) -> Array:
    """Where two arrays differ by more than a bound."""
    if _is_exact(found):
        return found != expected
    wide = jnp.promote_types(found.dtype, jnp.float32)
    a, b = found.astype(wide), expected.astype(wide)
    return ~((a == b) | (jnp.abs(a - b) <= bound) | (jnp.isnan(a) & jnp.isnan(b)))


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
