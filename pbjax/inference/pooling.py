"""Vectors of texts from the vectors of their tokens, for several texts in a row.

The names are those of sentence-transformers, and so are the values.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pbjax.errors import InputError

POOLING = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


def pool(
    hidden: Float[Array, "R L D"],
    segment_ids: Int[Array, "R L"],
    position_ids: Int[Array, "R L"],
    skip: Int[Array, ""],
    *,
    num_segments: int,
    modes: Sequence[str],
) -> Float[Array, "R S E"]:
    """Returns a vector for every segment of every row, in f32; zeros for one without tokens.

    Args:
      hidden: The vectors of the tokens.
      segment_ids: Number of a token's segment in its row, from 1 on; 0 where there is none.
      position_ids: Position of a token in its segment.
      skip: How many tokens at the start of each segment do not count: those of a prompt.
      num_segments: Segments of a row.
      modes: Names out of `POOLING`; their vectors are joined.

    Source: sentence-transformers 6.2, `Pooling._forward_padded`.
    """
    numbers = jnp.arange(1, num_segments + 1, dtype=segment_ids.dtype)
    shape = (segment_ids.shape[0], num_segments, segment_ids.shape[1])
    own = jnp.broadcast_to(segment_ids[:, None], shape) == jnp.broadcast_to(
        numbers[None, :, None], shape
    )
    counted = own & jnp.broadcast_to((position_ids >= skip)[:, None], shape)
    # Values outside the segments may be NaN, and 0 * NaN must not count.
    inside = jnp.broadcast_to((segment_ids > 0)[:, :, None], hidden.shape)
    tokens = jnp.where(inside, hidden.astype(jnp.float32), 0.0)
    following = jnp.pad(segment_ids[:, 1:], ((0, 0), (0, 1)))
    ones = jnp.ones(segment_ids.shape, jnp.float32)
    weights = {
        "cls": (position_ids == skip).astype(jnp.float32),
        "lasttoken": (segment_ids != following).astype(jnp.float32),
        "mean": ones,
        "mean_sqrt_len_tokens": ones,
        "weightedmean": position_ids.astype(jnp.float32) + 1,
    }
    vectors = [
        _largest(tokens, counted) if mode == "max" else _mean(tokens, counted, weights[mode], mode)
        for mode in modes
    ]
    return jnp.concatenate(vectors, axis=-1)


def _mean(
    tokens: Float[Array, "R L D"],
    counted: Bool[Array, "R S L"],
    weights: Float[Array, "R L"],
    mode: str,
) -> Float[Array, "R S D"]:
    weighted = counted * jnp.broadcast_to(weights[:, None], counted.shape)
    sums = jnp.einsum("RSL,RLD->RSD", weighted, tokens, precision="highest")
    totals = jnp.maximum(weighted.sum(axis=2, keepdims=True), 1.0)
    totals = jnp.sqrt(totals) if mode == "mean_sqrt_len_tokens" else totals
    return sums / jnp.broadcast_to(totals, sums.shape)


def _largest(tokens: Float[Array, "R L D"], counted: Bool[Array, "R S L"]) -> Float[Array, "R S D"]:
    rows, segments, length = counted.shape
    # A scatter: the products of all segments and tokens would not fit. Others go to a place beyond.
    place = jnp.where(counted.any(axis=1), counted.argmax(axis=1), segments)
    start = jnp.arange(rows, dtype=place.dtype) * (segments + 1)
    place += jnp.broadcast_to(start[:, None], place.shape)
    flat = tokens.reshape(rows * length, -1)
    found = jax.ops.segment_max(flat, place.reshape(-1), rows * (segments + 1))
    found = found.reshape(rows, segments + 1, -1)[:, :segments]
    some = jnp.broadcast_to(counted.any(axis=2)[:, :, None], found.shape)
    return jnp.where(some, found, 0.0)


def pooling_modes(asked: str, pooling: str | Sequence[str]) -> tuple[str, ...]:
    """Returns names of modes, checked.

    Args:
      asked: The call, for the message.
      pooling: A name, or several.

    Raises:
      InputError: There is none, or one that is not known.
    """
    modes = (pooling,) if isinstance(pooling, str) else tuple(pooling)
    if not modes or any(mode not in POOLING for mode in modes):
        raise InputError(
            f"{asked}(pooling={pooling!r}): unknown; {', '.join(POOLING)} and several of them are"
            " allowed; choose among them"
        )
    return modes
