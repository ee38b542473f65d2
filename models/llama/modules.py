"""LLaMA 3, 3.1 and 3.2 decoders: Dubey et al. 2024, as Hugging Face's modeling_llama.py has them.

`models.decoder` adds prefill and decode over a cache. Not here: biases, dropout, Meta's own layout.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from models.attention import Keys, attention, packing_of
from models.decoder import CausalDecoder, Heads
from models.folding import FoldedNorm, Hidden, fold
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
from models.llama.config import LlamaConfig
from models.pre_norm import PreNorm, Products, gated, run_layers
from models.rotary import RotaryTable, rotary_frequencies, rotary_table
from pallas_kernels.norm import rms_norm


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
        """Folds the norm into all Linears that read it, and returns its replacement."""
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
        """Joins query, key and value, as one product alone does not fill a GPU with few rows."""
        if self.query_key_value is None:
            self.query_key_value = joined([self.query, self.key, self.value])
            del self.query, self.key, self.value

    def products(self) -> Products:
        """Returns the products that norms can be folded into."""
        joined = self.query_key_value
        readers = [self.query, self.key, self.value] if joined is None else [joined]
        return Products(readers, self.output)

    def __call__(self, x: Hidden, table: RotaryTable, keys: Keys) -> Hidden:
        """Attends over the keys that each token sees."""
        with jax.named_scope("attention"):
            query, key, value = self.heads(x, table)
            return self.join(x, attention(query, key, value, keys))

    def heads(self, x: Hidden, table: RotaryTable) -> Heads:
        """Returns query, key and value of every head, with query and key rotated."""
        normal = self.normalise(x)
        parts = [f.after_norm(normal) for f in self.products().readers]
        if self.query_key_value is not None:
            parts = jnp.split(parts[0], self.ends, axis=-1)
        query, key, value = (y.reshape(*x.shape[:2], -1, self.head_dim) for y in parts)
        return table.rotate(query), table.rotate(key), value

    def join(self, x: Hidden, context: Float[Array, "B T N H"]) -> Hidden:
        """Projects the output of the heads and adds it to the hidden states."""
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
        """Returns the products that norms can be folded into."""
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
    """A LLaMA decoder, with an optional language model head."""

    def __init__(
        self, config: LlamaConfig, *, dtype: DTypeLike = "float32", rngs: nnx.Rngs
    ) -> None:
        """Makes a decoder with fresh weights; `models.load` makes one with a checkpoint's.

        Args:
          config: The sizes of the model.
          dtype: The dtype of weights and activations; norms, scores, softmax and rotary tables are
            computed in f32 always.
          rngs: The source of random weights.
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
