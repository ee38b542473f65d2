"""Column sums in plain jnp and float32, the reference of the co-run kernels."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def column_sums(data: Float[Array, "R C"]) -> Float[Array, " C"]:
    """The sum of each column, in float32."""
    return jnp.sum(data.astype(jnp.float32), axis=0)
