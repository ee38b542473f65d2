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
    dtype: jnp.dtype | None = None,
) -> tuple[Array, ...]:
    """Returns (normed,) or, with a residual, (normed, total); scales last if quantised to dtype."""
    total = x.astype(jnp.float32)
    if residual is not None:
        total = total + residual.astype(jnp.float32)
    y = total - jnp.mean(total, axis=-1, keepdims=True) if centred else total
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    y = y * scale.astype(jnp.float32)[None]
    if bias is not None:
        y = y + bias.astype(jnp.float32)[None]
    sums = () if residual is None else (total.astype(x.dtype),)
    if dtype is None:
        return (y.astype(x.dtype), *sums)
    largest = 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
    scales = jnp.max(jnp.abs(y), axis=-1) / largest
    codes = y / jnp.where(scales > 0, scales, 1.0)[:, None]
    codes = jnp.round(codes) if dtype == jnp.int8 else codes
    return (codes.astype(dtype), *sums, scales)
