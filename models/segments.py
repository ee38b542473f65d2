"""Attention in rows of several sequences, in which a token sees its own sequence."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer

from models.layers import attend
from pallas_kernels.attention import attention_packed
from pallas_kernels.dispatch import require_hopper


def segment_bias(segment_ids: Integer[Array | np.ndarray, "R L"]) -> Float[Array, "R 1 L L"]:
    """Returns 0 between tokens of one sequence and the lowest finite f32 between others."""
    with jax.named_scope("segment_bias"):
        ids = jnp.asarray(segment_ids)
        size = (*ids.shape, ids.shape[1])
        same = jnp.broadcast_to(ids[:, :, None], size) == jnp.broadcast_to(ids[:, None, :], size)
        bias = jnp.where(same, 0.0, jnp.finfo(jnp.float32).min).astype(jnp.float32)
        return bias[:, None]


def attend_packed(
    query: Float[Array, "R L N H"],
    key: Float[Array, "R L K H"],
    value: Float[Array, "R L K H"],
    offsets: Int[Array, " C"],
    bias: Float[Array, "R 1 L L"] | None,
) -> Float[Array, "R L N H"]:
    """Attends by the kernel that skips other sequences if it can run, else with the bias.

    Args:
      query: Queries.
      key: Keys.
      value: Values.
      offsets: The starts of the sequences among the tokens of all rows; see `attention_packed`.
      bias: The mask of the sequences for plain JAX. `attention_packed` in plain JAX is not used, as
        it holds the scores of all pairs of tokens of all rows in memory.
    """
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (query, key, value))
    try:
        require_hopper("attend_packed")
        context = attention_packed(q, k, v, offsets, implementation="mosaic_gpu")
    except NotImplementedError:
        return attend(query, key, value, bias)
    return context.reshape(query.shape)
