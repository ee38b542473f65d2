"""LLaMA 3, 3.1 and 3.2 decoders: Dubey et al. 2024, as Hugging Face's modeling_llama.py has them.

In this file: configuration and modules; `models.decoder` adds prefill and decode over a cache,
`models.llama_checkpoint` has the names of the files. Not here: biases, dropout, Meta's own layout.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from models.attention import Keys, attention, packing_of
from models.decoder import CausalDecoder, Heads
from models.errors import ConfigError
from models.folding import FoldedNorm, Hidden, fold
from models.hf_config import ConfigFields
from models.kernels import PLAIN
from models.layers import (
    CausalOutput,
    Ids,
    Linear,
    Mask,
    check_tokens,
    embed,
    joined,
    linear,
    logits,
    look_up,
)
from models.pre_norm import PreNorm, Products, gated, run_layers
from models.rotary import Rotary, RotaryTable, read_rotary, rotary_frequencies, rotary_table
from pallas_kernels.norm import rms_norm

# For each class that may have saved the file: whether it has a language model head.
ARCHITECTURES = {"LlamaForCausalLM": True, "LlamaModel": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes and constants of one LLaMA decoder.

    Attributes:
      num_layers: Number of blocks.
      embed_dim: Width of the hidden states.
      mlp_dim: Width inside the MLP.
      num_heads: Query heads.
      num_kv_heads: Key and value heads; divides num_heads.
      head_dim: Width of one head, even.
      vocab_size: Rows of the word embedding.
      max_seq_len: The longest sequence.
      norm_eps: Added to the mean square in every RMSNorm.
      rope_theta: Base of the rotary frequencies.
      rope_factor: What llama3's scaling divides low frequencies by; 1 leaves all as they are.
      rope_low: Wavelengths above rope_original_len / rope_low are divided in full.
      rope_high: Wavelengths below rope_original_len / rope_high are kept.
      rope_original_len: The longest sequence before scaling.
      lm_head: Whether there is a language model head.
      tie_embeddings: Whether the head is the word embedding.
    """

    num_layers: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_seq_len: int
    norm_eps: float
    rope_theta: float
    rope_factor: float = 1.0
    rope_low: float = 1.0
    rope_high: float = 4.0
    rope_original_len: int = 8192
    lm_head: bool = True
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError unless the sizes fit together."""
        sizes = {k: v for k, v in dataclasses.asdict(self).items() if not isinstance(v, bool)}
        if bad := [f"{name} is {size}" for name, size in sizes.items() if not size > 0]:
            raise ConfigError(f"LlamaConfig: {', '.join(bad)}; sizes are positive; correct them")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"LlamaConfig: num_heads is {self.num_heads} with {self.num_kv_heads} kv heads;"
                " the kv heads must divide it; change one of them"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"LlamaConfig: head_dim is {self.head_dim}; rotary positions turn pairs of"
                " features, so it is even; change it"
            )
        if self.rope_low >= self.rope_high:
            raise ConfigError(
                f"LlamaConfig: rope_low is {self.rope_low} with rope_high {self.rope_high};"
                " it must be the lower; correct them"
            )

    @property
    def rotary(self) -> Rotary:
        """The rotary positions."""
        return Rotary(
            theta=self.rope_theta,
            factor=self.rope_factor,
            low=self.rope_low,
            high=self.rope_high,
            original_len=self.rope_original_len,
        )

    @classmethod
    def llama3_8b(cls) -> "LlamaConfig":
        """LLaMA 3 8B: 32 layers x 4096, 8 kv heads."""
        sizes = {"num_layers": 32, "embed_dim": 4096, "mlp_dim": 14336, "vocab_size": 128256}
        heads = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
        return cls(**sizes, **heads, max_seq_len=8192, norm_eps=1e-5, rope_theta=500000.0)

    @classmethod
    def llama3_70b(cls) -> "LlamaConfig":
        """LLaMA 3 70B: 80 layers x 8192, 8 kv heads."""
        return replace(cls.llama3_8b(), num_layers=80, embed_dim=8192, mlp_dim=28672, num_heads=64)

    @classmethod
    def llama31_8b(cls) -> "LlamaConfig":
        """LLaMA 3.1 8B: that of LLaMA 3 with rope scaling for 131,072 tokens."""
        return replace(cls.llama3_8b(), max_seq_len=131072, rope_factor=8.0)

    @classmethod
    def llama31_70b(cls) -> "LlamaConfig":
        """LLaMA 3.1 70B: that of LLaMA 3 with rope scaling for 131,072 tokens."""
        return replace(cls.llama3_70b(), max_seq_len=131072, rope_factor=8.0)

    @classmethod
    def llama32_1b(cls) -> "LlamaConfig":
        """LLaMA 3.2 1B: 16 layers x 2048, head tied to the embedding."""
        return replace(
            cls.llama31_8b(),
            num_layers=16,
            embed_dim=2048,
            mlp_dim=8192,
            head_dim=64,
            rope_factor=32.0,
            tie_embeddings=True,
        )

    @classmethod
    def llama32_3b(cls) -> "LlamaConfig":
        """LLaMA 3.2 3B: 28 layers x 3072, head tied to the embedding."""
        return replace(cls.llama32_1b(), num_layers=28, embed_dim=3072, num_heads=24, head_dim=128)

    @classmethod
    def from_hugging_face(
        cls, fields: Mapping[str, object], origin: str = "config.json"
    ) -> "LlamaConfig":
        """Reads the fields of a config.json, of transformers 4 or 5.

        Args:
          fields: The parsed JSON object.
          origin: Where it came from, for messages.

        Returns:
          The configuration.

        Raises:
          ConfigError: A field is missing, malformed or asks for what is not supported.
        """
        reader = ConfigFields(fields, origin)
        head = ARCHITECTURES[reader.architecture(ARCHITECTURES, "LlamaForCausalLM")]
        for name in ("attention_bias", "mlp_bias", "add_cross_attention", "is_encoder_decoder"):
            reader.exactly(name, (False,), default=False)
        reader.exactly("hidden_act", ("silu", "swish"), default="silu")
        reader.exactly("pruned_heads", ({}, None), default=None)
        reader.exactly("partial_rotary_factor", (1.0, 1, None), default=None)
        # Slices matrix products over devices, with the same result.
        reader.ignore("is_decoder", "pretraining_tp")
        heads, width = reader.count("num_attention_heads"), reader.count("hidden_size")
        kv_heads = reader.count_or("num_key_value_heads", heads)
        if heads % kv_heads:
            allowed = f"it must divide num_attention_heads {heads}"
            raise reader.error("num_key_value_heads", str(kv_heads), allowed, "correct")
        if width % heads and not reader.has("head_dim"):
            allowed = f"without head_dim it must divide hidden_size {width}"
            raise reader.error("num_attention_heads", str(heads), allowed, "correct")
        rotary = read_rotary(reader)
        config = cls(
            num_layers=reader.count("num_hidden_layers"),
            embed_dim=width,
            mlp_dim=reader.count("intermediate_size"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=reader.count_or("head_dim", width // heads),
            vocab_size=reader.count("vocab_size"),
            max_seq_len=reader.count("max_position_embeddings"),
            norm_eps=reader.positive("rms_norm_eps"),
            lm_head=head,
            tie_embeddings=reader.flag("tie_word_embeddings", default=False),
            rope_theta=rotary.theta,
            rope_factor=rotary.factor,
            rope_low=rotary.low,
            rope_high=rotary.high,
            rope_original_len=rotary.original_len,
        )
        reader.warn_unknown()
        return config


class LlamaNorm(nnx.Module):
    """RMSNorm: f32 inside, the gain applied in the dtype of the model (Zhang and Sennrich 2019)."""

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike) -> None:
        """Makes the fresh parameter."""
        self.scale = nnx.Param(jnp.ones((config.embed_dim,), dtype))
        self.eps = config.norm_eps
        self.kernels = PLAIN

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Divides by the root of the mean square over the features."""
        if self.kernels.norm != "xla":
            return rms_norm(x, self.scale[...], eps=self.eps)
        exact = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(exact), axis=-1, keepdims=True)
        normal = (exact * jax.lax.rsqrt(mean_square + self.eps)).astype(x.dtype)
        return normal * self.scale[...][None, None]

    def fold_into(self, *linears: Linear) -> FoldedNorm:
        """Folds the norm into all Linears that read it, and returns what takes its place."""
        return fold(linears, self.scale[...], None, eps=self.eps, centred=False)


class LlamaAttention(PreNorm):
    """RMSNorm, then causal grouped-query attention with rotary positions, and the residual."""

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        dim, size = config.embed_dim, config.head_dim
        self.norm = LlamaNorm(config, dtype=dtype)
        self.query = linear(dim, config.num_heads * size, dtype, rngs, use_bias=False)
        self.key = linear(dim, config.num_kv_heads * size, dtype, rngs, use_bias=False)
        self.value = linear(dim, config.num_kv_heads * size, dtype, rngs, use_bias=False)
        self.query_key_value: Linear | None = nnx.data(None)
        self.output = linear(config.num_heads * size, dim, dtype, rngs, use_bias=False)
        self.head_dim = size
        self.ends = (config.num_heads * size, (config.num_heads + config.num_kv_heads) * size)

    def arrange_weights(self) -> None:
        """Joins the weights of query, key and value: few rows do not fill a GPU with each alone."""
        if self.query_key_value is None:
            self.query_key_value = joined([self.query, self.key, self.value])
            del self.query, self.key, self.value

    def products(self) -> Products:
        """Returns the products before and after which norms can be folded."""
        joined = self.query_key_value
        readers = [self.query, self.key, self.value] if joined is None else [joined]
        return Products(readers, self.output)

    def __call__(self, x: Hidden, table: RotaryTable, keys: Keys) -> Hidden:
        """Attends over the keys that a token sees."""
        with jax.named_scope("attention"):
            query, key, value = self.heads(x, table)
            return self.join(x, attention(query, key, value, keys))

    def heads(self, x: Hidden, table: RotaryTable) -> Heads:
        """Returns query, key and value of every head, the first two turned to their positions."""
        normal = self.normalise(x)
        parts = [f.after_norm(normal) for f in self.products().readers]
        if self.query_key_value is not None:
            parts = jnp.split(parts[0], self.ends, axis=-1)
        query, key, value = (y.reshape(*x.shape[:2], -1, self.head_dim) for y in parts)
        return table.rotate(query), table.rotate(key), value

    def join(self, x: Hidden, context: Float[Array, "B T N H"]) -> Hidden:
        """Adds what the heads have read to the hidden states."""
        return self.output.add_to(x, context.reshape(*x.shape[:2], -1))


class LlamaMlp(PreNorm):
    """RMSNorm, then the gated MLP SwiGLU (Shazeer 2020), and the residual."""

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        self.norm = LlamaNorm(config, dtype=dtype)
        self.gate = linear(config.embed_dim, config.mlp_dim, dtype, rngs, use_bias=False)
        self.up = linear(config.embed_dim, config.mlp_dim, dtype, rngs, use_bias=False)
        self.down = linear(config.mlp_dim, config.embed_dim, dtype, rngs, use_bias=False)

    def products(self) -> Products:
        """Returns the products before and after which norms can be folded."""
        return Products([self.gate, self.up], self.down)

    def __call__(self, x: Hidden) -> Hidden:
        """Transforms every token by itself."""
        with jax.named_scope("mlp"):
            return self.down.add_to(x, gated(self.normalise(x), self.gate, self.up))


class LlamaLayer(nnx.Module):
    """One block: attention, then MLP."""

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        self.attention = LlamaAttention(config, dtype=dtype, rngs=rngs)
        self.mlp = LlamaMlp(config, dtype=dtype, rngs=rngs)

    def __call__(self, x: Hidden, table: RotaryTable, keys: Keys) -> Hidden:
        """Applies the block."""
        return self.mlp(self.attention(x, table, keys))


class LlamaModel(CausalDecoder[LlamaConfig]):
    """A LLaMA decoder, with its language model head if it has one."""

    def __init__(
        self, config: LlamaConfig, *, dtype: DTypeLike = "float32", rngs: nnx.Rngs
    ) -> None:
        """Makes a decoder with fresh weights; `models.load` makes one with a checkpoint's.

        Args:
          config: Its sizes.
          dtype: Of weights and activations; norms, scores, softmax and rotary tables are computed
            in f32 always.
          rngs: Source of the weights.
        """
        self.config = config
        self.embeddings = embed(config.vocab_size, config.embed_dim, dtype, rngs)
        layers = [LlamaLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)]
        self.layers = nnx.List(layers)
        self.norm = LlamaNorm(config, dtype=dtype)
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
          position_ids: Position of each token; None = 0, 1, 2 and so on, also with a mask. Only
            differences of positions matter.

        Returns:
          Hidden states after the final norm, and logits where there is a head.

        Raises:
          InputError: A shape is wrong or the sequence is too long.
        """
        last = self.last_norm(self.hidden_states(input_ids, attention_mask, position_ids)[-1])
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
        check_tokens("LlamaModel", tuple(input_ids.shape), shapes, self.max_seq_len)
        packing = packing_of(self.kernels.causal_attention, attention_mask)
        if packing is not None:
            input_ids, position_ids = packing.pack_tokens(input_ids, position_ids)
        length = input_ids.shape[1]
        frequencies = rotary_frequencies(self.config.rotary, self.config.head_dim)
        table = rotary_table(frequencies, length, position_ids)
        keys = self.prompt_keys(length, attention_mask, packing)
        with jax.named_scope("embeddings"):
            x = look_up(self.embeddings, jnp.asarray(input_ids))
        states = run_layers(self.layers, x, table, keys)
        return states if packing is None else [packing.unpack(x) for x in states]

    def embed_tokens(
        self, input_ids: Int[Array, "B T"], position_ids: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        """Returns the hidden states before the first block; positions enter in attention."""
        with jax.named_scope("embeddings"):
            return look_up(self.embeddings, input_ids)

    def position_terms(self, position_ids: Int[Array, "B T"]) -> tuple[RotaryTable]:
        """Returns the angles of the positions."""
        frequencies = rotary_frequencies(self.config.rotary, self.config.head_dim)
        return (rotary_table(frequencies, position_ids.shape[1], position_ids),)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"] | None:
        """Returns the head's scores for normalised hidden states; None without a head."""
        if not self.config.lm_head:
            return None
        with jax.named_scope("head"):
            table = self.embeddings if self.head is None else self.head
            return logits(hidden, table.embedding[...])
