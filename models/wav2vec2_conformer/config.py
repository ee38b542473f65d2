"""The configuration of wav2vec2-conformer: its sizes, their reading, and its number of frames."""

from dataclasses import dataclass, replace
from typing import Literal

from jaxtyping import Array

from models.conformer.config import HUGGING_FACE_ACTIVATIONS, ConformerConfig
from models.errors import ConfigError
from models.family_config import FamilyConfig, check_choice
from models.hf_config import ConfigFields, Schema
from models.layers import ACTIVATIONS, Activation

CTC, FEATURES = "Wav2Vec2ConformerForCTC", "Wav2Vec2ConformerModel"
ARCHITECTURES = (CTC, FEATURES, "Wav2Vec2ConformerForPreTraining")
# Fields of training and of unsupported heads.
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
# The entries of a CTC head have no default: a file with one names them.
SCHEMA = Schema(
    defaults={
        "conv_bias": False,
        "conv_depthwise_kernel_size": 31,
        "conv_dim": [512] * 7,
        "conv_kernel": [10, 3, 3, 3, 3, 2, 2],
        "conv_stride": [5, 2, 2, 2, 2, 2, 2],
        "feat_extract_activation": "gelu",
        "feat_extract_norm": "group",
        "hidden_act": "gelu",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "layer_norm_eps": 1e-5,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "position_embeddings_type": "relative",
        "rotary_embedding_base": 10000,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wav2Vec2ConformerConfig(ConformerConfig, FamilyConfig):
    """Sizes and constants of a Conformer and of the convolutions before it.

    Attributes:
      conv_dims: Channels of each convolution over the audio.
      conv_kernels: Samples or frames in the window of each convolution.
      conv_strides: Samples or frames between neighbouring windows of each convolution.
      conv_bias: Whether the convolutions have biases.
      conv_norm: "layer" for a LayerNorm after each convolution, "group" for a norm of every channel
        over time after the first one.
      conv_activation: Activation after each convolution.
      vocab_size: Entries of the CTC head; 0 for a model without one.
      blank_id: The entry of CTC's blank.
    """

    schema = SCHEMA

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
    def read(cls, reader: ConfigFields) -> "Wav2Vec2ConformerConfig":
        """Reads the fields of a model without adapters."""
        architecture = reader.architecture(ARCHITECTURES, FEATURES)
        reader.refuse("add_adapter", "use_weighted_layer_sum")
        kernel_size = reader.count("conv_depthwise_kernel_size")
        if kernel_size % 2 == 0:
            raise reader.error(
                "conv_depthwise_kernel_size", str(kernel_size), "an odd number is needed", "correct"
            )
        # Without the head, vocab_size is not read.
        reader.ignore("vocab_size", *WITHOUT_EFFECT.split())
        return cls(
            num_layers=reader.count("num_hidden_layers"),
            embed_dim=reader.count("hidden_size"),
            mlp_dim=reader.count("intermediate_size"),
            num_heads=reader.count("num_attention_heads"),
            kernel_size=kernel_size,
            positions=reader.one_of(
                "position_embeddings_type", {"relative": "relative", "rotary": "rotary"}
            ),
            norm_eps=reader.positive("layer_norm_eps"),
            rotary_base=float(reader.count("rotary_embedding_base")),
            activation=reader.one_of("hidden_act", HUGGING_FACE_ACTIVATIONS),
            conv_dims=reader.counts("conv_dim"),
            conv_kernels=reader.counts("conv_kernel"),
            conv_strides=reader.counts("conv_stride"),
            conv_bias=reader.flag("conv_bias"),
            conv_norm=reader.one_of("feat_extract_norm", {"layer": "layer", "group": "group"}),
            conv_activation=reader.one_of("feat_extract_activation", HUGGING_FACE_ACTIVATIONS),
            vocab_size=reader.count("vocab_size") if architecture == CTC else 0,
            blank_id=reader.index_or("pad_token_id", 0),
        )


def count_frames[N: (int, Array)](config: Wav2Vec2ConformerConfig, samples: N) -> N:
    """Returns the number of frames after the convolutions over so many samples."""
    for kernel, stride in zip(config.conv_kernels, config.conv_strides, strict=True):
        samples = (samples - kernel) // stride + 1
    return samples


def least_samples(config: Wav2Vec2ConformerConfig) -> int:
    """Returns the number of samples that give one frame."""
    samples = 1
    for kernel, stride in reversed(
        list(zip(config.conv_kernels, config.conv_strides, strict=True))
    ):
        samples = (samples - 1) * stride + kernel
    return samples
