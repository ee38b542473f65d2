"""Attention in rows that hold several sequences one after another, each token seeing its own."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Integer

from models.attention import Keys
from models.kernels import Kernels


def segment_keys(kernels: Kernels, segment_ids: Integer[Array | np.ndarray, "R L"]) -> Keys:
    """Returns the keys of tokens that see those with their own segment id alone.

    Args:
      kernels: What the model's layers call.
      segment_ids: Which sequence of its row a token belongs to; sequences stand end to end.
    """
    del kernels  # The kernels know no segments yet: plain JAX with a bias, whatever they are.
    with jax.named_scope("segments"):
        ids = jnp.asarray(segment_ids)
        size = (*ids.shape, ids.shape[1])
        same = jnp.broadcast_to(ids[:, :, None], size) == jnp.broadcast_to(ids[:, None, :], size)
        bias = jnp.where(same, 0.0, jnp.finfo(jnp.float32).min).astype(jnp.float32)
        return Keys(by="xla", bias=bias[:, None])
