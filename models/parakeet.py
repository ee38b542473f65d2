"""Parakeet: a Fast Conformer on mel spectrograms, as in Hugging Face's modeling_parakeet.py.

In this file: the configuration of Hugging Face's files, the strided convolutions in front of the
encoder of `models.conformer`, and the CTC head. Source: Rekesh et al. 2023. Not here: the
spectrogram, transducer heads, decoding of the logits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Integer

from models import layers
from models.conformer import ConformerEncoder, ConformerOutput
from models.conformer_config import ConformerConfig, check_positive
from models.errors import ConfigError, InputError
from models.hf_config import ConfigFields
from models.wav2vec2_conformer import HUGGING_FACE_ACTIVATIONS

Mels = Float[Array | np.ndarray, "B frames mels"]
MelMask = Integer[Array | np.ndarray, "B frames"] | Bool[Array | np.ndarray, "B frames"]

CTC, ENCODER = "ParakeetForCTC", "ParakeetEncoder"
WITHOUT_EFFECT = """
    activation_dropout ctc_loss_reduction ctc_zero_infinity dropout dropout_positions layerdrop
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParakeetConfig(ConformerConfig):
    """Sizes and constants of a Conformer and of the strided convolutions in front of it.

    Attributes:
      num_mels: Bins of the spectrogram.
      num_convolutions: Strided convolutions over time and bins.
      num_channels: Channels of each.
      subsampling_kernel: Frames and bins that each sees at once.
      subsampling_stride: How far each moves.
      max_seq_len: The most frames after them.
      scale_input: Whether what they give is multiplied by the root of embed_dim.
      vocab_size: Entries of the CTC head; 0 for a model without one.
      blank_id: Which of them is CTC's blank.
    """

    num_mels: int
    num_convolutions: int
    num_channels: int
    subsampling_kernel: int
    subsampling_stride: int
    max_seq_len: int
    scale_input: bool
    vocab_size: int = 0
    blank_id: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError unless the sizes fit together."""
        ConformerConfig.__post_init__(self)
        names = ("num_mels", "num_convolutions", "num_channels", "max_seq_len")
        check_positive(self, *names, "subsampling_kernel", "subsampling_stride")
        factor = self.subsampling_stride**self.num_convolutions
        if count_frames(self, self.num_mels) * factor != self.num_mels:
            raise ConfigError(
                f"ParakeetConfig: num_mels is {self.num_mels}, of which the convolutions make"
                f" {count_frames(self, self.num_mels)}; a {factor}th of it is needed;"
                " choose a multiple"
            )
        if self.vocab_size:
            check_positive(self, "vocab_size")

    @classmethod
    def ctc_0_6b(cls) -> "ParakeetConfig":
        """Parakeet CTC 0.6B: 24 layers x 1024, 80 bins, 1025 entries."""
        return cls(
            num_layers=24,
            embed_dim=1024,
            mlp_dim=4096,
            num_heads=8,
            kernel_size=9,
            positions="relative",
            convolution_bias=True,
            masks_convolution=True,
            final_norm=False,
            num_mels=80,
            num_convolutions=3,
            num_channels=256,
            subsampling_kernel=3,
            subsampling_stride=2,
            max_seq_len=5000,
            scale_input=True,
            vocab_size=1025,
            blank_id=1024,
        )

    @classmethod
    def ctc_1_1b(cls) -> "ParakeetConfig":
        """Parakeet CTC 1.1B: 42 layers x 1024, 80 bins, 1025 entries."""
        return replace(cls.ctc_0_6b(), num_layers=42)

    @classmethod
    def from_hugging_face(
        cls, fields: Mapping[str, object], origin: str = "config.json"
    ) -> "ParakeetConfig":
        """Reads the fields of a config.json, of a CTC model or of an encoder alone.

        Args:
          fields: The parsed JSON object.
          origin: Where it came from, for messages.

        Returns:
          The configuration.

        Raises:
          ConfigError: A field is missing, malformed or asks for what is not supported.
        """
        reader = ConfigFields(fields, origin)
        if fields.get("model_type") == "parakeet_encoder":
            reader.architecture((ENCODER,), ENCODER)
            return _read(reader, vocab_size=0, blank_id=0)
        reader.architecture((CTC,), CTC)
        reader.ignore(*WITHOUT_EFFECT.split())
        encoder = reader.section("encoder_config")
        if encoder is None:
            raise reader.error("encoder_config", "missing", "an object is needed", "add it")
        vocabulary, blank = reader.count("vocab_size"), reader.index_or("pad_token_id", 1024)
        reader.warn_unknown()
        return _read(encoder, vocab_size=vocabulary, blank_id=blank)


def _read(reader: ConfigFields, *, vocab_size: int, blank_id: int) -> ParakeetConfig:
    reader.ignore(*WITHOUT_EFFECT.split())
    heads = reader.count("num_attention_heads")
    reader.exactly("num_key_value_heads", (None, heads), default=None)
    factor = reader.count("subsampling_factor")
    if factor < 2 or factor & (factor - 1):
        allowed = "a power of two above 1 is needed"
        raise reader.error("subsampling_factor", str(factor), allowed, "correct it")
    config = ParakeetConfig(
        num_layers=reader.count("num_hidden_layers"),
        embed_dim=reader.count("hidden_size"),
        mlp_dim=reader.count("intermediate_size"),
        num_heads=heads,
        kernel_size=reader.count("conv_kernel_size"),
        positions="relative",
        activation=reader.one_of("hidden_act", HUGGING_FACE_ACTIVATIONS),
        bias=reader.flag("attention_bias", default=True),
        convolution_bias=reader.flag("convolution_bias", default=True),
        masks_convolution=True,
        final_norm=False,
        num_mels=reader.count("num_mel_bins"),
        num_convolutions=factor.bit_length() - 1,
        num_channels=reader.count("subsampling_conv_channels"),
        subsampling_kernel=reader.count("subsampling_conv_kernel_size"),
        subsampling_stride=reader.count("subsampling_conv_stride"),
        max_seq_len=reader.count("max_position_embeddings"),
        scale_input=reader.flag("scale_input", default=True),
        vocab_size=vocab_size,
        blank_id=blank_id,
    )
    reader.warn_unknown()
    return config


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
        """Applies the convolution; zeros lie around."""
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
        """Makes hidden states of spectrograms; padding is zeros to every convolution but one."""
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
          config: Its sizes.
          dtype: Of weights and activations; norms, scores and softmax are computed in f32 always.
          rngs: Source of the weights.
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
          Hidden states and scores of every frame; those of padding, which `frame_mask` tells, mean
          nothing.

        Raises:
          InputError: A shape is wrong or there are too many frames.
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
    """Returns which frames the convolutions make of a row's own, given which those are.

    Args:
      config: Of the model.
      attention_mask: 1 for frames of the spectrogram, 0 for padding on the right.
      strides: After how many of the convolutions; None = all.
    """
    mask = jnp.asarray(attention_mask) != 0
    num_frames = count_frames(config, mask.shape[1], strides)
    lengths = count_frames(config, mask.astype(jnp.int32).sum(axis=1), strides)
    shape = (mask.shape[0], num_frames)
    indices = jnp.broadcast_to(jnp.arange(num_frames), shape)
    return indices < jnp.broadcast_to(lengths[:, None], shape)


def count_frames[N: (int, Array)](
    config: ParakeetConfig, length: N, strides: int | None = None
) -> N:
    """Returns how many frames, or bins, the convolutions make of so many; `strides` of them."""
    padding = (config.subsampling_kernel - 1) // 2 * 2
    for _ in range(config.num_convolutions if strides is None else strides):
        length = (length + padding - config.subsampling_kernel) // config.subsampling_stride + 1
    return length


def check_mels(
    config: ParakeetConfig, shape: tuple[int, ...], mask: tuple[int, ...] | None
) -> None:
    """Raises InputError unless the shapes of a call fit together and into the model."""
    if len(shape) != 3 or shape[2] != config.num_mels or not shape[1]:
        raise InputError(
            f"ParakeetModel(input_features): shape is {shape}; [batch, frames, {config.num_mels}]"
            " is needed; give at least one frame of so many bins"
        )
    if (frames := count_frames(config, shape[1])) > config.max_seq_len:
        raise InputError(
            f"ParakeetModel(input_features): {shape[1]} frames make {frames};"
            f" {config.max_seq_len} are possible; cut the audio"
        )
    if mask is not None and mask != shape[:2]:
        raise InputError(
            f"ParakeetModel(attention_mask): shape is {mask}; {shape[:2]} is needed; pad both alike"
        )
