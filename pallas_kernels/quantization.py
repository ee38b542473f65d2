"""Values of 8 bits, int8 or FP8 (e4m3), with a scale for each row.

Rows of activations are tokens, those of a weight (N, K) its output features. Scales are symmetric:
zero is zero, and the largest absolute value of a row becomes the largest of the type.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num

QuantizedDtype = Literal["int8", "float8_e4m3fn"]
# The largest finite value of each type.
LARGEST = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0}
# Beside this f32 has steps of 1: a small number added to it is rounded, ties to even.
_INTEGERS = 1.5 * 2.0**23


class Quantized(NamedTuple):
    """The matrix values * scales[..., None].

    Attributes:
      values: Of int8 or float8_e4m3fn.
      scales: Of each row, in float32; None: 1.
    """

    values: Num[Array, "*B K"]
    scales: Float[Array, "*B"] | None


def quantize(x: Float[Array, "*B K"], dtype: QuantizedDtype) -> Quantized:
    """Quantises rows by plain JAX, as the norms' kernels do: for weights, once.

    Args:
      x: Rows of any floating dtype; their scales are computed in float32.
      dtype: "int8", rounded to nearest even, or "float8_e4m3fn".

    Returns:
      The values, and scales that are 0 for a row of zeros.

    Raises:
      ValueError: Another dtype.
    """
    if dtype not in (names := [kind.name for kind in LARGEST]):
        raise ValueError(
            f"quantize(dtype={dtype!r}): no such type; there are {', '.join(names)}; name one"
        )
    x = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(x), axis=-1) / LARGEST[jnp.dtype(dtype)]
    return Quantized(rounded(x / jnp.where(scales > 0, scales, 1.0)[..., None], dtype), scales)


def rounded(x: Float[Array, "*B"], dtype: DTypeLike) -> Num[Array, "*B"]:
    """Float32 values in another type; what one of 8 bits cannot hold becomes its largest.

    Written with what is fast on the GPU: to int8 it takes a third of the instructions of a round
    and a conversion.
    """
    largest = LARGEST.get(jnp.dtype(dtype))
    if largest is None:
        return x.astype(dtype)
    x = jnp.clip(x, -largest, largest)
    if jnp.issubdtype(dtype, jnp.integer):
        return lax.bitcast_convert_type(x + _INTEGERS, jnp.int32).astype(dtype)
    return x.astype(dtype)
