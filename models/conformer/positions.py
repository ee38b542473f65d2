"""The positions of Conformer attention: a table of differences, or a rotation.

Both tables are computed in f32 for the length at hand; nothing is stored.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

# The base of the frequencies of the table of differences.
RELATIVE_BASE = 10000.0


def relative_table(length: int, features: int, *, spare: int = 0) -> Float[Array, "R D"]:
    """Returns sin at even and cos at odd features for the differences length - 1 to 1 - length.

    Args:
      length: The length of the sequences.
      features: The number of features of a row; even.
      spare: The number of further rows, for the differences that follow.
    """
    exponents = jnp.arange(0, features, 2).astype(jnp.float32) / features
    differences = jnp.arange(length - 1, -length - spare, -1).astype(jnp.float32)
    angles = jnp.outer(differences, RELATIVE_BASE**-exponents)
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(-1, features)


def shift(scores: Float[Array, "B N T R"]) -> Float[Array, "B N T T"]:
    """Turns scores by difference into scores by key: out[i, j] = scores[i, T - 1 - i + j].

    A column in front makes the rows longer by one. Reshaped to rows of the old length, each row
    starts one column further to the left than the row above. Source: Dai et al. 2019, appendix B.
    """
    *lead, length, rows = scores.shape
    padded = jnp.pad(scores, ((0, 0), (0, 0), (0, 0), (1, 0)))
    cut = padded.reshape(*lead, rows + 1, length)[:, :, 1:]
    return cut.reshape(scores.shape)[..., :length]


def relative_bias(
    query: Float[Array, "B T N H"],
    rows: Float[Array, "R N H"],
    rest: Float[Array, "N H"],
    *,
    chunk: int = 128,
) -> Float[Array, "B N T T"]:
    """Returns (query + rest) . row of the difference, by key; equals `shift` of the scores by row.

    A chunk of queries meets T + chunk differences, not all 2 T, so that for long sequences the
    scores by difference are half as large.

    Args:
      query: Queries.
      rows: Rows for the differences T - 1 to 1 - T; further rows are not read.
      rest: Added to every query.
      chunk: The number of queries that share their rows; all queries if it does not divide T.
    """
    batch_size, length, heads, _ = query.shape
    chunk = chunk if length % chunk == 0 else length
    starts = range(length - chunk, -1, -chunk)
    # One row in front of each window, which is dropped later, replaces the column of `shift`.
    padded = jnp.pad(rows, ((1, 0), (0, 0), (0, 0)))
    windows = jnp.stack([padded[start : start + length + chunk] for start in starts])
    cut = query.reshape(batch_size, -1, chunk, *query.shape[2:])
    scores = jnp.einsum("BgcNH,grNH->gNBcr", cut, windows)
    shared = jnp.einsum("NH,grNH->gNr", rest, windows, preferred_element_type=jnp.float32)
    shared = jnp.broadcast_to(shared[:, :, None, None], scores.shape)
    scores = (scores.astype(jnp.float32) + shared).astype(query.dtype)
    flat = scores.reshape(*scores.shape[:3], -1)[..., chunk:]
    by_key = flat.reshape(*scores.shape[:3], chunk, -1)[..., :length]
    return by_key.transpose(2, 1, 0, 3, 4).reshape(batch_size, heads, length, length)


def rotary_table(length: int, head_dim: int, base: float) -> Float[Array, "2 T half"]:
    """Returns cos and sin of the rotation angle of each pair of features at each position."""
    exponents = jnp.arange(0, head_dim, 2).astype(jnp.float32) / head_dim
    angles = jnp.outer(jnp.arange(length).astype(jnp.float32), base**-exponents)
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)])


def rotate(
    x: Float[Array, "B T D"], table: Float[Array, "2 T half"], num_heads: int
) -> Float[Array, "B T D"]:
    """Rotates the pairs (i, i + H / 2) of the features of every head, in f32."""
    heads = x.reshape(*x.shape[:2], num_heads, -1).astype(jnp.float32)
    first, second = jnp.split(heads, 2, axis=-1)
    cos, sin = (jnp.broadcast_to(wave[:, None, :], first.shape) for wave in (table[0], table[1]))
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).reshape(x.shape).astype(x.dtype)
