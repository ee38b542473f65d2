"""Conformer encoders: Gulati et al. 2020, with the details of modeling_wav2vec2_conformer.py.

In this file: modules from hidden states on, for inference; `models.conformer_config` has the
configuration. The convolutions that make hidden states of raw audio are in
`models.wav2vec2_conformer`, the names of the files in `models.conformer_checkpoint`. Not here:
dropout, causal convolutions, streaming.
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
from models.conformer_config import ConformerConfig
from models.conformer_positions import (
    relative_bias,
    relative_table,
    rotary_table,
    rotate,
    shift,
)
from models.depthwise import depthwise_products
from models.errors import InputError
from models.kernels import PLAIN
from models.layers import ACTIVATIONS, Activation
from models.outputs import register_output
from pallas_kernels.gemm import gated_gemm, gemm

Mask = Integer[Array | np.ndarray, "B T"] | Bool[Array | np.ndarray, "B T"]

# Of every norm inside a block, whatever the configuration says of the others.
BLOCK_NORM_EPS = 1e-5


@register_output
@dataclass(frozen=True, slots=True, kw_only=True)
class ConformerOutput:
    """What a Conformer returns, under Hugging Face's names.

    Attributes:
      last_hidden_state: Hidden states after the last norm.
      logits: Scores of the vocabulary for CTC; None without such a head.
    """

    last_hidden_state: Float[Array, "B T D"]
    logits: Float[Array, "B T V"] | None


class ConformerMlp(nnx.Module):
    """Norm, two Linears with an activation between them, and half of it onto the residual."""

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
    """Norm, bidirectional multi-head attention that knows positions, and residual."""

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
        """Attends over all frames that count."""
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
                query, bias = self._relative_query(inner, table)
                context = attention(query, key, value, keys, bias)
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

    def _relative_query(
        self, inner: Float[Array, "B T D"], table: Float[Array, "R D"]
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T T"]]:
        """Returns queries with the content bias, and what positions add to the scaled scores."""
        heads, size = self.content_bias.shape
        content = self.content_bias[...].reshape(-1)
        if self.query.bias is not None:
            content = content + self.query.bias[...]
        query = self._heads(gemm(inner, self.query.kernel[...], bias=content))
        rows = self.position(table.astype(inner.dtype)).reshape(-1, heads, size)
        # The position bias, less the content bias that the query already has.
        rest = self.position_bias[...] - self.content_bias[...]
        return query, relative_bias(query, rows, rest) * size**-0.5

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


class BatchNorm(nnx.Module):
    """BatchNorm with fixed statistics: y = (x - mean) / sqrt(var + eps) * scale + bias."""

    def __init__(self, features: int, *, eps: float, dtype: DTypeLike) -> None:
        """Makes the fresh parameters and statistics."""
        self.scale = nnx.Param(jnp.ones(features, dtype))
        self.bias = nnx.Param(jnp.zeros(features, dtype))
        self.mean = nnx.BatchStat(jnp.zeros(features, dtype))
        self.var = nnx.BatchStat(jnp.ones(features, dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Normalises every feature by itself, in f32."""
        parts = (self.scale, self.bias, self.mean, self.var)
        scale, bias, mean, var = (part[...].astype(jnp.float32) for part in parts)
        factor = scale * jax.lax.rsqrt(var + self.eps)
        offset = bias - mean * factor
        x = x.astype(jnp.float32)
        return x * jnp.broadcast_to(factor, x.shape) + jnp.broadcast_to(offset, x.shape)


class ConformerConvolution(nnx.Module):
    """Norm, gated Linear, depthwise convolution over time, BatchNorm, Linear, and residual."""

    def __init__(self, config: ConformerConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        dim, bias = config.embed_dim, config.convolution_bias
        init = nnx.initializers.normal(layers.INIT_STDDEV)
        self.norm = layers.layer_norm(dim, BLOCK_NORM_EPS, dtype, rngs)
        self.gated = layers.linear(dim, 2 * dim, dtype, rngs, use_bias=bias)
        self.parts: nnx.List[layers.Linear] | None = nnx.data(None)
        self.depthwise = nnx.Param(init(rngs.params(), (config.kernel_size, 1, dim), dtype))
        self.depthwise_bias = nnx.Param(jnp.zeros(dim, dtype)) if bias else None
        self.batch_norm = BatchNorm(dim, eps=BLOCK_NORM_EPS, dtype=dtype)
        self.output = layers.linear(dim, dim, dtype, rngs, use_bias=bias)
        self.activation, self.masks = config.activation, config.masks_convolution
        self.kernels = PLAIN

    def arrange_weights(self) -> None:
        """Holds the weights of value and gate apart, if no bias is in the way of one kernel."""
        if self.gated.bias is None:
            dim = self.gated.in_features
            columns = (slice(0, dim), slice(dim, 2 * dim))
            self.parts = nnx.List([layers.part_of(self.gated, part) for part in columns])
            del self.gated

    def __call__(
        self, x: Float[Array, "B T D"], mask: Bool[Array, "B T"] | None
    ) -> Float[Array, "B T D"]:
        """Mixes neighbouring frames."""
        with jax.named_scope("convolution"):
            inner = self._gate(self.norm(x))
            if self.masks and mask is not None:
                inner = without_padding(inner, mask)
            products = self.kernels.gemm == "pallas"
            convolve = depthwise_products if products else depthwise_convolution
            inner = convolve(inner, self.depthwise[...])
            if self.depthwise_bias is not None:
                inner = inner + jnp.broadcast_to(self.depthwise_bias[...], inner.shape)
            inner = self.batch_norm(inner)
            inner = activate(inner, self.activation).astype(x.dtype)
            return self.output(inner, residual=x)

    def _gate(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        if self.parts is not None:
            value, gate = (part.kernel[...] for part in self.parts)
            return gated_gemm(x, gate, value, activation="sigmoid")
        inner, gate = jnp.split(self.gated(x), 2, axis=-1)
        return inner * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(x.dtype)


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
    """Conformer blocks, and a norm if there is one, for inference."""

    def __init__(
        self, config: ConformerConfig, *, dtype: DTypeLike = "float32", rngs: nnx.Rngs
    ) -> None:
        """Makes an encoder with fresh weights.

        Args:
          config: Its sizes.
          dtype: Of weights and activations; norms, scores and softmax are computed in f32 always.
          rngs: Source of the weights.
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
            to the first block it is zeros); None = all 1.

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
            return relative_table(length, config.embed_dim)
        return rotary_table(length, config.embed_dim // config.num_heads, config.rotary_base)


def dot(query: Float[Array, "B T N H"], key: Float[Array, "B S N H"]) -> Float[Array, "B N T S"]:
    """Returns the product of every query and key, in f32."""
    return jnp.einsum("BTNH,BSNH->BNTS", query, key, preferred_element_type=jnp.float32)


def without_padding(x: Float[Array, "B T D"], mask: Bool[Array, "B T"]) -> Float[Array, "B T D"]:
    """Returns zeros at padding, whatever is there."""
    return jnp.where(jnp.broadcast_to(mask[:, :, None], x.shape), x, jnp.zeros_like(x))


def depthwise_convolution(
    x: Float[Array, "B T D"], kernel: Float[Array, "width 1 D"]
) -> Float[Array, "B T D"]:
    """Convolves every feature with its own kernel over time; zeros lie before and after.

    A kernel without a middle sees one frame more after its own than before it.
    """
    others = kernel.shape[0] - 1
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(1,),
        padding=[(others // 2, others - others // 2)],
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=kernel.shape[2],
    )


def activate(x: Float[Array, "*B F"], activation: Activation) -> Float[Array, "*B F"]:
    """Applies an activation in f32, as torch does it for 16-bit values, and casts back."""
    return ACTIVATIONS[activation](x.astype(jnp.float32)).astype(x.dtype)


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
