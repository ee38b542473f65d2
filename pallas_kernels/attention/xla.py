"""Attention by XLA: the fallback on any device, with the scores in memory."""

import functools
import operator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def attention_xla(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    scale: float,
    causal: bool,
    window: int | None,
    lengths: Int[Array, " B"] | None,
    query_lengths: Int[Array, " B"] | None,
    query_starts: Int[Array, " B"] | None,
    alibi_slopes: Float[Array, " N"] | None,
    bias: Float[Array, "_ N T S"] | None,
) -> Float[Array, "B T N H"]:
    """Runs jax.nn.dot_product_attention with every term materialised; see api.attention."""
    row = position = jnp.arange(q.shape[1])[None, :, None]
    if query_starts is not None:
        position = position + query_starts[:, None, None]
    key = jnp.arange(k.shape[1])[None, None, :]
    parts = []
    if causal:
        parts.append(key <= position)
    if window is not None:
        parts.append(key > position - window)
    if lengths is not None:
        parts.append(key < lengths[:, None, None])
    if query_lengths is not None:
        parts.append(row < query_lengths[:, None, None])
    mask = functools.reduce(operator.and_, parts) if parts else None
    if alibi_slopes is not None:
        distance = jnp.abs(position - key).astype(jnp.float32)[:, None]
        alibi = -alibi_slopes.astype(jnp.float32)[None, :, None, None] * distance
        bias = alibi if bias is None else bias.astype(jnp.float32) + alibi
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        bias=bias,
        mask=None if mask is None else mask[:, None],
        scale=scale,
        implementation="xla",
    )
    if mask is None:
        return out
    return jnp.where(mask.any(-1)[:, :, None, None], out, jnp.zeros((), out.dtype))


def attention_packed_xla(
    q: Float[Array, "X N H"],
    k: Float[Array, "X K H"],
    v: Float[Array, "X K H"],
    offsets: Int[Array, " C"],
    *,
    scale: float,
    causal: bool,
    window: int | None,
    alibi_slopes: Float[Array, " N"] | None,
) -> Float[Array, "X N H"]:
    """Attends over all tokens and masks those of other sequences; see api.attention_packed."""
    token = jnp.arange(q.shape[0])
    sequence = jnp.sum(token[:, None] >= offsets[None, 1:], axis=1)
    mask = (sequence[:, None] == sequence[None]) & (sequence < len(offsets) - 1)[:, None]
    if causal:
        mask &= token[None] <= token[:, None]
    if window is not None:
        mask &= token[None] > token[:, None] - window
    bias = None
    if alibi_slopes is not None:
        distance = jnp.abs(token[:, None] - token[None]).astype(jnp.float32)
        bias = -alibi_slopes.astype(jnp.float32)[None, :, None, None] * distance[None, None]
    out = jax.nn.dot_product_attention(
        q[None],
        k[None],
        v[None],
        bias=bias,
        mask=mask[None, None],
        scale=scale,
        implementation="xla",
    )[0]
    return jnp.where(mask.any(1)[:, None, None], out, jnp.zeros((), out.dtype))
