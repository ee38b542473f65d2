"""Norms folded into the products after them: the weights, and the replacement of a norm.

A pre-norm layer multiplies LayerNorm(x) = (x - mean) / deviation * gain + offset by a weight W and
adds a bias. That is x @ V / deviation + c, where V is gain * W less the mean of each of its
columns, which takes the mean from x, and c is the bias and offset @ W. RMSNorm is the same without
mean and offset. So products read x, and the product that wrote x also returned 1 / deviation
(`pallas_kernels.gemm`).

In 16 bits V is rounded in place of the norm. The columns of a rounded V do not quite add up to 0: a
row whose mean is r times its deviation gets an error of about r times the dtype's, as large as the
rounding of x with that mean in it. Not here: norms whose result is also used otherwise, such as the
residual of a post-norm layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pallas_kernels.gemm import ScaledRows, scale_rows

# Hidden states, with the factors of their rows if the next norm is folded.
type Hidden = Float[Array, "B T D"] | ScaledRows


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedNorm:
    """The remainder of a folded norm: the factor of each row.

    Attributes:
      eps: Added to the variance or to the mean of squares.
      centred: Whether the norm was a LayerNorm; otherwise RMSNorm.
    """

    eps: float
    centred: bool

    def __call__(self, x: Hidden) -> ScaledRows:
        """Returns the rows with their factors, computed here if no product returned them."""
        if isinstance(x, ScaledRows):
            return x
        return scale_rows(x, eps=self.eps, centred=self.centred)


def fold(
    linears: Sequence[nnx.Linear],
    gain: Float[Array, " D"],
    offset: Float[Array, " D"] | None,
    *,
    eps: float,
    centred: bool,
) -> FoldedNorm:
    """Folds a norm into the weights and biases of the Linears after it.

    Args:
      linears: All Linears that read the norm.
      gain: The gain of the norm.
      offset: The offset of the norm; Linears without a bias get one from it.
      eps: The epsilon of the norm.
      centred: Whether the norm subtracts the mean of each row.

    Returns:
      The replacement of the norm.
    """
    for linear in linears:
        dtype = linear.kernel.dtype
        weight = linear.kernel[...].astype(jnp.float32)
        if offset is not None:
            with jax.default_matmul_precision("highest"):
                added = offset.astype(jnp.float32) @ weight
            bias = 0.0 if linear.bias is None else linear.bias[...].astype(jnp.float32)
            linear.bias = nnx.Param((bias + added).astype(dtype))
        weight = weight * gain.astype(jnp.float32)[:, None]
        if centred:
            weight = weight - jnp.mean(weight, axis=0, keepdims=True)
        linear.kernel = nnx.Param(weight.astype(dtype))
    return FoldedNorm(eps=eps, centred=centred)


def values_of(x: Hidden) -> Float[Array, "B T D"]:
    """Returns hidden states without the factors of their rows."""
    return x.values if isinstance(x, ScaledRows) else x
