"""Attention over whole sequences by the choice of a model's `Kernels`, and the packing they need.

Plain JAX adds a bias to the scores for each reason why a key does not count. Kernels take a length
for each sequence instead, so padding must be behind the tokens: `Packing` moves it there and moves
the hidden states back. Not here: attention over a cache (`models.kv_cache`).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer

from models.kernels import Attention, Kernels
from models.layers import Ids, Mask, attend, causal_bias
from models.segments import attend_packed
from pallas_kernels import attention as kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The keys that a query sees, and the weight of their positions.

    Attributes:
      by: The implementation of attention. "xla" uses `bias` and `alibi`, kernels use the others.
      bias: Added to the scores; None = nothing.
      alibi: Also added, for each head.
      causal: Whether a query sees only keys up to its own position.
      lengths: The number of valid keys of each sequence; None = all.
      slopes: The decrease of each head's scores per position of distance.
      offsets: The start of each of several sequences in a row; see `models.segments`.
    """

    by: Attention
    bias: Float[Array, "#B 1 #T S"] | None = None
    alibi: Float[Array, "#B N 1 S"] | None = None
    causal: bool = False
    lengths: Int[Array, " B"] | None = None
    slopes: Float[np.ndarray, " N"] | None = None
    offsets: Int[Array, " C"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The places of each row's tokens after packing: in order, with padding behind them.

    Attributes:
      order: The index of the token at each place.
      places: The place of each token.
      lengths: The number of tokens of each row.
    """

    order: Int[Array, "B T"]
    places: Int[Array, "B T"]
    lengths: Int[Array, " B"]

    @classmethod
    def of(cls, attention_mask: Mask) -> "Packing":
        """Returns the packing for a mask that is 1 for tokens and 0 for padding."""
        with jax.named_scope("packing"):
            real = jnp.asarray(attention_mask) != 0
            counts = jnp.cumsum(real.astype(jnp.int32), axis=1)
            lengths = counts[:, -1]
            index = jnp.broadcast_to(jnp.arange(real.shape[1], dtype=jnp.int32), real.shape)
            behind = jnp.broadcast_to(lengths[:, None], real.shape) + index - counts
            places = jnp.where(real, counts - 1, behind)
            order = jax.vmap(lambda to, what: jnp.zeros_like(what).at[to].set(what))(places, index)
            return cls(order=order, places=places, lengths=lengths)

    def pack(self, x: Integer[Array | np.ndarray, "B T"]) -> Integer[Array, "B T"]:
        """Moves the value of each token to the token's place."""
        with jax.named_scope("packing"):
            return jnp.take_along_axis(jnp.asarray(x), self.order, axis=1)

    def pack_tokens(
        self, input_ids: Ids, position_ids: Ids | None
    ) -> tuple[Integer[Array, "B T"], Integer[Array, "B T"]]:
        """Packs tokens and their positions; None stands for positions 0, 1, 2 and so on."""
        return self.pack(input_ids), (
            self.order if position_ids is None else self.pack(position_ids)
        )

    def unpack(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Moves the hidden states back to the original places of the tokens."""
        with jax.named_scope("packing"):
            places = jnp.broadcast_to(self.places[:, :, None], x.shape)
            return jnp.take_along_axis(x, places, axis=1)


def packing_of(by: Attention, attention_mask: Mask | None) -> Packing | None:
    """Returns the packing of a mask for kernels; None without a mask, or for plain JAX."""
    return None if by == "xla" or attention_mask is None else Packing.of(attention_mask)


def causal_keys(
    kernels: Kernels, length: int, attention_mask: Mask | None, packing: Packing | None
) -> Keys:
    """Returns the keys of a decoder without ALiBi: keys up to a query's own position."""
    by = kernels.causal_attention
    if by == "xla":
        return Keys(by=by, bias=causal_bias(length, attention_mask))
    return Keys(by=by, causal=True, lengths=None if packing is None else packing.lengths)


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    keys: Keys,
    bias: Float[Array, "B N T S"] | None = None,
) -> Float[Array, "B T N H"]:
    """Attends; query head i reads key head i // (N / K).

    Args:
      query: Queries.
      key: Keys.
      value: Values.
      keys: The keys that each query sees, and the implementation.
      bias: Added to the scaled scores by kernels; plain JAX ignores it.

    Returns:
      For each query the weighted mean of the values.
    """
    if keys.by == "pallas" and keys.offsets is not None:
        return attend_packed(query, key, value, keys.offsets, keys.bias)
    if keys.by == "pallas":
        slopes = None if keys.slopes is None else jnp.asarray(keys.slopes)
        return kernel.attention(
            query,
            key,
            value,
            causal=keys.causal,
            lengths=keys.lengths,
            alibi_slopes=slopes,
            bias=bias,
        )
    if keys.by == "cudnn":
        return _cudnn(query, key, value, keys, bias)
    return attend(query, key, value, keys.bias, keys.alibi)


def _cudnn(query, key, value, keys: Keys, bias):
    if keys.slopes is not None:
        # cuDNN has no slopes. Distances from the query keep near keys exact in 16 bits.
        rows, columns = (jnp.arange(n, dtype=jnp.float32) for n in (query.shape[1], key.shape[1]))
        distance = jnp.abs(rows[:, None] - columns[None])[None, None]
        slopes = jnp.asarray(keys.slopes)[None, :, None, None]
        bias = (-slopes * distance).astype(query.dtype)
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        bias,
        is_causal=keys.causal,
        key_value_seq_lengths=keys.lengths,
        implementation="cudnn",
    )
