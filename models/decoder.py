"""Prefill and decode over a KV cache, the same for every decoder.

Both are pure functions of the weights, the tokens and the cache: `pbjax.generate` loops over them,
`pbjax.optimize` can take `model.decode` as it takes the model. Not here: the choice of the next
token, stop conditions, padding on the left, which `pbjax.inference.generation` removes.
"""

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from models.attention import Keys, Packing, attention, causal_keys
from models.errors import InputError
from models.folding import values_of
from models.kernels import Kernels
from models.kv_cache import KVCache, LayerCache, empty_cache
from models.layers import Ids, Mask, check_tokens
from models.outputs import register_output

# Query, key and value; the query may have more heads.
type Heads = tuple[Float[Array, "B T _ H"], Float[Array, "B T _ H"], Float[Array, "B T _ H"]]


@runtime_checkable
class DecoderConfig(Protocol):
    """The sizes that all decoders have."""

    @property
    def num_layers(self) -> int: ...  # noqa: D102

    @property
    def embed_dim(self) -> int: ...  # noqa: D102

    @property
    def num_heads(self) -> int: ...  # noqa: D102

    @property
    def vocab_size(self) -> int: ...  # noqa: D102

    @property
    def lm_head(self) -> bool: ...  # noqa: D102


@register_output
@dataclass(frozen=True, slots=True, kw_only=True)
class CachedOutput:
    """The output of a decoder together with its cache.

    Attributes:
      logits: Scores of the token that follows each token; prefill returns the last one's alone.
      cache: The cache with the new tokens.
    """

    logits: Float[Array, "B T V"]
    cache: KVCache


class CausalDecoder[C: DecoderConfig](nnx.Module):
    """The base of decoders for prefill and decode: layers of attention and MLP, a norm, a head.

    A layer has `attention.heads(x, *terms)`, which returns query, key and value,
    `attention.join(x, context)`, and `mlp(x)`.
    """

    config: C
    layers: nnx.List
    norm: nnx.Module
    kernels: Kernels

    @property
    def max_seq_len(self) -> int | None:
        """The longest sequence; None without a limit."""
        return getattr(self.config, "max_seq_len", None)

    @property
    def vocab_size(self) -> int:
        """Number of tokens; ids are below it."""
        return self.config.vocab_size

    @property
    def alibi_slopes(self) -> Float[np.ndarray, " N"] | None:
        """The growth of each head's scores per position; None without ALiBi."""
        return None

    def prompt_keys(
        self, length: int, attention_mask: Mask | None, packing: Packing | None
    ) -> Keys:
        """Returns the keys that the tokens of whole sequences see.

        Args:
          length: The number of tokens.
          attention_mask: 1 for tokens, 0 for padding; None = all 1.
          packing: The places of the tokens for kernels; None without a mask or kernels.
        """
        return causal_keys(self.kernels, length, attention_mask, packing)

    def embed_tokens(
        self, input_ids: Int[Array, "B T"], position_ids: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        """Returns the hidden states before the first block."""
        raise NotImplementedError

    def position_terms(self, position_ids: Int[Array, "B T"]) -> tuple[object, ...]:
        """Returns the arguments of `attention.heads` after the hidden states."""
        return ()

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"] | None:
        """Returns the head's scores for normalised hidden states; None without a head."""
        raise NotImplementedError

    def last_norm(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Normalises the hidden states after the last block."""
        with jax.named_scope("norm"):
            return self.norm(x)

    def empty_cache(self, batch_size: int, num_keys: int) -> KVCache:
        """Returns an empty cache in the dtype of the weights.

        Args:
          batch_size: The number of sequences.
          num_keys: The number of tokens of a sequence that fit into the cache.

        Raises:
          InputError: A size is below 1.
        """
        if batch_size < 1 or num_keys < 1:
            raise InputError(
                f"empty_cache({batch_size}, {num_keys}): room for {batch_size} sequences of"
                f" {num_keys} tokens; both must be 1 or more; correct them"
            )
        config = self.config
        kv_heads = getattr(config, "num_kv_heads", config.num_heads)
        head_dim = getattr(config, "head_dim", config.embed_dim // config.num_heads)
        shape = (batch_size, num_keys, kv_heads, head_dim)
        dtype = jax.tree.leaves(nnx.state(self.norm))[0].dtype
        return empty_cache(config.num_layers, shape, dtype)

    def prefill(
        self, input_ids: Ids, lengths: Int[Array | np.ndarray, " B"], cache: KVCache
    ) -> CachedOutput:
        """Runs the prompts and fills the cache with them, replacing its contents.

        Args:
          input_ids: Tokens, padded on the right.
          lengths: The number of tokens of each row, 1 or more.
          cache: A cache with room for all columns.

        Returns:
          The scores after the last token of each row, T = 1, and the cache.

        Raises:
          InputError: The shapes do not fit together, or the model has no head.
        """
        self._check(tuple(input_ids.shape), cache, "prefill")
        ids, lengths = jnp.asarray(input_ids), jnp.asarray(lengths, jnp.int32)
        length = ids.shape[1]
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), ids.shape)
        # Causal attention does not see padding, which is behind every token; the lengths spare
        # kernels the work on it.
        keys = replace(self.prompt_keys(length, None, None), lengths=lengths)

        def attend_prompt(query, key, value, held):
            return attention(query, key, value, keys), held.start(key, value)

        x, layers = self._blocks(ids, positions, cache, attend_prompt)
        last = jnp.broadcast_to(lengths[:, None, None] - 1, (x.shape[0], 1, x.shape[2]))
        # A copy: a step that donates the cache must not consume the caller's lengths.
        return self._output(jnp.take_along_axis(x, last, axis=1), layers, jnp.copy(lengths))

    def decode(self, tokens: Ids, cache: KVCache) -> CachedOutput:
        """Runs the next tokens of every sequence, usually one, and adds them to the cache.

        Args:
          tokens: The new tokens; every one of a row counts.
          cache: The cache of the earlier tokens. A token beyond its room gives NaN, never
            another token's values.

        Returns:
          The scores after each token, and the cache, `tokens.shape[1]` longer.

        Raises:
          InputError: The shapes do not fit together, or the model has no head.
        """
        self._check(tuple(tokens.shape), cache, "decode")
        ids = jnp.asarray(tokens)
        positions = cache.positions(ids.shape[1])
        lengths = cache.lengths + ids.shape[1]
        slopes = None if self.alibi_slopes is None else jnp.asarray(self.alibi_slopes)

        def attend_all(query, key, value, held):
            held = held.append(key, value, positions)
            return held.attend(query, lengths, slopes), held

        x, layers = self._blocks(ids, positions, cache, attend_all)
        inside = jnp.broadcast_to((positions < cache.num_keys)[:, :, None], x.shape)
        return self._output(jnp.where(inside, x, jnp.nan), layers, lengths)

    def _blocks(self, ids, positions, cache, attend):
        """Applies all blocks, with attend(query, key, value, held) -> context, held."""
        x = self.embed_tokens(ids, positions)
        terms = self.position_terms(positions)
        layers = []
        for layer, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
            with jax.named_scope("attention"):
                query, key, value = layer.attention.heads(x, *terms)
                held = LayerCache(keys=keys, values=values)
                context, held = attend(query, key, value, held)
                x = layer.attention.join(x, context)
            layers.append(held)
            x = layer.mlp(x)
        return values_of(x), layers

    def _output(self, x, layers, lengths) -> CachedOutput:
        cache = KVCache(
            keys=tuple(layer.keys for layer in layers),
            values=tuple(layer.values for layer in layers),
            lengths=lengths,
        )
        scores = self.logits(self.last_norm(x))
        if scores is None:
            raise AssertionError("a model without a head was let through")
        return CachedOutput(logits=scores, cache=cache)

    def _check(self, shape: tuple[int, ...], cache: KVCache, method: str) -> None:
        name = type(self).__name__
        check_tokens(name, shape, {}, self.max_seq_len)
        if not self.config.lm_head:
            raise InputError(
                f"{name}.{method}(): the model has no language model head; one is needed to"
                " predict tokens; load a checkpoint of its causal language model class"
            )
        batch_size = cache.lengths.shape[0]
        if shape[0] != batch_size or shape[1] > cache.num_keys:
            raise InputError(
                f"{name}.{method}(): tokens are {shape}, the cache has {batch_size} sequences of"
                f" {cache.num_keys} tokens; the batch must be the same and the tokens must fit;"
                " make the cache by empty_cache(batch_size, num_keys)"
            )
