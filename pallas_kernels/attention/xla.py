"""Attention by XLA: the fallback on any device, with the scores in memory."""

import functools
import operator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.attention.tile import NEVER


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
    key_bias: Float[Array, "B S"] | None = None,
    relative_rows: Float[Array, "R N H"] | None = None,
    relative_shift: Float[Array, "N H"] | None = None,
    softcap: float | None = None,
) -> Float[Array, "B T N H"]:
    """Attends with every term materialised; see api.attention."""
    row = position = jnp.arange(q.shape[1])[None, :, None]
    if query_starts is not None:
        position = position + query_starts[:, None, None]
    key = jnp.arange(k.shape[1])[None, None, :]
    parts = _reached(position, key, causal, window)
    if lengths is not None:
        parts.append(key < lengths[:, None, None])
    if query_lengths is not None:
        parts.append(row < query_lengths[:, None, None])
    if key_bias is not None:
        parts.append((key_bias > NEVER)[:, None])
    mask = functools.reduce(operator.and_, parts) if parts else None
    biases = [] if bias is None else [bias.astype(jnp.float32)]
    if key_bias is not None:
        biases.append(jnp.maximum(key_bias.astype(jnp.float32), NEVER)[:, None, None])
    if alibi_slopes is not None:
        biases.append(_alibi(alibi_slopes, position, key))
    relative = None
    if relative_rows is not None:
        relative = scale * relative_scores(q, relative_rows, relative_shift, k.shape[1])
    seen = None if mask is None else mask[:, None]
    if softcap is None:
        biases += [] if relative is None else [relative]
        out = _attend(q, k, v, _sum(biases), seen, scale)
    else:
        out = _attend_capped(q, k, v, relative, _sum(biases), seen, scale, softcap)
    return out if mask is None else _zero_where_unseen(out, mask)


def _reached(
    position: Int[Array, "_ T 1"], key: Int[Array, "1 1 S"], causal: bool, window: int | None
) -> list[Bool[Array, "_ T S"]]:
    """Returns the masks by position: a query sees no key after it and none before its window."""
    parts = []
    if causal:
        parts.append(key <= position)
    if window is not None:
        parts.append(key > position - window)
    return parts


def _alibi(
    slopes: Float[Array, " N"], position: Int[Array, "_ T 1"], key: Int[Array, "1 1 S"]
) -> Float[Array, "_ N T S"]:
    """Returns ALiBi's addend of the scores."""
    distance = jnp.abs(position - key).astype(jnp.float32)[:, None]
    return -slopes.astype(jnp.float32)[None, :, None, None] * distance


def _zero_where_unseen(
    out: Float[Array, "B T N H"], mask: Bool[Array, "_ _ S"]
) -> Float[Array, "B T N H"]:
    """The output, zero for queries that meet no key."""
    return jnp.where(mask.any(-1)[:, :, None, None], out, jnp.zeros((), out.dtype))


def _sum(terms: list[Array]) -> Array | None:
    return functools.reduce(operator.add, terms) if terms else None


def relative_scores(
    q: Float[Array, "B T N H"],
    rows: Float[Array, "R N H"],
    shift: Float[Array, "N H"] | None,
    num_keys: int,
) -> Float[Array, "B N T S"]:
    """Returns (q + shift) . rows[T - 1 - t + s] in f32.

    Scores of all rows, one more than a query meets, are cut anew into rows one shorter, so that
    each starts one further to the left than the one above. Source: Dai et al. 2019, appendix B.
    """
    batch_size, num_queries, heads, _ = q.shape
    if shift is not None:
        q = (q.astype(jnp.float32) + shift.astype(jnp.float32)[None, None]).astype(q.dtype)
    rows = jnp.pad(rows[: num_queries + num_keys - 1].astype(q.dtype), ((0, 1), (0, 0), (0, 0)))
    scores = jnp.einsum("BTNH,RNH->BNTR", q, rows, preferred_element_type=jnp.float32)
    flat = scores.reshape(batch_size, heads, -1)[..., num_queries - 1 : -1]
    return flat.reshape(batch_size, heads, num_queries, -1)[..., :num_keys]


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
    together = (sequence[:, None] == sequence[None]) & (sequence < len(offsets) - 1)[:, None]
    position, key = token[None, :, None], token[None, None, :]
    parts = [together[None], *_reached(position, key, causal, window)]
    mask = functools.reduce(operator.and_, parts)
    bias = None if alibi_slopes is None else _alibi(alibi_slopes, position, key)
    out = _attend(q[None], k[None], v[None], bias, mask[:, None], scale)
    return _zero_where_unseen(out, mask)[0]


def _attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    bias: Float[Array, "_ _ _ S"] | None,
    mask: Bool[Array, "_ 1 _ S"] | None,
    scale: float,
) -> Float[Array, "B T N H"]:
    """Runs jax.nn.dot_product_attention."""
    dtype = q.dtype
    q, k, v = _summable(q, k, v)
    return jax.nn.dot_product_attention(
        q, k, v, bias=bias, mask=mask, scale=scale, implementation="xla"
    ).astype(dtype)


def _attend_capped(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    relative: Float[Array, "B N T S"] | None,
    bias: Float[Array, "_ _ _ S"] | None,
    mask: Bool[Array, "_ 1 _ S"] | None,
    scale: float,
    softcap: float,
) -> Float[Array, "B T N H"]:
    """Attends with capped scores, which jax.nn does not have; relative scores are capped too."""
    dtype, (batch_size, num_queries, _, head_dim) = q.dtype, q.shape
    q, k, v = _summable(q, k, v)
    grouped = q.reshape(batch_size, num_queries, k.shape[2], -1, head_dim)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, k, preferred_element_type=jnp.float32)
    by_group, by_head = scores.shape, (batch_size, -1, num_queries, k.shape[1])
    scores = scale * scores.reshape(by_head)
    scores = softcap * jnp.tanh((scores if relative is None else scores + relative) / softcap)
    scores = scores if bias is None else scores + bias
    if mask is not None:
        scores = jnp.where(mask, scores, NEVER)
    weights = jax.nn.softmax(scores).astype(v.dtype).reshape(by_group)
    return jnp.einsum("BKGTS,BSKH->BTKGH", weights, v).reshape(q.shape).astype(dtype)


def _summable(*arrays: Array) -> list[Array]:
    """In f32 for f16 on a CPU, for which XLA compiles no products of f16 summed in f32."""
    narrow = arrays[0].dtype == jnp.float16 and dispatch.targets_cpu()
    return [x.astype(jnp.float32) if narrow else x for x in arrays]
