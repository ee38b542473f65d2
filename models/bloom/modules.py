"""BLOOM decoders: Le Scao et al. 2022, with the details of Hugging Face's modeling_bloom.py.

`models.decoder` adds prefill and decode over a cache. Not here: dropout, residuals after the norm.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from models.attention import Keys, Packing, packing_of
from models.bloom.config import BloomConfig
from models.decoder import CausalDecoder
from models.folding import Hidden
from models.fused_qkv import FusedQkvAttention
from models.kernels import PLAIN
from models.layers import (
    CausalOutput,
    Ids,
    Mask,
    causal_bias,
    check_tokens,
    embed,
    layer_norm,
    logits,
    look_up,
)
from models.pre_norm import PreNormMlp, run_layers


def alibi_slopes(num_heads: int) -> Float[np.ndarray, " N"]:
    """Returns the growth of each head's scores per position.

    With p the largest power of two up to the number of heads: 2 ** (-8i / p) for i = 1 to p; the
    heads beyond take every other slope of twice as many heads.

    Source: Press et al. 2022, section 3, and the released code for other numbers of heads.
    """
    power = 2 ** (num_heads.bit_length() - 1)
    exponents = [8 * i / power for i in range(1, power + 1)]
    exponents += [4 * i / power for i in range(1, 2 * (num_heads - power), 2)]
    return np.exp2(-np.array(exponents)).astype(np.float32)


def alibi_bias(
    num_heads: int, length: int, attention_mask: Mask | None
) -> Float[Array, "#B N 1 S"]:
    """Returns the addend of the scores: slope times key position, counted from the first token."""
    with jax.named_scope("alibi_bias"):
        if attention_mask is None:
            positions = jnp.arange(length, dtype=jnp.float32)[None]
        else:
            real = (jnp.asarray(attention_mask) != 0).astype(jnp.float32)
            positions = (jnp.cumsum(real, axis=1) - 1) * real
        slopes = jnp.asarray(alibi_slopes(num_heads))[None, :, None, None]
        return slopes * positions[:, None, None, :]


class BloomEmbeddings(nnx.Module):
    """Word embeddings, normalised."""

    def __init__(self, config: BloomConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        self.word = embed(config.vocab_size, config.embed_dim, dtype, rngs)
        self.norm = layer_norm(config.embed_dim, config.norm_eps, dtype, rngs)

    def __call__(self, input_ids: Ids) -> Float[Array, "B T D"]:
        """Embeds tokens."""
        with jax.named_scope("embeddings"):
            return self.norm(look_up(self.word, jnp.asarray(input_ids)))


class BloomAttention(FusedQkvAttention):
    """Attention whose product has for each head its query, its key, its value."""

    def split[A: (Array, np.ndarray)](self, columns: A) -> list[A]:
        """Returns query, key and value, each [..., N, H], of a product's columns [..., 3 N H]."""
        heads = columns.reshape(*columns.shape[:-1], self.num_heads, 3, -1)
        return [heads[..., i, :] for i in range(3)]


class BloomLayer(nnx.Module):
    """One block: attention, then MLP."""

    def __init__(self, config: BloomConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        self.attention = BloomAttention(
            config.embed_dim,
            config.num_heads,
            norm_eps=config.norm_eps,
            dtype=dtype,
            rngs=rngs,
        )
        self.mlp = PreNormMlp(
            config.embed_dim,
            4 * config.embed_dim,
            norm_eps=config.norm_eps,
            activation="gelu_tanh",
            dtype=dtype,
            rngs=rngs,
        )

    def __call__(self, x: Hidden, keys: Keys) -> Hidden:
        """Applies the block."""
        return self.mlp(self.attention(x, keys))


class BloomModel(CausalDecoder[BloomConfig]):
    """A BLOOM decoder, with an optional language model head."""

    def __init__(
        self, config: BloomConfig, *, dtype: DTypeLike = "float32", rngs: nnx.Rngs
    ) -> None:
        """Makes a decoder with fresh weights; `models.load` makes one with a checkpoint's.

        Args:
          config: The sizes of the model.
          dtype: The dtype of weights and activations; norms, scores and softmax are
            computed in f32 always.
          rngs: The source of random weights.
        """
        self.config = config
        self.embeddings = BloomEmbeddings(config, dtype=dtype, rngs=rngs)
        layers = [BloomLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)]
        self.layers = nnx.List(layers)
        self.norm = layer_norm(config.embed_dim, config.norm_eps, dtype, rngs)
        own = config.lm_head and not config.tie_embeddings
        self.head = embed(config.vocab_size, config.embed_dim, dtype, rngs) if own else None
        self.kernels = PLAIN

    def __call__(self, input_ids: Ids, attention_mask: Mask | None = None) -> CausalOutput:
        """Runs a batch of token sequences.

        Args:
          input_ids: Tokens; an id outside the vocabulary gives NaN, never another token's values.
          attention_mask: 1 for tokens, 0 for padding (its outputs mean nothing); None = all 1.
            Positions count from the first token of each row.

        Returns:
          Hidden states after the final norm, and logits where there is a head.

        Raises:
          InputError: A shape is wrong.
        """
        x = self.hidden_states(input_ids, attention_mask)[-1]
        with jax.named_scope("norm"):
            last = self.norm(x)
        return CausalOutput(last_hidden_state=last, logits=self.logits(last))

    def hidden_states(
        self, input_ids: Ids, attention_mask: Mask | None = None
    ) -> list[Float[Array, "B T D"]]:
        """Returns the hidden states after the embeddings and after each block, in order."""
        shapes = {} if attention_mask is None else {"attention_mask": tuple(attention_mask.shape)}
        check_tokens("BloomModel", tuple(input_ids.shape), shapes, None)
        packing = packing_of(self.kernels.alibi_attention, attention_mask)
        if packing is not None:
            input_ids = packing.pack(input_ids)
        x = self.embeddings(input_ids)
        keys = self.prompt_keys(input_ids.shape[1], attention_mask, packing)
        states = run_layers(self.layers, x, keys)
        return states if packing is None else [packing.unpack(x) for x in states]

    def prompt_keys(
        self, length: int, attention_mask: Mask | None, packing: Packing | None
    ) -> Keys:
        """Returns the keys that tokens of whole sequences see, and the weight of positions."""
        by = self.kernels.alibi_attention
        if by == "xla":
            alibi = alibi_bias(self.config.num_heads, length, attention_mask)
            return Keys(by=by, bias=causal_bias(length, attention_mask), alibi=alibi)
        lengths = None if packing is None else packing.lengths
        return Keys(by=by, causal=True, lengths=lengths, slopes=self.alibi_slopes)

    @property
    def alibi_slopes(self) -> Float[np.ndarray, " N"]:
        """The growth of each head's scores per position."""
        return alibi_slopes(self.config.num_heads)

    def embed_tokens(
        self, input_ids: Int[Array, "B T"], position_ids: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        """Returns the hidden states before the first block; positions enter in attention."""
        return self.embeddings(input_ids)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"] | None:
        """Returns the head's scores for normalised hidden states; None without a head."""
        if not self.config.lm_head:
            return None
        with jax.named_scope("head"):
            table = self.embeddings.word if self.head is None else self.head
            return logits(hidden, table.embedding[...])
