"""Attention in plain float32, the reference of the kernel."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.tile import NEVER


def attention_reference(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    lengths: Int[Array, " B"] | None = None,
    query_lengths: Int[Array, " B"] | None = None,
    query_starts: Int[Array, " B"] | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    bias: Float[Array, "_ N T S"] | None = None,
    key_bias: Float[Array, "B S"] | None = None,
    relative_rows: Float[Array, "R N H"] | None = None,
    relative_shift: Float[Array, "N H"] | None = None,
    softcap: float | None = None,
) -> Float[Array, "B T N H"]:
    """softmax(cap(scale (q k^T + (q + shift) row^T)) - slope |i - j| + bias) v of keys that count.

    Zero where none does. The row of query t and key s is rows[T - 1 - t + s]; cap(x) is softcap
    tanh(x / softcap), or x.

    Args:
      q: Queries; query t stands at position query_starts + t.
      k: Keys; key s stands at position s.
      v: Values.
      scale: Factor of the scores.
      causal: Whether a query sees only keys up to its own position.
      window: Number of last keys a query sees, its own position included.
      lengths: Number of valid keys of each sequence.
      query_lengths: Number of valid queries of each sequence; the rows beyond are zero.
      query_starts: Position of query 0 of each sequence; 0 if None.
      alibi_slopes: Slope of each query head.
      bias: Added to the scaled scores.
      key_bias: Added to the scaled scores of each key; one with NEVER or less does not count.
      relative_rows: A row for each difference of positions.
      relative_shift: Added to queries for that.
      softcap: Bound of the scaled scores.

    Returns:
      The weighted values in float32.
    """
    batch_size, num_queries, num_heads, _ = q.shape
    num_keys, num_kv_heads = k.shape[1:3]
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, num_heads // num_kv_heads, axis=2) for x in (k, v))
    scores = scale * jnp.einsum("btnh,bsnh->bnts", q, k, precision=lax.Precision.HIGHEST)
    if relative_rows is not None:
        if relative_shift is not None:
            q += relative_shift.astype(jnp.float32)[None, None]
        of_pair = num_queries - 1 - jnp.arange(num_queries)[:, None] + jnp.arange(num_keys)[None]
        rows = relative_rows.astype(jnp.float32)[of_pair]
        scores += scale * jnp.einsum("btnh,tsnh->bnts", q, rows, precision=lax.Precision.HIGHEST)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)

    starts = jnp.zeros(batch_size, jnp.int32) if query_starts is None else query_starts
    lengths = jnp.full(batch_size, num_keys) if lengths is None else lengths
    i = (starts[:, None] + jnp.arange(num_queries)[None, :])[:, None, :, None]
    j = jnp.arange(num_keys)[None, None, None, :]
    counts = jnp.broadcast_to(
        j < lengths[:, None, None, None], (batch_size, 1, num_queries, num_keys)
    )
    if query_lengths is not None:
        t = jnp.arange(num_queries)[None, None, :, None]
        counts &= t < query_lengths[:, None, None, None]
    if causal:
        counts &= j <= i
    if window is not None:
        counts &= j > i - window
    if alibi_slopes is not None:
        scores -= alibi_slopes.astype(jnp.float32)[None, :, None, None] * jnp.abs(i - j)
    if bias is not None:
        scores += bias.astype(jnp.float32)
    if key_bias is not None:
        scores += key_bias.astype(jnp.float32)[:, None, None]
        counts &= (key_bias > NEVER)[:, None, None]

    scores = jnp.where(counts, scores, -jnp.inf)
    highest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(highest), highest, 0.0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights /= jnp.where(total > 0, total, 1.0)
    return jnp.einsum("bnts,bsnh->btnh", weights, v, precision=lax.Precision.HIGHEST)


def attention_packed_reference(
    q: Float[Array, "X N H"],
    k: Float[Array, "X K H"],
    v: Float[Array, "X K H"],
    offsets: Int[Array, " C"],
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
) -> Float[Array, "X N H"]:
    """Attention of each token over the tokens of its own sequence, one head after the other.

    Args:
      q: Queries of all sequences.
      k: Keys.
      v: Values.
      offsets: First token of each sequence, then the end of the last; rows beyond are zero.
      scale: Factor of the scores.
      causal: Whether a query sees only keys up to its own position.
      window: Number of last keys a query sees, its own position included.
      alibi_slopes: Slope of each query head.

    Returns:
      The weighted values in float32.
    """
    num_tokens, num_heads, _ = q.shape
    i, j = jnp.arange(num_tokens)[:, None], jnp.arange(num_tokens)[None]
    begins = jnp.max(jnp.where(offsets[None] <= i, offsets[None], 0), axis=1, keepdims=True)
    ends = jnp.min(jnp.where(offsets[None] > i, offsets[None], num_tokens), axis=1, keepdims=True)
    counts = (begins <= j) & (j < ends) & (i < offsets[-1])
    if causal:
        counts &= j <= i
    if window is not None:
        counts &= j > i - window
    group = num_heads // k.shape[1]
    slopes = jnp.zeros(num_heads) if alibi_slopes is None else alibi_slopes.astype(jnp.float32)

    def one_head(head):
        query = q[:, head].astype(jnp.float32)
        key, value = (x[:, head // group].astype(jnp.float32) for x in (k, v))
        scores = scale * jnp.dot(query, key.T, precision=lax.Precision.HIGHEST)
        scores = jnp.where(counts, scores - slopes[head] * jnp.abs(i - j), -jnp.inf)
        highest = jnp.max(scores, axis=1, keepdims=True)
        weights = jnp.exp(scores - jnp.where(jnp.isfinite(highest), highest, 0.0))
        total = jnp.sum(weights, axis=1, keepdims=True)
        weights /= jnp.where(total > 0, total, 1.0)
        return jnp.dot(weights, value, precision=lax.Precision.HIGHEST)

    return jnp.swapaxes(lax.map(one_head, jnp.arange(num_heads)), 0, 1)
