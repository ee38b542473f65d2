"""The keys and values that a decoder keeps of the tokens it has seen.

One contiguous array of keys and one of values a layer; nothing outside this file knows that, so
that pages can take its place without a change to a model. Not here: who fills it when
(`models.decoder`), how long it is (`pbjax.inference.generation`).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from models.outputs import register_output
from pallas_kernels.decode_attention import decode_attention


@register_output
@dataclass(frozen=True, slots=True, kw_only=True)
class KVCache:
    """Keys and values of every layer; the batch is the first axis of every array in it.

    Attributes:
      keys: The keys of each layer; token s of sequence b is at [b, s].
      values: The values of each layer, in the same places.
      lengths: The number of tokens of each sequence, from the left; entries beyond do not count.
    """

    keys: tuple[Float[Array, "B S K H"], ...]
    values: tuple[Float[Array, "B S K H"], ...]
    lengths: Int[Array, " B"]

    @property
    def num_keys(self) -> int:
        """The number of tokens of a sequence that fit into the cache."""
        return self.keys[0].shape[1]

    def positions(self, num_tokens: int) -> Int[Array, "B T"]:
        """Returns the positions of the next tokens of each sequence."""
        steps = jnp.arange(num_tokens, dtype=jnp.int32)[None, :]
        return self.lengths[:, None] + steps


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """Keys and values of one layer."""

    keys: Float[Array, "B S K H"]
    values: Float[Array, "B S K H"]

    def start(self, key: Float[Array, "B T K H"], value: Float[Array, "B T K H"]) -> "LayerCache":
        """Returns the cache with the first tokens of every sequence."""
        first = (0, 0, 0, 0)
        with jax.named_scope("cache"):
            return LayerCache(
                keys=jax.lax.dynamic_update_slice(self.keys, key, first),
                values=jax.lax.dynamic_update_slice(self.values, value, first),
            )

    def append(
        self,
        key: Float[Array, "B T K H"],
        value: Float[Array, "B T K H"],
        positions: Int[Array, "B T"],
    ) -> "LayerCache":
        """Returns the cache with further tokens; those beyond its end are dropped."""
        with jax.named_scope("cache"):
            return LayerCache(
                keys=_put(self.keys, key, positions), values=_put(self.values, value, positions)
            )

    def attend(
        self,
        query: Float[Array, "B T N H"],
        lengths: Int[Array, " B"],
        alibi_slopes: Float[Array, " N"] | None = None,
    ) -> Float[Array, "B T N H"]:
        """Attends from the last T tokens of each sequence to all its tokens up to their own.

        Args:
          query: Queries of the last T tokens.
          lengths: The number of tokens of each sequence, the last T included.
          alibi_slopes: The growth of each head's scores per position.

        Returns:
          For each query the weighted mean of the values up to its own.
        """
        # This calls the kernel if it can run, else plain JAX.
        return decode_attention(query, self.keys, self.values, lengths, alibi_slopes=alibi_slopes)


def empty_cache(num_layers: int, shape: tuple[int, int, int, int], dtype: DTypeLike) -> KVCache:
    """Returns an empty cache.

    Args:
      num_layers: The number of layers of the decoder.
      shape: Batch size, tokens of a sequence, key-value heads, head size.
      dtype: The dtype of keys and values.
    """
    # Zeros: kernels read tiles beyond a length, which must be finite.
    arrays = [jnp.zeros(shape, dtype) for _ in range(2 * num_layers)]
    return KVCache(
        keys=tuple(arrays[:num_layers]),
        values=tuple(arrays[num_layers:]),
        lengths=jnp.zeros(shape[0], jnp.int32),
    )


def _put(
    held: Float[Array, "B S K H"], new: Float[Array, "B T K H"], positions: Int[Array, "B T"]
) -> Float[Array, "B S K H"]:
    def put(row, tokens, places):
        return row.at[places].set(tokens, mode="drop", unique_indices=True)

    return jax.vmap(put)(held, new, positions)
