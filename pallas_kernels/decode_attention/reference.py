"""Decode attention in plain float32, the reference of the kernel."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def decode_attention_reference(
    q: Float[Array, "B T N H"],
    k: Float[Array, "_ _ K H"],
    v: Float[Array, "_ _ K H"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    softcap: float | None = None,
    page_table: Int[Array, "B M"] | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N H"]:
    """softmax(cap(scale q k^T) - slope |i - j|) v over the keys up to each query's own, or zero.

    Args:
      q: The last T queries of each sequence; query t stands at position lengths - T + t.
      k: Keys (B, S, K, H), or a pool of pages (pages, page size, K, H).
      v: Values, likewise.
      lengths: Number of valid keys of each sequence, those of the T queries included.
      scale: Factor of the scores.
      softcap: cap(x) is softcap tanh(x / softcap), or x if None.
      page_table: Pages of each sequence, in order; None if the cache is contiguous.
      alibi_slopes: Slope of each query head.

    Returns:
      The weighted values in float32.
    """
    batch_size, num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    if page_table is not None:
        k, v = (x[page_table].reshape(batch_size, -1, num_kv_heads, head_dim) for x in (k, v))
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, num_heads // num_kv_heads, axis=2) for x in (k, v))
    scores = scale * jnp.einsum("btnh,bsnh->bnts", q, k, precision=lax.Precision.HIGHEST)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)

    i = (lengths[:, None] - num_tokens + jnp.arange(num_tokens)[None, :])[:, None, :, None]
    j = jnp.arange(k.shape[1])[None, None, None, :]
    if alibi_slopes is not None:
        scores -= alibi_slopes.astype(jnp.float32)[None, :, None, None] * jnp.abs(i - j)
    scores = jnp.where(j <= i, scores, -jnp.inf)
    highest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(highest), highest, 0.0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights /= jnp.where(total > 0, total, 1.0)
    return jnp.einsum("bnts,bsnh->btnh", weights, v, precision=lax.Precision.HIGHEST)
