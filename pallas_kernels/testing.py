"""The tolerance rule by which kernels, and programs of them, are compared with a reference.

No test states a tolerance of its own. It states the computation: the number of summed terms, the
number of roundings on the way, the size of the values. The rule turns these into an absolute and a
relative bound.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """The bound |actual - expected| <= absolute + relative * |expected|, element by element."""

    absolute: float
    relative: float


def tolerance(
    dtype: DTypeLike,
    *,
    reduction: int,
    magnitude: float,
    roundings: int = 0,
    inner_dtype: DTypeLike | None = None,
    function_error: float = 0.0,
) -> Tolerance:
    """Computes the allowed distance of a result from a float32 reference on the same inputs.

    relative = eps(dtype): the rounding of the result itself, half an eps, and as much for a tie
    that falls the other way. absolute = magnitude * (eps(f32) * (sqrt(n) + n / 8) + 2 * eps(inner)
    * sqrt(r)) + function_error. The first term is an f32 sum of n terms: random rounding grows as
    sqrt(n), and tensor cores truncate once in every few products, which grows as n. The second is r
    independent roundings, each uniform in half an eps; the factor 2 is seven standard deviations of
    one, so that the largest of many elements stays inside.

    Args:
      dtype: The dtype of the result.
      reduction: The number of terms n summed into one element (1: elementwise).
      magnitude: The size of the values, usually the largest absolute value of the reference.
      roundings: The number r of sequential roundings to inner_dtype before the result is formed.
      inner_dtype: The dtype of intermediate values; by default that of the result.
      function_error: Absolute error of an approximated function, as its kernel states it.

    Returns:
      The bound.

    Raises:
      ValueError: A count below its minimum, or a magnitude that is negative or not finite.
    """
    if reduction < 1 or roundings < 0 or function_error < 0:
        raise ValueError(
            f"tolerance(): reduction={reduction}, roundings={roundings}, "
            f"function_error={function_error}; reduction is at least 1, the others at least 0; "
            "state what was computed"
        )
    if not (math.isfinite(magnitude) and magnitude >= 0):
        raise ValueError(
            f"tolerance(): magnitude is {magnitude}; it is finite and not negative; check the "
            "reference"
        )
    summing = _eps(jnp.float32) * (math.sqrt(reduction) + reduction / 8)
    rounding = 2 * _eps(dtype if inner_dtype is None else inner_dtype) * math.sqrt(roundings)
    return Tolerance(
        absolute=magnitude * (summing + rounding) + function_error, relative=_eps(dtype)
    )


def assert_close(
    actual: ArrayLike,
    expected: ArrayLike,
    *,
    reduction: int,
    magnitude: float | None = None,
    roundings: int = 0,
    inner_dtype: DTypeLike | None = None,
    function_error: float = 0.0,
    name: str = "result",
) -> None:
    """Asserts that actual agrees with a float32 (or wider) reference, by the rule of `tolerance`.

    Args:
      actual: The result to judge; its dtype sets the relative bound.
      expected: The reference from the same inputs. Infinities and NaNs must occur at the same
        places in both.
      reduction: See `tolerance`.
      magnitude: See `tolerance`; by default the largest finite absolute value of expected.
      roundings: See `tolerance`.
      inner_dtype: See `tolerance`.
      function_error: See `tolerance`.
      name: The name of the result, for the message.

    Raises:
      AssertionError: The shapes differ, or an element lies outside the bound; names the worst one.
    """
    got, want = np.asarray(actual), np.asarray(expected)
    if got.shape != want.shape:
        raise AssertionError(f"{name}: shape is {got.shape}; expected {want.shape}")
    dtype, got, want = got.dtype, got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(want)
    if magnitude is None:
        magnitude = float(np.max(np.abs(want), where=finite, initial=0.0))
    bound = tolerance(
        dtype,
        reduction=reduction,
        magnitude=magnitude,
        roundings=roundings,
        inner_dtype=inner_dtype,
        function_error=function_error,
    )
    excess = _excess(got, want, bound)
    if np.any(excess > 0):
        worst = tuple(int(i) for i in np.unravel_index(np.argmax(excess), excess.shape))
        raise AssertionError(
            f"{name}: {int(np.sum(excess > 0))} of {excess.size} elements outside the tolerance; "
            f"worst at {worst}: {got[worst]:.9g}, expected {want[worst]:.9g}; allowed "
            f"{bound.absolute:.3g} + {bound.relative:.3g} * |expected|"
        )


def _excess(got: np.ndarray, want: np.ndarray, bound: Tolerance) -> np.ndarray:
    """Returns each element's distance beyond its bound; infinite if only one value is finite."""
    finite = np.isfinite(want)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(invalid="ignore"):
        outside = np.abs(got - want) - bound.absolute - bound.relative * np.abs(want)
    outside = np.where(np.isfinite(got) & finite, outside, np.inf)
    return np.where(same, 0.0, outside)


def _eps(dtype: DTypeLike) -> float:
    dtype = jnp.dtype(dtype)
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.floating) else 0.0
