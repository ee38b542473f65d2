"""LASR: a Conformer with rotary positions on mel spectrograms, as in modeling_lasr.py.

It differs from `models.conformer` in weighted residuals, norms without bias, an even convolution,
and a rotation that acts on queries and keys. Not here: the spectrogram,
decoding of the logits.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Integer

from models import layers
from models.attention import Keys, attention
from models.conformer.convolution import (
    BLOCK_NORM_EPS,
    BatchNorm,
    activate,
    depthwise_convolution,
    without_padding,
)
from models.conformer.modules import ConformerOutput
from models.errors import InputError
from models.kernels import PLAIN
from models.lasr.config import LasrConfig, count_frames, least_frames
from models.rotary import Rotary, RotaryTable, rotary_frequencies, rotary_table

Mels = Float[Array | np.ndarray, "B frames mels"]
MelMask = Integer[Array | np.ndarray, "B frames"] | Bool[Array | np.ndarray, "B frames"]


class StridedConvolution(nnx.Module):
    """A convolution over time with a stride and without padding, and ReLU."""

    def __init__(
        self, inputs: int, outputs: int, config: LasrConfig, *, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        """Makes the fresh parameters."""
        shape = (config.subsampling_kernel, inputs, outputs)
        init = nnx.initializers.normal(layers.INIT_STDDEV)
        self.kernel = nnx.Param(init(rngs.params(), shape, dtype))
        self.bias = nnx.Param(jnp.zeros(outputs, dtype))
        self.stride = config.subsampling_stride

    def __call__(self, x: Float[Array, "B frames C"]) -> Float[Array, "B T D"]:
        """Applies the convolution and the ReLU."""
        numbers = ("NWC", "WIO", "NWC")
        y = jax.lax.conv_general_dilated(
            x, self.kernel[...], (self.stride,), "VALID", dimension_numbers=numbers
        )
        return jax.nn.relu(y + jnp.broadcast_to(self.bias[...], y.shape))


class LasrSubsampling(nnx.Module):
    """A Linear on every frame, two strided convolutions, a Linear; ReLU after all but the last."""

    def __init__(self, config: LasrConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        dim, channels = config.embed_dim, config.num_channels
        self.input = layers.linear(config.num_mels, dim, dtype, rngs)
        strided = partial(StridedConvolution, config=config, dtype=dtype, rngs=rngs)
        self.strided = nnx.List([strided(dim, dim), strided(dim, channels)])
        self.output = layers.linear(channels, dim, dtype, rngs)

    def __call__(self, x: Float[Array, "B frames mels"]) -> Float[Array, "B T D"]:
        """Makes hidden states of spectrograms."""
        x = jax.nn.relu(self.input(x))
        for strided in self.strided:
            x = strided(x)
        return self.output(x)


class LasrMlp(nnx.Module):
    """Norm, two Linears with an activation between them, and the weighted residual."""

    def __init__(self, config: LasrConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        dim, inner, bias = config.embed_dim, config.mlp_dim, config.bias
        self.norm = _norm(config, dtype, rngs)
        self.up = layers.linear(dim, inner, dtype, rngs, use_bias=bias)
        self.down = layers.linear(inner, dim, dtype, rngs, use_bias=bias)
        self.activation, self.residual = config.activation, config.mlp_residual

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Transforms every frame by itself."""
        kept, added = self.residual
        inner = self.up(self.norm(x), activation=self.activation)
        return self.down(inner, residual=kept * x, scale=added)


class LasrAttention(nnx.Module):
    """Norm, bidirectional multi-head attention with rotated queries and keys, and residual."""

    def __init__(self, config: LasrConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        dim = config.embed_dim
        project = partial(layers.linear, dim, dim, dtype, rngs, use_bias=config.bias)
        self.norm = _norm(config, dtype, rngs)
        self.query, self.key, self.value, self.output = (project() for _ in range(4))
        self.num_heads = config.num_heads

    def __call__(
        self, x: Float[Array, "B T D"], table: RotaryTable, keys: Keys
    ) -> Float[Array, "B T D"]:
        """Attends over all frames but padding."""
        with jax.named_scope("attention"):
            inner = self.norm(x)
            heads = (*x.shape[:2], self.num_heads, -1)
            query, key, value = (
                project(inner).reshape(heads) for project in (self.query, self.key, self.value)
            )
            context = attention(table.rotate(query), table.rotate(key), value, keys)
            return self.output(context.reshape(x.shape), residual=x)


class LasrConvolution(nnx.Module):
    """Norm, gated Linear, depthwise convolution over time, BatchNorm, Linear, weighted residual."""

    def __init__(self, config: LasrConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        dim, bias = config.embed_dim, config.convolution_bias
        init = nnx.initializers.normal(layers.INIT_STDDEV)
        self.norm = _norm(config, dtype, rngs)
        self.gated = layers.linear(dim, 2 * dim, dtype, rngs, use_bias=bias)
        self.depthwise = nnx.Param(init(rngs.params(), (config.kernel_size, 1, dim), dtype))
        self.depthwise_bias = nnx.Param(jnp.zeros(dim, dtype)) if bias else None
        self.batch_norm = BatchNorm(dim, eps=BLOCK_NORM_EPS, dtype=dtype)
        self.output = layers.linear(dim, dim, dtype, rngs, use_bias=bias)
        self.activation, self.residual = config.activation, config.convolution_residual

    def __call__(
        self, x: Float[Array, "B T D"], mask: Bool[Array, "B T"] | None
    ) -> Float[Array, "B T D"]:
        """Mixes neighbouring frames; padding counts as zeros."""
        with jax.named_scope("convolution"):
            kept, added = self.residual
            inner, gate = jnp.split(self.gated(self.norm(x)), 2, axis=-1)
            inner = inner * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(x.dtype)
            if mask is not None:
                inner = without_padding(inner, mask)
            inner = depthwise_convolution(inner, self.depthwise[...])
            if self.depthwise_bias is not None:
                inner = inner + jnp.broadcast_to(self.depthwise_bias[...], inner.shape)
            inner = activate(self.batch_norm(inner), self.activation).astype(x.dtype)
            return self.output(inner, residual=kept * x, scale=added)


class LasrLayer(nnx.Module):
    """One block: MLP, attention, convolution, MLP, norm."""

    def __init__(self, config: LasrConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        self.mlp_before = LasrMlp(config, dtype=dtype, rngs=rngs)
        self.attention = LasrAttention(config, dtype=dtype, rngs=rngs)
        self.convolution = LasrConvolution(config, dtype=dtype, rngs=rngs)
        self.mlp_after = LasrMlp(config, dtype=dtype, rngs=rngs)
        self.norm = _norm(config, dtype, rngs)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        table: RotaryTable,
        mask: Bool[Array, "B T"] | None,
        keys: Keys,
    ) -> Float[Array, "B T D"]:
        """Applies the block."""
        with jax.named_scope("mlp_before"):
            x = self.mlp_before(x)
        x = self.convolution(self.attention(x, table, keys), mask)
        with jax.named_scope("mlp_after"):
            return self.norm(self.mlp_after(x))


class LasrModel(nnx.Module):
    """A LASR encoder for inference, with a CTC head if it has one."""

    def __init__(self, config: LasrConfig, *, dtype: DTypeLike = "float32", rngs: nnx.Rngs) -> None:
        """Makes a model with fresh weights; `models.load` makes one with a checkpoint's.

        Args:
          config: The sizes of the model.
          dtype: The dtype of weights and activations; norms, scores and softmax are
            computed in f32 always.
          rngs: The source of random weights.
        """
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.subsampling = LasrSubsampling(config, dtype=dtype, rngs=rngs)
        blocks = [LasrLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)]
        self.layers = nnx.List(blocks)
        self.norm = _norm(config, dtype, rngs)
        dim, vocabulary = config.embed_dim, config.vocab_size
        self.head = layers.linear(dim, vocabulary, dtype, rngs) if vocabulary else None
        self.kernels = PLAIN

    def __call__(
        self, input_features: Mels, attention_mask: MelMask | None = None
    ) -> ConformerOutput:
        """Encodes a batch of spectrograms.

        Args:
          input_features: Spectrograms, already normalised as preprocessor_config.json says.
          attention_mask: 1 for frames, 0 for padding, which must be on the right; None = all 1.

        Returns:
          Hidden states and scores of every frame; those of padding, which `frame_mask` marks, mean
          nothing.

        Raises:
          InputError: A shape is wrong or there are too few frames.
        """
        last = self.hidden_states(input_features, attention_mask)[-1]
        if self.head is None:
            return ConformerOutput(last_hidden_state=last, logits=None)
        with jax.named_scope("head"):
            return ConformerOutput(last_hidden_state=last, logits=self.head(last))

    def hidden_states(
        self, input_features: Mels, attention_mask: MelMask | None = None
    ) -> list[Float[Array, "B T D"]]:
        """Returns the hidden states before the blocks, after each, and after the last norm."""
        mask_shape = None if attention_mask is None else tuple(attention_mask.shape)
        check_mels(self.config, tuple(input_features.shape), mask_shape)
        with jax.named_scope("subsampling"):
            x = self.subsampling(jnp.asarray(input_features).astype(self.dtype))
        mask, keys = None, Keys(by=self.kernels.attention)
        if attention_mask is not None:
            with jax.named_scope("mask"):
                mask = frame_mask(self.config, attention_mask)
                bias = jnp.where(mask, 0.0, jnp.finfo(jnp.float32).min)[:, None, None, :]
                lengths = mask.astype(jnp.int32).sum(axis=1)
                keys = Keys(by=keys.by, bias=bias, lengths=lengths)
        rotary = Rotary(theta=self.config.rotary_base)
        frequencies = rotary_frequencies(rotary, self.config.embed_dim // self.config.num_heads)
        table = rotary_table(frequencies, x.shape[1], None)
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1], table, mask, keys))
        with jax.named_scope("norm"):
            return [*states, self.norm(states[-1])]


def frame_mask(config: LasrConfig, attention_mask: MelMask) -> Bool[Array, "B T"]:
    """Returns the mask of the frames that the convolutions compute from a row's own frames alone.

    Args:
      config: The configuration of the model.
      attention_mask: 1 for frames of the spectrogram, 0 for padding on the right.
    """
    mask = jnp.asarray(attention_mask) != 0
    num_frames = count_frames(config, mask.shape[1])
    lengths = count_frames(config, mask.astype(jnp.int32).sum(axis=1))
    shape = (mask.shape[0], num_frames)
    indices = jnp.broadcast_to(jnp.arange(num_frames), shape)
    return indices < jnp.broadcast_to(lengths[:, None], shape)


def check_mels(config: LasrConfig, shape: tuple[int, ...], mask: tuple[int, ...] | None) -> None:
    """Raises InputError unless the shapes of a call fit together and into the model."""
    if len(shape) != 3 or shape[2] != config.num_mels:
        raise InputError(
            f"LasrModel(input_features): shape is {shape}; [batch, frames, {config.num_mels}] is"
            f" needed; give frames of {config.num_mels} bins"
        )
    if shape[1] < (least := least_frames(config)):
        raise InputError(
            f"LasrModel(input_features): {shape[1]} frames; the first output needs {least};"
            " pad the audio"
        )
    if mask is not None and mask != shape[:2]:
        raise InputError(
            f"LasrModel(attention_mask): shape is {mask}; {shape[:2]} is needed; pad both alike"
        )


def _norm(config: LasrConfig, dtype: DTypeLike, rngs: nnx.Rngs) -> layers.LayerNorm:
    return layers.LayerNorm(
        config.embed_dim,
        epsilon=config.norm_eps,
        use_bias=False,
        dtype=jnp.float32,
        param_dtype=dtype,
        use_fast_variance=False,
        rngs=rngs,
    )
