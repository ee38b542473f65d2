"""wav2vec2-conformer: a Conformer on raw audio, as in modeling_wav2vec2_conformer.py.

In this file: the configuration of Hugging Face's files, the convolutions in front of the encoder of
`models.conformer`, and the CTC head. Not here: pretraining heads, adapters, decoding of the logits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Integer

from models import layers
from models.conformer import ConformerEncoder, ConformerOutput
from models.conformer_config import ConformerConfig, check_choice, check_positive
from models.conformer_convolution import BLOCK_NORM_EPS, activate
from models.errors import ConfigError, InputError
from models.hf_config import ConfigFields
from models.layers import ACTIVATIONS, Activation

Audio = Float[Array | np.ndarray, "B samples"]
AudioMask = Integer[Array | np.ndarray, "B samples"] | Bool[Array | np.ndarray, "B samples"]

HUGGING_FACE_ACTIVATIONS: dict[str, Activation] = {
    **layers.HUGGING_FACE_ACTIVATIONS,
    "silu": "silu",
    "swish": "silu",
}
CTC, FEATURES = "Wav2Vec2ConformerForCTC", "Wav2Vec2ConformerModel"
ARCHITECTURES = (CTC, FEATURES, "Wav2Vec2ConformerForPreTraining")
# Of training and of heads that are not read.
WITHOUT_EFFECT = """
    activation_dropout adapter_kernel_size adapter_stride apply_spec_augment
    classifier_proj_size codevector_dim conformer_conv_dropout contrastive_logits_temperature
    ctc_loss_reduction ctc_zero_infinity diversity_loss_weight feat_proj_dropout
    feat_quantizer_dropout final_dropout layerdrop mask_channel_length mask_channel_min_space
    mask_channel_other mask_channel_prob mask_channel_selection mask_feature_length
    mask_feature_min_masks mask_feature_prob mask_time_length mask_time_min_masks
    mask_time_min_space mask_time_other mask_time_prob mask_time_selection max_source_positions
    num_adapter_layers num_codevector_groups num_codevectors_per_group
    num_conv_pos_embedding_groups num_conv_pos_embeddings num_feat_extract_layers num_negatives
    output_hidden_size proj_codevector_dim tdnn_dilation tdnn_dim tdnn_kernel xvector_output_dim
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wav2Vec2ConformerConfig(ConformerConfig):
    """Sizes and constants of a Conformer and of the convolutions in front of it.

    Attributes:
      conv_dims: Channels of each convolution over the audio.
      conv_kernels: Samples or frames that each sees at once.
      conv_strides: How far each moves.
      conv_bias: Whether they have biases.
      conv_norm: A LayerNorm after each, "layer", or after the first a norm of every channel over
        time, "group".
      conv_activation: After each of them.
      vocab_size: Entries of the CTC head; 0 for a model without one.
      blank_id: Which of them is CTC's blank.
    """

    conv_dims: tuple[int, ...]
    conv_kernels: tuple[int, ...]
    conv_strides: tuple[int, ...]
    conv_bias: bool
    conv_norm: Literal["layer", "group"]
    conv_activation: Activation = "gelu"
    vocab_size: int = 0
    blank_id: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError unless the sizes fit together."""
        ConformerConfig.__post_init__(self)
        check_choice(self, "conv_norm", ("layer", "group"))
        check_choice(self, "conv_activation", ACTIVATIONS)
        lists = (self.conv_dims, self.conv_kernels, self.conv_strides)
        if len({len(sizes) for sizes in lists}) > 1 or not self.conv_dims:
            raise ConfigError(
                f"Wav2Vec2ConformerConfig: {', '.join(str(len(sizes)) for sizes in lists)}"
                " convolution dims, kernels and strides; one of each is needed for every"
                " convolution; make the lists equally long"
            )
        if bad := [size for sizes in lists for size in sizes if size < 1]:
            raise ConfigError(
                f"Wav2Vec2ConformerConfig: convolutions have sizes {', '.join(map(str, bad))};"
                " sizes are positive; correct them"
            )
        if self.vocab_size:
            check_positive(self, "vocab_size")

    @classmethod
    def large(cls) -> "Wav2Vec2ConformerConfig":
        """wav2vec2-conformer large with relative positions and a CTC head of 32 entries."""
        return cls(
            num_layers=24,
            embed_dim=1024,
            mlp_dim=4096,
            num_heads=16,
            kernel_size=31,
            positions="relative",
            conv_dims=(512,) * 7,
            conv_kernels=(10, 3, 3, 3, 3, 2, 2),
            conv_strides=(5, 2, 2, 2, 2, 2, 2),
            conv_bias=True,
            conv_norm="layer",
            vocab_size=32,
        )

    @classmethod
    def large_rotary(cls) -> "Wav2Vec2ConformerConfig":
        """wav2vec2-conformer large with rotary positions and a CTC head of 32 entries."""
        return replace(cls.large(), positions="rotary")

    @classmethod
    def from_hugging_face(
        cls, fields: Mapping[str, object], origin: str = "config.json"
    ) -> "Wav2Vec2ConformerConfig":
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
        architecture = reader.architecture(ARCHITECTURES, FEATURES)
        for name in ("add_adapter", "use_weighted_layer_sum"):
            reader.exactly(name, (False,), default=False)
        kernel_size = reader.count("conv_depthwise_kernel_size")
        if kernel_size % 2 == 0:
            raise reader.error(
                "conv_depthwise_kernel_size", str(kernel_size), "an odd number is needed", "correct"
            )
        reader.ignore(*WITHOUT_EFFECT.split())
        config = cls(
            num_layers=reader.count("num_hidden_layers"),
            embed_dim=reader.count("hidden_size"),
            mlp_dim=reader.count("intermediate_size"),
            num_heads=reader.count("num_attention_heads"),
            kernel_size=kernel_size,
            positions=reader.one_of(
                "position_embeddings_type",
                {"relative": "relative", "rotary": "rotary"},
                default="relative",
            ),
            norm_eps=reader.positive("layer_norm_eps"),
            rotary_base=float(reader.count_or("rotary_embedding_base", 10000)),
            activation=reader.one_of("hidden_act", HUGGING_FACE_ACTIVATIONS),
            conv_dims=reader.counts("conv_dim"),
            conv_kernels=reader.counts("conv_kernel"),
            conv_strides=reader.counts("conv_stride"),
            conv_bias=reader.flag("conv_bias", default=False),
            conv_norm=reader.one_of(
                "feat_extract_norm", {"layer": "layer", "group": "group"}, default="group"
            ),
            conv_activation=reader.one_of(
                "feat_extract_activation", HUGGING_FACE_ACTIVATIONS, default="gelu"
            ),
            vocab_size=reader.count("vocab_size") if architecture == CTC else 0,
            blank_id=reader.index_or("pad_token_id", 0),
        )
        reader.ignore("vocab_size")
        reader.warn_unknown()
        return config


class ChannelNorm(nnx.Module):
    """Normalises every channel of every row by itself over time: GroupNorm, one channel a group."""

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
    """A convolution over time without padding, a norm where there is one, and an activation."""

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
          config: Its sizes.
          dtype: Of weights and activations; norms, scores and softmax are computed in f32 always.
          rngs: Source of the weights.
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
          Hidden states and scores of every frame; those of padding, which `frame_mask` tells, mean
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
    """Returns which frames lie in a row's audio whole, given which samples do.

    Args:
      config: Of the model.
      attention_mask: 1 for samples, 0 for padding on the right.
    """
    with jax.named_scope("frame_mask"):
        mask = jnp.asarray(attention_mask) != 0
        num_frames = count_frames(config, mask.shape[1])
        lengths = count_frames(config, mask.astype(jnp.int32).sum(axis=1))
        shape = (mask.shape[0], num_frames)
        indices = jnp.broadcast_to(jnp.arange(num_frames), shape)
        return indices < jnp.broadcast_to(lengths[:, None], shape)


def count_frames[N: (int, Array)](config: Wav2Vec2ConformerConfig, samples: N) -> N:
    """Returns how many frames the convolutions make of so many samples."""
    for kernel, stride in zip(config.conv_kernels, config.conv_strides, strict=True):
        samples = (samples - kernel) // stride + 1
    return samples


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


def least_samples(config: Wav2Vec2ConformerConfig) -> int:
    """Returns how many samples make one frame."""
    samples = 1
    for kernel, stride in reversed(
        list(zip(config.conv_kernels, config.conv_strides, strict=True))
    ):
        samples = (samples - 1) * stride + kernel
    return samples
