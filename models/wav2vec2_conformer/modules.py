"""wav2vec2-conformer: a Conformer on raw audio, as in modeling_wav2vec2_conformer.py.

Convolutions over samples precede the encoder of `models.conformer`; a CTC head may follow it.
Not here: pretraining heads, adapters, decoding of the logits.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Integer

from models import layers
from models.conformer.convolution import BLOCK_NORM_EPS, activate
from models.conformer.modules import ConformerEncoder, ConformerOutput
from models.errors import InputError
from models.wav2vec2_conformer.config import (
    Wav2Vec2ConformerConfig,
    count_frames,
    least_samples,
)

Audio = Float[Array | np.ndarray, "B samples"]
AudioMask = Integer[Array | np.ndarray, "B samples"] | Bool[Array | np.ndarray, "B samples"]


class ChannelNorm(nnx.Module):
    """Normalises each channel of each row over time: GroupNorm with one channel a group."""

    def __init__(self, features: int, *, eps: float, dtype: DTypeLike) -> None:
        """Makes the fresh parameters."""
        self.scale = nnx.Param(jnp.ones(features, dtype))
        self.bias = nnx.Param(jnp.zeros(features, dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "B T C"]) -> Float[Array, "B T C"]:
        """Normalises in f32."""
        x = x.astype(jnp.float32)
        x = x - jnp.mean(x, axis=1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + self.eps)
        scale, bias = (part[...].astype(jnp.float32) for part in (self.scale, self.bias))
        return x * jnp.broadcast_to(scale, x.shape) + jnp.broadcast_to(bias, x.shape)


class AudioConvolution(nnx.Module):
    """A convolution over time without padding, an optional norm, and an activation."""

    def __init__(
        self, config: Wav2Vec2ConformerConfig, index: int, *, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        """Makes the fresh parameters."""
        inputs, outputs = (1, *config.conv_dims)[index], config.conv_dims[index]
        shape = (config.conv_kernels[index], inputs, outputs)
        init = nnx.initializers.normal(layers.INIT_STDDEV)
        self.kernel = nnx.Param(init(rngs.params(), shape, dtype))
        self.bias = nnx.Param(jnp.zeros(outputs, dtype)) if config.conv_bias else None
        self.norm = self._make_norm(config, index, dtype, rngs)
        self.stride, self.activation = config.conv_strides[index], config.conv_activation

    def _make_norm(
        self, config: Wav2Vec2ConformerConfig, index: int, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> nnx.LayerNorm | ChannelNorm | None:
        features = config.conv_dims[index]
        if config.conv_norm == "layer":
            return layers.layer_norm(features, BLOCK_NORM_EPS, dtype, rngs)
        return None if index else ChannelNorm(features, eps=BLOCK_NORM_EPS, dtype=dtype)

    def __call__(self, x: Float[Array, "B samples C"]) -> Float[Array, "B T D"]:
        """Applies the convolution."""
        y = jax.lax.conv_general_dilated(
            x,
            self.kernel[...],
            window_strides=(self.stride,),
            padding="VALID",
            dimension_numbers=("NWC", "WIO", "NWC"),
        )
        if self.bias is not None:
            y = y + jnp.broadcast_to(self.bias[...], y.shape)
        if self.norm is not None:
            y = self.norm(y)
        return activate(y, self.activation).astype(x.dtype)


class AudioProjection(nnx.Module):
    """A norm and a Linear from the convolutions' channels to the encoder's width."""

    def __init__(
        self, config: Wav2Vec2ConformerConfig, *, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        """Makes the fresh parameters."""
        channels = config.conv_dims[-1]
        self.norm = layers.layer_norm(channels, config.norm_eps, dtype, rngs)
        self.output = layers.linear(channels, config.embed_dim, dtype, rngs)

    def __call__(self, x: Float[Array, "B T C"]) -> Float[Array, "B T D"]:
        """Projects every frame by itself."""
        return self.output(self.norm(x).astype(x.dtype))


class Wav2Vec2ConformerModel(nnx.Module):
    """A Conformer on raw audio for inference, with a CTC head if it has one."""

    def __init__(
        self,
        config: Wav2Vec2ConformerConfig,
        *,
        dtype: DTypeLike = "float32",
        rngs: nnx.Rngs,
    ) -> None:
        """Makes a model with fresh weights; `models.load` makes one with a checkpoint's.

        Args:
          config: The sizes of the model.
          dtype: The dtype of weights and activations; norms, scores and softmax are
            computed in f32 always.
          rngs: The source of random weights.
        """
        self.config, self.dtype = config, jnp.dtype(dtype)
        indices = range(len(config.conv_dims))
        self.convolutions = nnx.List(
            [AudioConvolution(config, index, dtype=dtype, rngs=rngs) for index in indices]
        )
        self.projection = AudioProjection(config, dtype=dtype, rngs=rngs)
        self.encoder = ConformerEncoder(config, dtype=dtype, rngs=rngs)
        dim, vocabulary = config.embed_dim, config.vocab_size
        self.head = layers.linear(dim, vocabulary, dtype, rngs) if vocabulary else None

    def __call__(
        self, input_values: Audio, attention_mask: AudioMask | None = None
    ) -> ConformerOutput:
        """Encodes a batch of audio.

        Args:
          input_values: Samples, already normalised as preprocessor_config.json says.
          attention_mask: 1 for samples, 0 for padding, which must be on the right; None = all 1.

        Returns:
          Hidden states and scores of every frame; those of padding, which `frame_mask` marks, mean
          nothing.

        Raises:
          InputError: A shape is wrong or the audio is too short for a frame.
        """
        last = self.hidden_states(input_values, attention_mask)[-1]
        if self.head is None:
            return ConformerOutput(last_hidden_state=last, logits=None)
        with jax.named_scope("head"):
            return ConformerOutput(last_hidden_state=last, logits=self.head(last))

    def hidden_states(
        self, input_values: Audio, attention_mask: AudioMask | None = None
    ) -> list[Float[Array, "B T D"]]:
        """Returns the hidden states before the blocks, after each, and after the last norm."""
        mask_shape = None if attention_mask is None else tuple(attention_mask.shape)
        check_audio(self.config, tuple(input_values.shape), mask_shape)
        with jax.named_scope("features"):
            x = jnp.asarray(input_values).astype(self.dtype)
            x = x[:, :, None]
            for convolution in self.convolutions:
                x = convolution(x)
            x = self.projection(x)
        mask = None if attention_mask is None else frame_mask(self.config, attention_mask)
        return self.encoder.hidden_states(x, mask)


def frame_mask(
    config: Wav2Vec2ConformerConfig, attention_mask: AudioMask
) -> Bool[Array, "B frames"]:
    """Returns the mask of the frames whose samples all belong to a row's audio.

    Args:
      config: The configuration of the model.
      attention_mask: 1 for samples, 0 for padding on the right.
    """
    with jax.named_scope("frame_mask"):
        mask = jnp.asarray(attention_mask) != 0
        num_frames = count_frames(config, mask.shape[1])
        lengths = count_frames(config, mask.astype(jnp.int32).sum(axis=1))
        shape = (mask.shape[0], num_frames)
        indices = jnp.broadcast_to(jnp.arange(num_frames), shape)
        return indices < jnp.broadcast_to(lengths[:, None], shape)


def check_audio(
    config: Wav2Vec2ConformerConfig, shape: tuple[int, ...], mask: tuple[int, ...] | None
) -> None:
    """Raises InputError unless the shapes of a call fit together and give a frame."""
    if len(shape) != 2:
        raise InputError(
            f"Wav2Vec2ConformerModel(input_values): shape is {shape}; [batch, samples] is needed;"
            " give one channel of audio a row"
        )
    if count_frames(config, shape[1]) < 1:
        raise InputError(
            f"Wav2Vec2ConformerModel(input_values): {shape[1]} samples make no frame;"
            f" {least_samples(config)} or more are needed; pad the audio"
        )
    if mask is not None and mask != shape:
        raise InputError(
            f"Wav2Vec2ConformerModel(attention_mask): shape is {mask}; it must be that of"
            f" input_values, {shape}; pad both alike"
        )
