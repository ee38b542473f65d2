"""Norms folded into the products after them: the weights, and what takes a norm's place.

A pre-norm layer multiplies LayerNorm(x) = (x - mean) / deviation * gain + offset by a weight W and
adds a bias. That is x @ V / deviation + c, where V is gain * W less the mean of each of its
columns, which takes the mean from x, and c is the bias and offset @ W. RMSNorm is the same without
mean and offset. So products read x; the product that wrote x gave 1 / deviation with it
(`pallas_kernels.gemm`).

In 16 bits V is rounded where the norm was. The columns of a rounded V do not quite add up to 0: a
row whose mean is r times its deviation gets an error of some r times the dtype's, as large as what
x has lost by being rounded with that mean in it. Not here: norms whose result is used otherwise
too, as the residual of a post-norm layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pallas_kernels.gemm import ScaledRows, scale_rows

# Hidden states, and the factors of their rows where a norm after them is folded.
type Hidden = Float[Array, "B T D"] | ScaledRows


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedNorm:
    """What is left of a norm: the factor of each row.

    Attributes:
      eps: Added to the variance or to the mean of squares.
      centred: Whether it was a LayerNorm; else RMSNorm.
    """

    eps: float
    centred: bool

    def __call__(self, x: Hidden) -> ScaledRows:
        """Returns the rows with their factors, computed here if no product has given them."""
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
    """Replaces the weights and biases of Linears by those with a norm before them folded in.

    Args:
      linears: All that read the norm.
      gain: Of the norm.
      offset: Of the norm; Linears without a bias get one from it.
      eps: Of the norm.
      centred: Whether the norm takes the mean from its rows.

    Returns:
      What takes the norm's place before these Linears.
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
