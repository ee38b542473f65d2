"""Parakeet: a Fast Conformer on mel spectrograms, as in Hugging Face's modeling_parakeet.py.

Strided convolutions precede the encoder of `models.conformer`; a CTC head may follow it.
Source: Rekesh et al. 2023. Not here: the spectrogram, transducer heads, decoding of the logits.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Integer

from models import layers
from models.conformer.modules import ConformerEncoder, ConformerOutput
from models.errors import InputError
from models.parakeet.config import ParakeetConfig, count_frames

Mels = Float[Array | np.ndarray, "B frames mels"]
MelMask = Integer[Array | np.ndarray, "B frames"] | Bool[Array | np.ndarray, "B frames"]


class StridedConvolution(nnx.Module):
    """A convolution over frames and bins, dense on one channel or depthwise on many."""

    def __init__(self, config: ParakeetConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        width, channels = config.subsampling_kernel, config.num_channels
        init = nnx.initializers.normal(layers.INIT_STDDEV)
        self.kernel = nnx.Param(init(rngs.params(), (width, width, 1, channels), dtype))
        self.bias = nnx.Param(jnp.zeros(channels, dtype))
        self.stride = config.subsampling_stride

    def __call__(self, x: Float[Array, "B frames mels C"]) -> Float[Array, "B T F D"]:
        """Applies the convolution with padding by zeros."""
        kernel = self.kernel[...]
        side = (kernel.shape[0] - 1) // 2
        y = jax.lax.conv_general_dilated(
            x,
            kernel,
            window_strides=(self.stride, self.stride),
            padding=[(side, side)] * 2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=x.shape[3],
        )
        return y + jnp.broadcast_to(self.bias[...], y.shape)


class ParakeetSubsampling(nnx.Module):
    """Strided convolutions with ReLU, and a Linear on all channels and bins of a frame."""

    def __init__(self, config: ParakeetConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the fresh parameters."""
        count, channels = config.num_convolutions, config.num_channels
        strided = [StridedConvolution(config, dtype=dtype, rngs=rngs) for _ in range(count)]
        mixing = [layers.linear(channels, channels, dtype, rngs) for _ in range(count - 1)]
        self.strided, self.pointwise = nnx.List(strided), nnx.List(mixing)
        features = channels * count_frames(config, config.num_mels)
        self.output = layers.linear(features, config.embed_dim, dtype, rngs)
        self.config = config

    def __call__(
        self, x: Float[Array, "B frames mels"], mask: Bool[Array, "B frames"] | None
    ) -> Float[Array, "B T D"]:
        """Turns spectrograms into hidden states; padding is zeroed after every convolution."""
        x = self.strided[0](x[..., None])
        x = jax.nn.relu(self._masked(x, mask, 1))
        steps = zip(self.strided[1:], self.pointwise, strict=True)
        for index, (strided, pointwise) in enumerate(steps, start=2):
            x = self._masked(strided(x), mask, index)
            x = jax.nn.relu(self._masked(pointwise(x), mask, index))
        return self.output(x.transpose(0, 1, 3, 2).reshape(*x.shape[:2], -1))

    def _masked(
        self, x: Float[Array, "B T F C"], mask: Bool[Array, "B frames"] | None, strides: int
    ) -> Float[Array, "B T F C"]:
        if mask is None:
            return x
        kept = frame_mask(self.config, mask, strides)[:, :, None, None]
        return jnp.where(jnp.broadcast_to(kept, x.shape), x, jnp.zeros_like(x))


class ParakeetModel(nnx.Module):
    """A Conformer on mel spectrograms for inference, with a CTC head if it has one."""

    def __init__(
        self, config: ParakeetConfig, *, dtype: DTypeLike = "float32", rngs: nnx.Rngs
    ) -> None:
        """Makes a model with fresh weights; `models.load` makes one with a checkpoint's.

        Args:
          config: The sizes of the model.
          dtype: The dtype of weights and activations; norms, scores and softmax are
            computed in f32 always.
          rngs: The source of random weights.
        """
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.subsampling = ParakeetSubsampling(config, dtype=dtype, rngs=rngs)
        self.encoder = ConformerEncoder(config, dtype=dtype, rngs=rngs)
        dim, vocabulary = config.embed_dim, config.vocab_size
        self.head = layers.linear(dim, vocabulary, dtype, rngs) if vocabulary else None

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
          InputError: A shape is wrong.
        """
        last = self.hidden_states(input_features, attention_mask)[-1]
        if self.head is None:
            return ConformerOutput(last_hidden_state=last, logits=None)
        with jax.named_scope("head"):
            return ConformerOutput(last_hidden_state=last, logits=self.head(last))

    def hidden_states(
        self, input_features: Mels, attention_mask: MelMask | None = None
    ) -> list[Float[Array, "B T D"]]:
        """Returns the hidden states before the blocks and after each."""
        mask_shape = None if attention_mask is None else tuple(attention_mask.shape)
        check_mels(self.config, tuple(input_features.shape), mask_shape)
        with jax.named_scope("subsampling"):
            mask = None if attention_mask is None else jnp.asarray(attention_mask) != 0
            x = self.subsampling(jnp.asarray(input_features).astype(self.dtype), mask)
            if self.config.scale_input:
                x = x * self.config.embed_dim**0.5
            mask = None if mask is None else frame_mask(self.config, mask)
        return self.encoder.hidden_states(x, mask)


def frame_mask(
    config: ParakeetConfig, attention_mask: MelMask, strides: int | None = None
) -> Bool[Array, "B T"]:
    """Returns the mask of the frames that the convolutions compute from a row's own frames.

    Args:
      config: The configuration of the model.
      attention_mask: 1 for frames of the spectrogram, 0 for padding on the right.
      strides: The number of convolutions applied; None = all.
    """
    mask = jnp.asarray(attention_mask) != 0
    num_frames = count_frames(config, mask.shape[1], strides)
    lengths = count_frames(config, mask.astype(jnp.int32).sum(axis=1), strides)
    shape = (mask.shape[0], num_frames)
    indices = jnp.broadcast_to(jnp.arange(num_frames), shape)
    return indices < jnp.broadcast_to(lengths[:, None], shape)


def check_mels(
    config: ParakeetConfig, shape: tuple[int, ...], mask: tuple[int, ...] | None
) -> None:
    """Raises InputError unless the shapes of a call fit together and into the model."""
    if len(shape) != 3 or shape[2] != config.num_mels or not shape[1]:
        raise InputError(
            f"ParakeetModel(input_features): shape is {shape}; [batch, frames, {config.num_mels}]"
            f" is needed; give at least one frame of {config.num_mels} bins"
        )
    if mask is not None and mask != shape[:2]:
        raise InputError(
            f"ParakeetModel(attention_mask): shape is {mask}; {shape[:2]} is needed; pad both alike"
        )
