"""BERT encoders: Devlin et al. 2018, with the details of Hugging Face's modeling_bert.py.

Not here: dropout, the other heads, decoder and cross-attention variants.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from models.attention import Keys, attention, packing_of
from models.bert.config import BertConfig
from models.errors import InputError
from models.kernels import PLAIN
from models.layers import (
    INIT_STDDEV,
    Ids,
    LayerNorm,
    Mask,
    layer_norm,
    linear,
    logits,
    look_up,
)
from models.outputs import register_output
from models.segments import segment_bias


@register_output
@dataclass(frozen=True, slots=True, kw_only=True)
class BertOutput:
    """The output of a BERT encoder, under Hugging Face's names.

    Attributes:
      last_hidden_state: Hidden states after the last block.
      pooler_output: tanh of a Linear on the first token; None without a pooler.
    """

    last_hidden_state: Float[Array, "B T D"]
    pooler_output: Float[Array, "B D"] | None


class BertEmbeddings(nnx.Module):
    """Sum of word, token type and position embeddings, normalised."""

    def __init__(self, config: BertConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        embed = partial(
            nnx.Embed,
            features=config.embed_dim,
            dtype=dtype,
            param_dtype=dtype,
            embedding_init=nnx.initializers.normal(INIT_STDDEV),
            rngs=rngs,
        )
        self.word = embed(config.vocab_size)
        self.position = embed(config.max_seq_len)
        self.token_type = embed(config.num_token_types)
        self.norm = _layer_norm(config, dtype, rngs)

    def __call__(
        self, input_ids: Ids, token_type_ids: Ids | None, position_ids: Ids | None = None
    ) -> Float[Array, "B T D"]:
        """Embeds tokens; by default token types are 0 and positions 0, 1, 2 and so on."""
        with jax.named_scope("embeddings"):
            ids = jnp.asarray(input_ids)
            types = jnp.zeros_like(ids) if token_type_ids is None else jnp.asarray(token_type_ids)
            x = look_up(self.word, ids) + look_up(self.token_type, types)
            if position_ids is None:
                x = x + jnp.broadcast_to(self.position.embedding[: ids.shape[1]], x.shape)
            else:
                x = x + look_up(self.position, jnp.asarray(position_ids))
            return self.norm(x)


class BertAttention(nnx.Module):
    """Bidirectional multi-head attention with its residual and norm."""

    def __init__(self, config: BertConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        project = partial(linear, config.embed_dim, config.embed_dim, dtype, rngs)
        self.query = project()
        self.key = project()
        self.value = project()
        self.output = project()
        self.norm = _layer_norm(config, dtype, rngs)
        self.num_heads = config.num_heads

    def __call__(self, x: Float[Array, "B T D"], keys: Keys) -> Float[Array, "B T D"]:
        """Attends over all tokens but padding."""
        with jax.named_scope("attention"):
            query, key, value = (self._heads(f(x)) for f in (self.query, self.key, self.value))
            context = attention(query, key, value, keys)
            return self.norm(self.output(context.reshape(x.shape), residual=x))

    def _heads(self, x: Float[Array, "B T D"]) -> Float[Array, "B T N H"]:
        return x.reshape(*x.shape[:2], self.num_heads, -1)


class BertMlp(nnx.Module):
    """Two Linears with GELU between them, residual and norm."""

    def __init__(self, config: BertConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        self.up = linear(config.embed_dim, config.mlp_dim, dtype, rngs)
        self.down = linear(config.mlp_dim, config.embed_dim, dtype, rngs)
        self.norm = _layer_norm(config, dtype, rngs)
        self.activation = config.activation

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Transforms every token by itself."""
        with jax.named_scope("mlp"):
            inner = self.up(x, activation=self.activation)
            return self.norm(self.down(inner, residual=x))


class BertLayer(nnx.Module):
    """One block: attention, then MLP."""

    def __init__(self, config: BertConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        self.attention = BertAttention(config, dtype=dtype, rngs=rngs)
        self.mlp = BertMlp(config, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], keys: Keys) -> Float[Array, "B T D"]:
        """Applies the block."""
        return self.mlp(self.attention(x, keys))


class BertMaskedLmHead(nnx.Module):
    """Linear, activation and norm, then scores by the tokens' embeddings and a bias."""

    def __init__(self, config: BertConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        self.transform = linear(config.embed_dim, config.embed_dim, dtype, rngs)
        self.norm = _layer_norm(config, dtype, rngs)
        self.bias = nnx.Param(jnp.zeros(config.vocab_size, dtype))
        self.activation = config.activation

    def __call__(
        self, x: Float[Array, "B T D"], embedding: Float[Array, "V D"]
    ) -> Float[Array, "B T V"]:
        """Scores every token of the vocabulary at every position."""
        with jax.named_scope("masked_lm"):
            scores = logits(self.norm(self.transform(x, activation=self.activation)), embedding)
            return scores + jnp.broadcast_to(self.bias[...], scores.shape)


class BertModel(nnx.Module):
    """A BERT encoder for inference."""

    def __init__(self, config: BertConfig, *, dtype: DTypeLike = "float32", rngs: nnx.Rngs) -> None:
        """Makes an encoder with fresh weights; `models.load` makes one with a checkpoint's.

        Args:
          config: The sizes of the model.
          dtype: The dtype of weights and activations; norms, scores and softmax are
            computed in f32 always.
          rngs: The source of random weights.
        """
        self.config = config
        self.embeddings = BertEmbeddings(config, dtype=dtype, rngs=rngs)
        layers = [BertLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)]
        self.layers = nnx.List(layers)
        dim = config.embed_dim
        self.pooler = linear(dim, dim, dtype, rngs) if config.pooler else None
        head = BertMaskedLmHead(config, dtype=dtype, rngs=rngs) if config.masked_lm else None
        self.masked_lm_head = head
        self.kernels = PLAIN

    def __call__(
        self,
        input_ids: Ids,
        attention_mask: Mask | None = None,
        token_type_ids: Ids | None = None,
    ) -> BertOutput:
        """Encodes a batch of token sequences.

        Args:
          input_ids: Tokens; an id outside the vocabulary gives NaN, never another token's values.
          attention_mask: 1 for tokens, 0 for padding (its outputs mean nothing); None = all 1.
          token_type_ids: Segment of each token; None = all 0.

        Returns:
          Hidden states of the last block and the pooler's output.

        Raises:
          InputError: A shape is wrong or the sequence is too long.
        """
        last = self.hidden_states(input_ids, attention_mask, token_type_ids)[-1]
        if self.pooler is None:
            return BertOutput(last_hidden_state=last, pooler_output=None)
        with jax.named_scope("pooler"):
            pooled = jnp.tanh(self.pooler(last[:, 0]))
        return BertOutput(last_hidden_state=last, pooler_output=pooled)

    def hidden_states(
        self,
        input_ids: Ids,
        attention_mask: Mask | None = None,
        token_type_ids: Ids | None = None,
    ) -> list[Float[Array, "B T D"]]:
        """Returns the hidden states after the embeddings and after each block, in order."""
        given = {"attention_mask": attention_mask, "token_type_ids": token_type_ids}
        shapes = {name: tuple(x.shape) for name, x in given.items() if x is not None}
        check_shapes(self.config, tuple(input_ids.shape), shapes)
        by = self.kernels.attention
        packing, positions = packing_of(by, attention_mask), None
        if packing is not None:
            input_ids, positions = packing.pack(input_ids), packing.order
            token_type_ids = None if token_type_ids is None else packing.pack(token_type_ids)
            keys = Keys(by=by, lengths=packing.lengths)
        else:
            keys = Keys(by=by, bias=None if attention_mask is None else mask_bias(attention_mask))
        states = [self.embeddings(input_ids, token_type_ids, positions)]
        for layer in self.layers:
            states.append(layer(states[-1], keys))
        return states if packing is None else [packing.unpack(x) for x in states]

    def masked_lm(
        self,
        input_ids: Ids,
        attention_mask: Mask | None = None,
        token_type_ids: Ids | None = None,
    ) -> Float[Array, "B T V"]:
        """Returns the score of every token of the vocabulary at every position of a batch.

        Args:
          input_ids: See `__call__`.
          attention_mask: See `__call__`.
          token_type_ids: See `__call__`.

        Raises:
          InputError: The model has no such head; see also `__call__`.
        """
        if self.masked_lm_head is None:
            raise InputError(
                "BertModel.masked_lm(): the checkpoint has no tied head for masked tokens;"
                " those saved as BertForMaskedLM or BertForPreTraining have one; load one of these"
            )
        last = self.hidden_states(input_ids, attention_mask, token_type_ids)[-1]
        return self.masked_lm_head(last, self.embeddings.word.embedding[...])

    def packed_hidden_state(
        self,
        input_ids: Ids,
        segment_ids: Ids,
        position_ids: Ids,
        offsets: Int[Array | np.ndarray, " C"],
    ) -> Float[Array, "R L D"]:
        """Encodes rows that hold several sequences each, one after another.

        Args:
          input_ids: Tokens; all have token type 0.
          segment_ids: The index of each token's sequence in its row.
          position_ids: The position of each token in its sequence; NaN results beyond the model's.
          offsets: The start of each sequence, and of the empty end of each row, among the tokens
            of all rows; the last entry is the number of tokens.

        Returns:
          Hidden states of the last block, equal to those of each sequence alone.
        """
        keys = Keys(
            by="pallas" if self.kernels.attention == "pallas" else "xla",
            bias=segment_bias(segment_ids),
            offsets=jnp.asarray(offsets),
        )
        x = self.embeddings(input_ids, None, position_ids)
        for layer in self.layers:
            x = layer(x, keys)
        return x

    @property
    def max_seq_len(self) -> int:
        """The longest sequence."""
        return self.config.max_seq_len

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return self.config.vocab_size


def mask_bias(attention_mask: Mask) -> Float[Array, "B 1 1 T"]:
    """Returns 0 for tokens and the lowest finite f32 for padding.

    With a finite value a row without any token attends uniformly; -inf would give NaN.
    """
    with jax.named_scope("mask_bias"):
        lowest = jnp.finfo(jnp.float32).min
        bias = jnp.where(jnp.asarray(attention_mask) != 0, 0.0, lowest).astype(jnp.float32)
        return bias[:, None, None, :]


def check_shapes(
    config: BertConfig, ids: tuple[int, ...], others: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises InputError unless the shapes of a call fit together and into the model."""
    if len(ids) != 2:
        raise InputError(
            f"BertModel(input_ids): shape is {ids}; [batch, length] is needed; add the missing axis"
        )
    longest = config.max_seq_len
    if not 1 <= ids[1] <= longest:
        raise InputError(
            f"BertModel(input_ids): length is {ids[1]}; 1 to {longest} is possible; truncate"
        )
    for name, shape in others.items():
        if shape != ids:
            raise InputError(
                f"BertModel({name}): shape is {shape}; it must be that of input_ids, {ids};"
                " pad both alike"
            )


def _layer_norm(config: BertConfig, dtype: DTypeLike, rngs: nnx.Rngs) -> LayerNorm:
    return layer_norm(config.embed_dim, config.norm_eps, dtype, rngs)
