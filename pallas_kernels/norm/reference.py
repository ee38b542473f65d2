"""Norms in plain jnp and float32, the reference of the kernels."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def layer_norm(
    x: Float[Array, "*B D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None,
    *,
    eps: float,
) -> Float[Array, "*B D"]:
    """(x - mean) / sqrt(variance + eps) * scale + bias over the last axis, in float32."""
    x = x.astype(jnp.float32)
    y = rms_norm(x - jnp.mean(x, axis=-1, keepdims=True), scale, eps=eps)
    return y if bias is None else y + jnp.broadcast_to(bias.astype(jnp.float32), y.shape)


def rms_norm(
    x: Float[Array, "*B D"], scale: Float[Array, " D"], *, eps: float
) -> Float[Array, "*B D"]:
    """Computes x / sqrt(mean of squares + eps) * scale over the last axis, in float32."""
    x = x.astype(jnp.float32)
    y = x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return y * jnp.broadcast_to(scale.astype(jnp.float32), y.shape)


def add(x: Float[Array, "*B D"], residual: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """The sum x + residual, in float32."""
    return x.astype(jnp.float32) + residual.astype(jnp.float32)


def quantization_scales(normed: Float[Array, "*B D"], largest: float) -> Float[Array, "*B"]:
    """Returns the divisor of each row that turns its largest absolute value into `largest`."""
    return jnp.max(jnp.abs(normed), axis=-1) / largest


def unrounded_codes(
    normed: Float[Array, "*B D"], scales: Float[Array, "*B"]
) -> Float[Array, "*B D"]:
    """The values of each row over its scale, in float32: codes before they are rounded."""
    return normed / jnp.where(scales == 0, 1.0, scales)[..., None]
