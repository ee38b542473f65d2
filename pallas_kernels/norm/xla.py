"""The norms as XLA runs them: one fusion, statistics in float32, results in the dtype of x."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def normalise(
    x: Float[Array, "M D"],
    residual: Float[Array, "M D"] | None,
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None,
    *,
    eps: float,
    centred: bool,
) -> tuple[Float[Array, "M D"], ...]:
    """Returns (normed,) or, with a residual, (normed, total)."""
    total = x.astype(jnp.float32)
    if residual is not None:
        total = total + residual.astype(jnp.float32)
    y = total - jnp.mean(total, axis=-1, keepdims=True) if centred else total
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    y = y * scale.astype(jnp.float32)[None]
    if bias is not None:
        y = y + bias.astype(jnp.float32)[None]
    normed = y.astype(x.dtype)
    return (normed,) if residual is None else (normed, total.astype(x.dtype))
