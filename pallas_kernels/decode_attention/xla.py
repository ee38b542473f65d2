"""Decode attention by XLA, the fallback on any device: pages gathered, scores in memory."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.xla import attention_xla


def decode_attention_xla(
    q: Float[Array, "B T N H"],
    k: Float[Array, "_ _ K H"],
    v: Float[Array, "_ _ K H"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    softcap: float | None = None,
    page_table: Int[Array, "B M"] | None,
    alibi_slopes: Float[Array, " N"] | None,
    first_sequence: int = 0,
) -> Float[Array, "B T N H"]:
    """Runs causal attention whose first query stands at lengths - T; see api.decode_attention."""
    batch_size, num_tokens = q.shape[:2]
    if page_table is not None:
        k, v = (x[page_table].reshape(batch_size, -1, *x.shape[2:]) for x in (k, v))
    else:
        k, v = (x[first_sequence : first_sequence + batch_size] for x in (k, v))
    # Signed before the tokens are taken off, which unsigned lengths could not go below.
    lengths = jnp.clip(lengths.astype(jnp.int32), 0, k.shape[1])
    return attention_xla(
        q,
        k,
        v,
        scale=scale,
        causal=True,
        window=None,
        lengths=lengths,
        query_lengths=None,
        query_starts=lengths - num_tokens,
        alibi_slopes=alibi_slopes,
        bias=None,
        softcap=softcap,
    )
