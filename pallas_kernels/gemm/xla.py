"""The GEMMs as XLA runs them: a library product in the dtype of x, and what XLA fuses around it."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.gemm.activations import Activation
from pallas_kernels.gemm.reference import activate


def gemm(
    x: Float[Array, "*B K"],
    w: Float[Array, "K N"],
    bias: Float[Array, " N"] | None,
    residual: Float[Array, "*B N"] | None,
    *,
    activation: Activation | None,
    scale: float,
) -> Float[Array, "*B N"]:
    """The sum residual + scale * activation(x @ w + bias), each step rounded to x's dtype."""
    y = jnp.matmul(x, w)
    if bias is not None:
        y = y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)
    y = activate(y, activation)
    if scale != 1.0:
        y = y * jnp.asarray(scale, y.dtype)
    return y if residual is None else residual + y


def gated_gemm(
    x: Float[Array, "*B K"],
    w_gate: Float[Array, "K N"],
    w: Float[Array, "K N"],
    *,
    activation: Activation | None,
) -> Float[Array, "*B N"]:
    """activation(x @ w_gate) * (x @ w), each result rounded to the dtype of x."""
    return activate(jnp.matmul(x, w_gate), activation) * jnp.matmul(x, w)
