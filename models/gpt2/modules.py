"""GPT-2 decoders: Radford et al. 2019, with the details of Hugging Face's modeling_gpt2.py.

`models.decoder` adds prefill and decode over a cache. Not here: dropout, cross-attention, the
variants that scale attention by layer.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from models.attention import Keys, packing_of
from models.decoder import CausalDecoder
from models.folding import Hidden
from models.fused_qkv import FusedQkvAttention
from models.gpt2.config import GPT2Config
from models.kernels import PLAIN
from models.layers import (
    CausalOutput,
    Ids,
    Mask,
    check_tokens,
    embed,
    layer_norm,
    lengthen,
    logits,
    look_up,
)
from models.pre_norm import PreNormMlp, run_layers


class GPT2Embeddings(nnx.Module):
    """Sum of word and position embeddings."""

    def __init__(self, config: GPT2Config, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        self.word = embed(config.vocab_size, config.embed_dim, dtype, rngs)
        self.position = embed(config.max_seq_len, config.embed_dim, dtype, rngs)

    def __call__(self, input_ids: Ids, position_ids: Ids | None) -> Float[Array, "B T D"]:
        """Embeds tokens; the default positions are 0, 1, 2 and so on."""
        with jax.named_scope("embeddings"):
            x = look_up(self.word, jnp.asarray(input_ids))
            if position_ids is not None:
                return x + look_up(self.position, jnp.asarray(position_ids))
            return x + jnp.broadcast_to(self.position.embedding[: x.shape[1]], x.shape)


class GPT2Attention(FusedQkvAttention):
    """Attention whose product has all queries, then all keys, then all values."""

    def split[A: (Array, np.ndarray)](self, columns: A) -> list[A]:
        """Returns query, key and value, each [..., N, H], of a product's columns [..., 3 N H]."""
        parts = columns.reshape(*columns.shape[:-1], 3, self.num_heads, -1)
        return [parts[..., i, :, :] for i in range(3)]


class GPT2Layer(nnx.Module):
    """One block: attention, then MLP."""

    def __init__(self, config: GPT2Config, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        self.attention = GPT2Attention(
            config.embed_dim,
            config.num_heads,
            norm_eps=config.norm_eps,
            dtype=dtype,
            rngs=rngs,
        )
        self.mlp = PreNormMlp(
            config.embed_dim,
            config.mlp_dim,
            norm_eps=config.norm_eps,
            activation=config.activation,
            dtype=dtype,
            rngs=rngs,
        )

    def __call__(self, x: Hidden, keys: Keys) -> Hidden:
        """Applies the block."""
        return self.mlp(self.attention(x, keys))


class GPT2Model(CausalDecoder[GPT2Config]):
    """A GPT-2 decoder, with an optional language model head."""

    def __init__(self, config: GPT2Config, *, dtype: DTypeLike = "float32", rngs: nnx.Rngs) -> None:
        """Makes a decoder with fresh weights; `models.load` makes one with a checkpoint's.

        Args:
          config: The sizes of the model.
          dtype: The dtype of weights and activations; norms, scores and softmax are
            computed in f32 always.
          rngs: The source of random weights.
        """
        self.config = config
        self.embeddings = GPT2Embeddings(config, dtype=dtype, rngs=rngs)
        layers = [GPT2Layer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)]
        self.layers = nnx.List(layers)
        self.norm = layer_norm(config.embed_dim, config.norm_eps, dtype, rngs)
        own = config.lm_head and not config.tie_embeddings
        self.head = embed(config.vocab_size, config.embed_dim, dtype, rngs) if own else None
        self.kernels = PLAIN

    def __call__(
        self,
        input_ids: Ids,
        attention_mask: Mask | None = None,
        position_ids: Ids | None = None,
    ) -> CausalOutput:
        """Runs a batch of token sequences.

        Args:
          input_ids: Tokens; an id outside the vocabulary gives NaN, never another token's values.
          attention_mask: 1 for tokens, 0 for padding (its outputs mean nothing); None = all 1.
          position_ids: Position of each token; None = 0, 1, 2 and so on, also with a mask: with
            padding on the left, give positions that count from the first token of each row.

        Returns:
          Hidden states after the final norm, and logits where there is a head.

        Raises:
          InputError: A shape is wrong or the sequence is too long.
        """
        x = self.hidden_states(input_ids, attention_mask, position_ids)[-1]
        with jax.named_scope("norm"):
            last = self.norm(x)
        return CausalOutput(last_hidden_state=last, logits=self.logits(last))

    def hidden_states(
        self,
        input_ids: Ids,
        attention_mask: Mask | None = None,
        position_ids: Ids | None = None,
    ) -> list[Float[Array, "B T D"]]:
        """Returns the hidden states after the embeddings and after each block, in order."""
        given = {"attention_mask": attention_mask, "position_ids": position_ids}
        shapes = {name: tuple(x.shape) for name, x in given.items() if x is not None}
        check_tokens("GPT2Model", tuple(input_ids.shape), shapes, self.config.max_seq_len)
        packing = packing_of(self.kernels.causal_attention, attention_mask)
        if packing is not None:
            input_ids, position_ids = packing.pack_tokens(input_ids, position_ids)
        x = self.embeddings(input_ids, position_ids)
        keys = self.prompt_keys(input_ids.shape[1], attention_mask, packing)
        states = run_layers(self.layers, x, keys)
        return states if packing is None else [packing.unpack(x) for x in states]

    def embed_tokens(
        self, input_ids: Int[Array, "B T"], position_ids: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        """Returns the hidden states before the first block."""
        return self.embeddings(input_ids, position_ids)

    def arrange_weights(self) -> None:
        """Lengthens the table of the head to a multiple of 64 rows, as products want it."""
        if self.config.lm_head:
            # Otherwise XLA pads to multiples of 8 by a copy of the table in every call.
            lengthen(self.embeddings.word if self.head is None else self.head, 64)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"] | None:
        """Returns the head's scores for normalised hidden states; None without a head."""
        if not self.config.lm_head:
            return None
        with jax.named_scope("head"):
            table = self.embeddings.word if self.head is None else self.head
            return logits(hidden, table.embedding[...], self.config.vocab_size)
