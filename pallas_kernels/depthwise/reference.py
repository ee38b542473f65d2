"""Depthwise convolution in plain float32, the reference of the kernel."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.gemm.activations import Activation
from pallas_kernels.gemm.reference import activate


def depthwise_convolution_reference(
    x: Float[Array, "B T D"],
    kernel: Float[Array, "width D"],
    offset: Float[Array, " D"] | None = None,
    *,
    activation: Activation | None = None,
) -> Float[Array, "B T D"]:
    """activation(sum over k of kernel[k] x[t + k - (width - 1) // 2] + offset) in float32."""
    x, kernel = x.astype(jnp.float32), kernel.astype(jnp.float32)
    width, length = kernel.shape[0], x.shape[1]
    before = (width - 1) // 2
    padded = jnp.pad(x, ((0, 0), (before, width - 1 - before), (0, 0)))
    total = jnp.zeros_like(x)
    for k in range(width):
        total += padded[:, k : k + length] * kernel[k][None, None]
    if offset is not None:
        total += offset.astype(jnp.float32)[None, None]
    return activate(total, activation)
