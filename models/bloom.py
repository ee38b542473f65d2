"""BLOOM decoders: Le Scao et al. 2022, with the details of Hugging Face's modeling_bloom.py.

In this file: configuration and modules; `models.decoder` adds prefill and decode over a cache,
`models.bloom_checkpoint` has the names of the files. Not here: dropout, residuals after the norm.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from models.attention import Keys, Packing, attention, packing_of
from models.decoder import CausalDecoder, Heads
from models.errors import ConfigError
from models.folding import Hidden
from models.hf_config import ConfigFields
from models.kernels import PLAIN
from models.layers import (
    CausalOutput,
    Ids,
    Linear,
    Mask,
    causal_bias,
    check_tokens,
    embed,
    layer_norm,
    linear,
    logits,
    look_up,
    part_of,
)
from models.pre_norm import PreNorm, PreNormMlp, Products, run_layers

# For each class that may have saved the file: whether it has a language model head.
ARCHITECTURES = {"BloomForCausalLM": True, "BloomModel": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class BloomConfig:
    """Sizes and constants of one BLOOM decoder; the MLP is four times as wide as the model.

    Attributes:
      num_layers: Number of blocks.
      embed_dim: Width of the hidden states.
      num_heads: Attention heads; divides embed_dim.
      vocab_size: Rows of the word embedding.
      norm_eps: Added to the variance in every LayerNorm.
      lm_head: Whether there is a language model head.
      tie_embeddings: Whether the head is the word embedding.
    """

    num_layers: int
    embed_dim: int
    num_heads: int
    vocab_size: int
    norm_eps: float
    lm_head: bool = True
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        """Raises ConfigError unless the sizes fit together."""
        sizes = {k: v for k, v in dataclasses.asdict(self).items() if not isinstance(v, bool)}
        if bad := [f"{name} is {size}" for name, size in sizes.items() if not size > 0]:
            raise ConfigError(f"BloomConfig: {', '.join(bad)}; sizes are positive; correct them")
        if self.embed_dim % self.num_heads:
            raise ConfigError(
                f"BloomConfig: embed_dim is {self.embed_dim} with {self.num_heads} heads;"
                " the heads must divide it; change one of them"
            )

    @classmethod
    def bloom_560m(cls) -> "BloomConfig":
        """BLOOM 560M: 24 layers x 1024."""
        return cls(num_layers=24, embed_dim=1024, num_heads=16, vocab_size=250880, norm_eps=1e-5)

    @classmethod
    def bloom_1b1(cls) -> "BloomConfig":
        """BLOOM 1.1B: 24 layers x 1536."""
        return replace(cls.bloom_560m(), embed_dim=1536)

    @classmethod
    def bloom_1b7(cls) -> "BloomConfig":
        """BLOOM 1.7B: 24 layers x 2048."""
        return replace(cls.bloom_560m(), embed_dim=2048)

    @classmethod
    def bloom_3b(cls) -> "BloomConfig":
        """BLOOM 3B: 30 layers x 2560."""
        return replace(cls.bloom_560m(), num_layers=30, embed_dim=2560, num_heads=32)

    @classmethod
    def bloom_7b1(cls) -> "BloomConfig":
        """BLOOM 7.1B: 30 layers x 4096."""
        return replace(cls.bloom_3b(), embed_dim=4096)

    @classmethod
    def from_hugging_face(
        cls, fields: Mapping[str, object], origin: str = "config.json"
    ) -> "BloomConfig":
        """Reads the fields of a config.json, also with the names of the first BLOOM files.

        Args:
          fields: The parsed JSON object.
          origin: Where it came from, for messages.

        Returns:
          The configuration.

        Raises:
          ConfigError: A field is missing, malformed or asks for what is not supported.
        """
        reader = ConfigFields(fields, origin)
        head = ARCHITECTURES[reader.architecture(ARCHITECTURES, "BloomForCausalLM")]
        for name in (
            "apply_residual_connection_post_layernorm",
            "add_cross_attention",
            "is_encoder_decoder",
        ):
            reader.exactly(name, (False,), default=False)
        reader.exactly("pruned_heads", ({}, None), default=None)
        if reader.count_or("pretraining_tp", 1) > 1:
            reader.exactly("slow_but_exact", (False,), default=False)
        # How the original code ran, and a length that ALiBi does not bound.
        reader.ignore(
            "attention_softmax_in_fp32",
            "bias_dropout_fusion",
            "is_decoder",
            "masked_softmax_fusion",
            "offset_alibi",
            "seq_length",
            "skip_bias_add",
            "skip_bias_add_qkv",
            "slow_but_exact",
        )
        heads = reader.count("n_head", "num_attention_heads")
        width = reader.count("hidden_size", "n_embed")
        if width % heads:
            raise reader.error("n_head", str(heads), f"it must divide the width {width}", "correct")
        reader.exactly("n_inner", (None, 4 * width), default=None)
        config = cls(
            num_layers=reader.count("n_layer", "num_hidden_layers"),
            embed_dim=width,
            num_heads=heads,
            vocab_size=reader.count("vocab_size"),
            norm_eps=reader.positive("layer_norm_epsilon"),
            lm_head=head,
            tie_embeddings=reader.flag("tie_word_embeddings", default=True),
        )
        reader.warn_unknown()
        return config


def alibi_slopes(num_heads: int) -> Float[np.ndarray, " N"]:
    """Returns by how much each head's scores grow per position.

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
    """Returns what is added to scores: slope times key position, counted from the first token."""
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


class BloomAttention(PreNorm):
    """LayerNorm, then causal multi-head attention, and the residual."""

    def __init__(self, config: BloomConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
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
        joined, heads = self.query_key_value, self.num_heads
        columns = np.arange(joined.out_features).reshape(heads, 3, -1)
        self.parts = nnx.List([part_of(joined, columns[:, i].reshape(-1)) for i in range(3)])
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
        # The columns are grouped by head; each head has its query, its key, its value.
        fused = self.query_key_value.after_norm(inner)
        heads = fused.reshape(*x.shape[:2], self.num_heads, 3, -1)
        return heads[..., 0, :], heads[..., 1, :], heads[..., 2, :]

    def join(self, x: Hidden, context: Float[Array, "B T N H"]) -> Hidden:
        """Adds what the heads have read to the hidden states."""
        return self.output.add_to(x, context.reshape(x.shape))


class BloomLayer(nnx.Module):
    """One block: attention, then MLP."""

    def __init__(self, config: BloomConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        self.attention = BloomAttention(config, dtype=dtype, rngs=rngs)
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
    """A BLOOM decoder, with its language model head if it has one."""

    def __init__(
        self, config: BloomConfig, *, dtype: DTypeLike = "float32", rngs: nnx.Rngs
    ) -> None:
        """Makes a decoder with fresh weights; `models.load` makes one with a checkpoint's.

        Args:
          config: Its sizes.
          dtype: Of weights and activations; norms, scores and softmax are computed in f32 always.
          rngs: Source of the weights.
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
        """Returns which keys the tokens of whole sequences see, and what their positions count."""
        by = self.kernels.alibi_attention
        if by == "xla":
            alibi = alibi_bias(self.config.num_heads, length, attention_mask)
            return Keys(by=by, bias=causal_bias(length, attention_mask), alibi=alibi)
        lengths = None if packing is None else packing.lengths
        return Keys(by=by, causal=True, lengths=lengths, slopes=self.alibi_slopes)

    @property
    def alibi_slopes(self) -> Float[np.ndarray, " N"]:
        """By how much each head's scores grow per position."""
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
