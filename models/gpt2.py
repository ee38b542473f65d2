"""GPT-2 decoders: Radford et al. 2019, with the details of Hugging Face's modeling_gpt2.py.

In this file: configuration and modules; `models.decoder` adds prefill and decode over a cache,
`models.gpt2_checkpoint` has the names of the files. Not here: dropout, cross-attention, the
variants that scale attention by layer.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from models.attention import Keys, attention, packing_of
from models.decoder import CausalDecoder, Heads
from models.errors import ConfigError
from models.folding import Hidden
from models.hf_config import ConfigFields
from models.kernels import PLAIN
from models.layers import (
    ACTIVATIONS,
    HUGGING_FACE_ACTIVATIONS,
    CausalOutput,
    Ids,
    Linear,
    Mask,
    check_tokens,
    embed,
    layer_norm,
    lengthen,
    linear,
    logits,
    look_up,
    part_of,
)
from models.pre_norm import PreNorm, PreNormMlp, Products, run_layers

# For each class that may have saved the file: whether it has a language model head.
ARCHITECTURES = {"GPT2LMHeadModel": True, "GPT2Model": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class GPT2Config:
    """Sizes and constants of one GPT-2 decoder.

    Attributes:
      num_layers: Number of blocks.
      embed_dim: Width of the hidden states.
      mlp_dim: Width inside the MLP.
      num_heads: Attention heads; divides embed_dim.
      vocab_size: Rows of the word embedding.
      max_seq_len: Rows of the position embedding, the longest sequence.
      norm_eps: Added to the variance in every LayerNorm.
      activation: GELU in its tanh approximation, "gelu_tanh", or its exact form, "gelu".
      lm_head: Whether there is a language model head.
      tie_embeddings: Whether the head is the word embedding.
    """

    num_layers: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    vocab_size: int
    max_seq_len: int
    norm_eps: float
    activation: Literal["gelu", "gelu_tanh"] = "gelu_tanh"
    lm_head: bool = True
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        """Raises ConfigError unless the sizes fit together."""
        sizes = {k: v for k, v in dataclasses.asdict(self).items() if not isinstance(v, str | bool)}
        if bad := [f"{name} is {size}" for name, size in sizes.items() if not size > 0]:
            raise ConfigError(f"GPT2Config: {', '.join(bad)}; sizes are positive; correct them")
        if self.embed_dim % self.num_heads:
            raise ConfigError(
                f"GPT2Config: embed_dim is {self.embed_dim} with {self.num_heads} heads;"
                " the heads must divide it; change one of them"
            )
        if self.activation not in ACTIVATIONS:
            raise ConfigError(
                f"GPT2Config: activation is {self.activation!r};"
                f" supported are {', '.join(ACTIVATIONS)}; choose one"
            )

    @classmethod
    def small(cls) -> "GPT2Config":
        """GPT-2 124M: 12 layers x 768."""
        return cls(
            num_layers=12,
            embed_dim=768,
            mlp_dim=3072,
            num_heads=12,
            vocab_size=50257,
            max_seq_len=1024,
            norm_eps=1e-5,
        )

    @classmethod
    def medium(cls) -> "GPT2Config":
        """GPT-2 355M: 24 layers x 1024."""
        return replace(cls.small(), num_layers=24, embed_dim=1024, mlp_dim=4096, num_heads=16)

    @classmethod
    def large(cls) -> "GPT2Config":
        """GPT-2 774M: 36 layers x 1280."""
        return replace(cls.small(), num_layers=36, embed_dim=1280, mlp_dim=5120, num_heads=20)

    @classmethod
    def xl(cls) -> "GPT2Config":
        """GPT-2 1.5B: 48 layers x 1600."""
        return replace(cls.small(), num_layers=48, embed_dim=1600, mlp_dim=6400, num_heads=25)

    @classmethod
    def from_hugging_face(
        cls, fields: Mapping[str, object], origin: str = "config.json"
    ) -> "GPT2Config":
        """Reads the fields of a config.json.

        Args:
          fields: The parsed JSON object.
          origin: Where it came from, for messages.

        Returns:
          The configuration.

        Raises:
          ConfigError: A field is missing, malformed or asks for what is not supported.
        """
        reader = ConfigFields(fields, origin)
        head = ARCHITECTURES[reader.architecture(ARCHITECTURES, "GPT2LMHeadModel")]
        reader.exactly("scale_attn_weights", (True,), default=True)
        for name in (
            "scale_attn_by_inverse_layer_idx",
            "reorder_and_upcast_attn",
            "add_cross_attention",
            "is_encoder_decoder",
        ):
            reader.exactly(name, (False,), default=False)
        reader.exactly("pruned_heads", ({}, None), default=None)
        reader.ignore("is_decoder")
        heads, width = reader.count("n_head"), reader.count("n_embd")
        if width % heads:
            raise reader.error("n_head", str(heads), f"it must divide n_embd {width}", "correct")
        config = cls(
            num_layers=reader.count("n_layer"),
            embed_dim=width,
            mlp_dim=reader.count_or("n_inner", 4 * width),
            num_heads=heads,
            vocab_size=reader.count("vocab_size"),
            max_seq_len=reader.count("n_positions", "n_ctx"),
            norm_eps=reader.positive("layer_norm_epsilon"),
            activation=reader.one_of("activation_function", HUGGING_FACE_ACTIVATIONS, "gelu_new"),
            lm_head=head,
            tie_embeddings=reader.flag("tie_word_embeddings", default=True),
        )
        reader.warn_unknown()
        return config


class GPT2Embeddings(nnx.Module):
    """Sum of word and position embeddings."""

    def __init__(self, config: GPT2Config, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        self.word = embed(config.vocab_size, config.embed_dim, dtype, rngs)
        self.position = embed(config.max_seq_len, config.embed_dim, dtype, rngs)

    def __call__(self, input_ids: Ids, position_ids: Ids | None) -> Float[Array, "B T D"]:
        """Embeds tokens; positions 0, 1, 2 and so on where none are given."""
        with jax.named_scope("embeddings"):
            x = look_up(self.word, jnp.asarray(input_ids))
            if position_ids is not None:
                return x + look_up(self.position, jnp.asarray(position_ids))
            return x + jnp.broadcast_to(self.position.embedding[: x.shape[1]], x.shape)


class GPT2Attention(PreNorm):
    """LayerNorm, then causal multi-head attention, and the residual."""

    def __init__(self, config: GPT2Config, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        self.norm = layer_norm(config.embed_dim, config.norm_eps, dtype, rngs)
        self.query_key_value = linear(config.embed_dim, 3 * config.embed_dim, dtype, rngs)
        self.output = linear(config.embed_dim, config.embed_dim, dtype, rngs)
        self.parts: nnx.List[Linear] | None = nnx.data(None)
        self.num_heads = config.num_heads

    def arrange_weights(self) -> None:
        """Holds the weights of query, key and value apart."""
        if self.parts is not None:
            return
        dim = self.query_key_value.in_features
        columns = (slice(start, start + dim) for start in range(0, 3 * dim, dim))
        self.parts = nnx.List([part_of(self.query_key_value, part) for part in columns])
        del self.query_key_value

    def products(self) -> Products:
        """Returns the products before and after which norms can be folded."""
        return Products(self.parts or [self.query_key_value], self.output)

    def __call__(self, x: Hidden, keys: Keys) -> Hidden:
        """Attends over the keys that a token sees."""
        with jax.named_scope("attention"):
            return self.join(x, attention(*self.heads(x), keys))

    def heads(self, x: Hidden) -> Heads:
        """Returns query, key and value of every head."""
        inner = self.normalise(x)
        if self.parts is not None:
            shape = (*x.shape[:2], self.num_heads, -1)
            query, key, value = (part.after_norm(inner).reshape(shape) for part in self.parts)
            return query, key, value
        # The columns are all queries, all keys, all values; the heads lie inside each.
        fused = self.query_key_value.after_norm(inner)
        heads = fused.reshape(*x.shape[:2], 3, self.num_heads, -1)
        return heads[:, :, 0], heads[:, :, 1], heads[:, :, 2]

    def join(self, x: Hidden, context: Float[Array, "B T N H"]) -> Hidden:
        """Adds what the heads have read to the hidden states."""
        return self.output.add_to(x, context.reshape(x.shape))


class GPT2Layer(nnx.Module):
    """One block: attention, then MLP."""

    def __init__(self, config: GPT2Config, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        self.attention = GPT2Attention(config, dtype=dtype, rngs=rngs)
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
    """A GPT-2 decoder, with its language model head if it has one."""

    def __init__(self, config: GPT2Config, *, dtype: DTypeLike = "float32", rngs: nnx.Rngs) -> None:
        """Makes a decoder with fresh weights; `models.load` makes one with a checkpoint's.

        Args:
          config: Its sizes.
          dtype: Of weights and activations; norms, scores and softmax are computed in f32 always.
          rngs: Source of the weights.
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
            padding on the left give `models.layers.positions_from_mask(attention_mask)`.

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
        """Lengthens the table that the head multiplies to a multiple of what products want."""
        if self.config.lm_head:
            # XLA pads a product to multiples of 8 itself, by a copy of the table in every call.
            lengthen(self.embeddings.word if self.head is None else self.head, 64)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"] | None:
        """Returns the head's scores for normalised hidden states; None without a head."""
        if not self.config.lm_head:
            return None
        with jax.named_scope("head"):
            table = self.embeddings.word if self.head is None else self.head
            return logits(hidden, table.embedding[...], self.config.vocab_size)
