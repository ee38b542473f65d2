"""Conformer encoders: Gulati et al. 2020, with the details of modeling_wav2vec2_conformer.py.

The input is hidden states; the convolutions that compute them from raw audio are in
`models.wav2vec2_conformer`. Not here: dropout, causal convolutions, streaming.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Integer

from models import layers
from models.attention import Keys, attention
from models.conformer.config import ConformerConfig
from models.conformer.convolution import BLOCK_NORM_EPS, ConformerConvolution, without_padding
from models.conformer.positions import (
    relative_bias,
    relative_table,
    rotary_table,
    rotate,
    shift,
)
from models.errors import InputError
from models.kernels import PLAIN
from models.outputs import register_output
from pallas_kernels import attention as attention_kernel
from pallas_kernels.gemm import gemm

Mask = Integer[Array | np.ndarray, "B T"] | Bool[Array | np.ndarray, "B T"]


@register_output
@dataclass(frozen=True, slots=True, kw_only=True)
class ConformerOutput:
    """The output of a Conformer, under Hugging Face's names.

    Attributes:
      last_hidden_state: Hidden states after the last norm.
      logits: Scores of the vocabulary for CTC; None without such a head.
    """

    last_hidden_state: Float[Array, "B T D"]
    logits: Float[Array, "B T V"] | None


class ConformerMlp(nnx.Module):
    """Norm, two Linears with an activation between them, and the residual with a factor of 1/2."""

    def __init__(self, config: ConformerConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        self.norm = layers.layer_norm(config.embed_dim, BLOCK_NORM_EPS, dtype, rngs)
        dim, inner, bias = config.embed_dim, config.mlp_dim, config.bias
        self.up = layers.linear(dim, inner, dtype, rngs, use_bias=bias)
        self.down = layers.linear(inner, dim, dtype, rngs, use_bias=bias)
        self.activation = config.activation

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Transforms every frame by itself."""
        inner = self.up(self.norm(x), activation=self.activation)
        return self.down(inner, residual=x, scale=0.5)


class ConformerAttention(nnx.Module):
    """Norm, bidirectional multi-head attention with relative or rotary positions, and residual."""

    def __init__(self, config: ConformerConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        dim, heads = config.embed_dim, config.num_heads
        project = partial(layers.linear, dim, dim, dtype, rngs, use_bias=config.bias)
        self.norm = layers.layer_norm(dim, BLOCK_NORM_EPS, dtype, rngs)
        self.query = project()
        self.key = project()
        self.value = project()
        self.output = project()
        self.num_heads, self.positions, self.kernels = heads, config.positions, PLAIN
        if config.positions == "relative":
            self.position = project(use_bias=False)
            self.content_bias = nnx.Param(jnp.zeros((heads, dim // heads), dtype))
            self.position_bias = nnx.Param(jnp.zeros((heads, dim // heads), dtype))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        table: Float[Array, "..."],
        keys: Keys,
    ) -> Float[Array, "B T D"]:
        """Attends over all frames but padding."""
        with jax.named_scope("attention"):
            inner = self.norm(x)
            rotary = self.positions == "rotary"
            turned = rotate(inner, table, self.num_heads) if rotary else inner
            key, value = self._heads(self.key(turned)), self._heads(self.value(inner))
            if rotary:
                context = attention(self._heads(self.query(turned)), key, value, keys)
            elif keys.by == "xla":
                context = self._relative_attention(inner, key, value, table, keys.bias)
            else:
                context = self._attend_by_kernel(inner, key, value, table, keys)
            return self.output(context.reshape(x.shape), residual=x)

    def _relative_attention(
        self,
        inner: Float[Array, "B T D"],
        key: Float[Array, "B T N H"],
        value: Float[Array, "B T N H"],
        table: Float[Array, "R D"],
        bias: Float[Array, "B 1 1 T"] | None,
    ) -> Float[Array, "B T N H"]:
        scores = self._relative_scores(self._heads(self.query(inner)), key, table)
        scores = scores * (key.shape[-1] ** -0.5)
        if bias is not None:
            scores = scores + bias
        weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
        return jnp.einsum("BNTS,BSNH->BTNH", weights, value)

    def _attend_by_kernel(
        self,
        inner: Float[Array, "B T D"],
        key: Float[Array, "B T N H"],
        value: Float[Array, "B T N H"],
        table: Float[Array, "R D"],
        keys: Keys,
    ) -> Float[Array, "B T N H"]:
        """Attends by the kernel with scores by difference, or by cuDNN with a bias."""
        heads, size = self.content_bias.shape
        content = self.content_bias[...].reshape(-1)
        if self.query.bias is not None:
            content = content + self.query.bias[...]
        by = None if self.kernels.gemm == "pallas" else "xla"
        kernel = self.query.kernel[...]
        query = self._heads(gemm(inner, kernel, bias=content, implementation=by))
        rows = self.position(table.astype(inner.dtype)).reshape(-1, heads, size)
        # The query holds the content bias already, so that it is subtracted here.
        biases = (self.position_bias, self.content_bias)
        position, content = (bias[...].astype(jnp.float32) for bias in biases)
        rest = position - content
        if keys.by == "pallas":
            return attention_kernel.attention(
                query,
                key,
                value,
                lengths=keys.lengths,
                relative_rows=rows,
                relative_shift=rest,
            )
        bias = relative_bias(query, rows, rest.astype(query.dtype)) * size**-0.5
        return attention(query, key, value, keys, bias)

    def _relative_scores(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B T N H"],
        table: Float[Array, "R D"],
    ) -> Float[Array, "B N T T"]:
        content = query + jnp.broadcast_to(self.content_bias[...], query.shape)
        position = query + jnp.broadcast_to(self.position_bias[...], query.shape)
        rows = self.position(table.astype(query.dtype)).reshape(-1, *query.shape[2:])
        by_difference = jnp.einsum(
            "BTNH,RNH->BNTR", position, rows, preferred_element_type=jnp.float32
        )
        return dot(content, key) + shift(by_difference)

    def _heads(self, x: Float[Array, "B T D"]) -> Float[Array, "B T N H"]:
        return x.reshape(*x.shape[:2], self.num_heads, -1)


class ConformerLayer(nnx.Module):
    """One block: half an MLP, attention, convolution, half an MLP, norm."""

    def __init__(self, config: ConformerConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        self.mlp_before = ConformerMlp(config, dtype=dtype, rngs=rngs)
        self.attention = ConformerAttention(config, dtype=dtype, rngs=rngs)
        self.convolution = ConformerConvolution(config, dtype=dtype, rngs=rngs)
        self.mlp_after = ConformerMlp(config, dtype=dtype, rngs=rngs)
        self.norm = layers.layer_norm(config.embed_dim, BLOCK_NORM_EPS, dtype, rngs)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        table: Float[Array, "..."],
        mask: Bool[Array, "B T"] | None,
        keys: Keys,
    ) -> Float[Array, "B T D"]:
        """Applies the block."""
        with jax.named_scope("mlp_before"):
            x = self.mlp_before(x)
        x = self.convolution(self.attention(x, table, keys), mask)
        with jax.named_scope("mlp_after"):
            return self.norm(self.mlp_after(x))


class ConformerEncoder(nnx.Module):
    """Conformer blocks and an optional norm, for inference."""

    def __init__(
        self, config: ConformerConfig, *, dtype: DTypeLike = "float32", rngs: nnx.Rngs
    ) -> None:
        """Makes an encoder with fresh weights.

        Args:
          config: The sizes of the model.
          dtype: The dtype of weights and activations; norms, scores and softmax are
            computed in f32 always.
          rngs: The source of random weights.
        """
        self.config, self.dtype = config, jnp.dtype(dtype)
        blocks = [ConformerLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)]
        self.layers = nnx.List(blocks)
        dim, eps = config.embed_dim, config.norm_eps
        self.norm = layers.layer_norm(dim, eps, dtype, rngs) if config.final_norm else None
        self.kernels = PLAIN

    def __call__(
        self, hidden_states: Float[Array | np.ndarray, "B T D"], attention_mask: Mask | None = None
    ) -> ConformerOutput:
        """Encodes a batch of sequences of frames.

        Args:
          hidden_states: The frames.
          attention_mask: 1 for frames, 0 for padding on the right (its outputs mean nothing, and
            it is zeroed before the first block); None = all 1.

        Returns:
          Hidden states after the last norm.

        Raises:
          InputError: A shape is wrong.
        """
        last = self.hidden_states(hidden_states, attention_mask)[-1]
        return ConformerOutput(last_hidden_state=last, logits=None)

    def hidden_states(
        self, hidden_states: Float[Array | np.ndarray, "B T D"], attention_mask: Mask | None = None
    ) -> list[Float[Array, "B T D"]]:
        """Returns the hidden states before the blocks, after each, and after a final norm."""
        mask_shape = None if attention_mask is None else tuple(attention_mask.shape)
        check_frames(self.config, tuple(hidden_states.shape), mask_shape)
        x, mask = jnp.asarray(hidden_states).astype(self.dtype), None
        keys = Keys(by=self.kernels.attention)
        if attention_mask is not None:
            with jax.named_scope("mask"):
                mask = jnp.asarray(attention_mask) != 0
                bias = jnp.where(mask, 0.0, jnp.finfo(jnp.float32).min)[:, None, None, :]
                lengths = mask.astype(jnp.int32).sum(axis=1)
                keys = Keys(by=keys.by, bias=bias, lengths=lengths)
                x = without_padding(x, mask)
        with jax.named_scope("positions"):
            table = self._positions(x.shape[1])
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1], table, mask, keys))
        if self.norm is None:
            return states
        with jax.named_scope("norm"):
            return [*states, self.norm(states[-1])]

    def _positions(self, length: int) -> Float[Array, "..."]:
        config = self.config
        if config.positions == "relative":
            # Kernels would copy an odd number of rows, so they get one more, which no query meets.
            spare = 0 if self.kernels.attention == "xla" else 1
            return relative_table(length, config.embed_dim, spare=spare)
        return rotary_table(length, config.embed_dim // config.num_heads, config.rotary_base)


def dot(query: Float[Array, "B T N H"], key: Float[Array, "B S N H"]) -> Float[Array, "B N T S"]:
    """Returns the product of every query and key, in f32."""
    return jnp.einsum("BTNH,BSNH->BNTS", query, key, preferred_element_type=jnp.float32)


def check_frames(
    config: ConformerConfig, frames: tuple[int, ...], mask: tuple[int, ...] | None
) -> None:
    """Raises InputError unless the shapes of a call fit together and into the encoder."""
    if len(frames) != 3 or frames[2] != config.embed_dim or not frames[1]:
        raise InputError(
            f"ConformerEncoder(hidden_states): shape is {frames};"
            f" [batch, frames, {config.embed_dim}] is needed; give at least one frame of that width"
        )
    if mask is not None and mask != frames[:2]:
        raise InputError(
            f"ConformerEncoder(attention_mask): shape is {mask}; {frames[:2]} is needed;"
            " pad both alike"
        )
