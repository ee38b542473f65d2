"""The configuration of LASR: its sizes, their reading, and its number of frames."""

from dataclasses import dataclass

from jaxtyping import Array

from models.conformer.config import CTC_FIELDS, HUGGING_FACE_ACTIVATIONS, read_ctc
from models.errors import ConfigError
from models.family_config import FamilyConfig, check_choice, check_positive
from models.hf_config import ConfigFields, Schema
from models.layers import ACTIVATIONS, Activation
from models.rotary import Rotary, read_rotary

ARCHITECTURES = ("LasrForCTC", "LasrEncoder")
NUM_CONVOLUTIONS = 2
# Rotary positions have no limit: max_position_embeddings has no effect.
WITHOUT_EFFECT = """
    activation_dropout batch_norm_momentum ctc_loss_reduction ctc_zero_infinity dropout
    dropout_positions layerdrop max_position_embeddings
"""
SCHEMA = Schema(
    defaults={
        "attention_bias": False,
        "conv_kernel_size": 32,
        "conv_residual_weights": [2.0, 1.0],
        "convolution_bias": False,
        "feed_forward_residual_weights": [1.5, 0.5],
        "hidden_act": "silu",
        "hidden_size": 512,
        "intermediate_size": 2048,
        "layer_norm_eps": 1e-6,
        "num_attention_heads": 8,
        "num_hidden_layers": 17,
        "num_mel_bins": 128,
        "rope_theta": 10000.0,
        "subsampling_conv_channels": 256,
        "subsampling_conv_kernel_size": 5,
        "subsampling_conv_stride": 2,
        "vocab_size": 512,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LasrConfig(FamilyConfig):
    """Sizes and constants of one LASR encoder.

    Attributes:
      num_layers: Number of blocks.
      embed_dim: Width of the hidden states.
      mlp_dim: Width inside the MLPs.
      num_heads: Attention heads of an even size; divides embed_dim.
      kernel_size: Frames in the window of the depthwise convolution; an even window has one more
        frame after its own than before it.
      norm_eps: Added to the variance in every LayerNorm.
      num_mels: Bins of the spectrogram.
      num_channels: Channels after the second of the two strided convolutions.
      subsampling_kernel: Frames in the window of each of these convolutions.
      subsampling_stride: Frames between neighbouring windows.
      mlp_residual: Factors of an MLP's input and output in their sum.
      convolution_residual: Factors of the convolution's input and output in their sum.
      rotary_base: Base of the frequencies of rotary positions.
      activation: Activation of MLPs and convolution.
      bias: Whether the Linears of MLPs and attention have biases.
      convolution_bias: Whether the convolution and the Linears around it have biases.
      vocab_size: Entries of the CTC head; 0 for a model without one.
      blank_id: The entry of CTC's blank.
    """

    schema = SCHEMA

    num_layers: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    kernel_size: int
    norm_eps: float
    num_mels: int
    num_channels: int
    subsampling_kernel: int
    subsampling_stride: int
    mlp_residual: tuple[float, float] = (1.5, 0.5)
    convolution_residual: tuple[float, float] = (2.0, 1.0)
    rotary_base: float = 10000.0
    activation: Activation = "silu"
    bias: bool = False
    convolution_bias: bool = False
    vocab_size: int = 0
    blank_id: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError unless the sizes fit together."""
        check_positive(self, or_zero=CTC_FIELDS)
        check_choice(self, "activation", ACTIVATIONS)
        if self.embed_dim % (2 * self.num_heads):
            raise ConfigError(
                f"LasrConfig: embed_dim is {self.embed_dim} with {self.num_heads} heads; rotary"
                f" positions need a multiple of {2 * self.num_heads}; change one of them"
            )

    @classmethod
    def ctc(cls) -> "LasrConfig":
        """LASR with a CTC head of 512 entries, as in medasr: 17 layers x 512, 128 bins."""
        return cls(
            num_layers=17,
            embed_dim=512,
            mlp_dim=2048,
            num_heads=8,
            kernel_size=32,
            norm_eps=1e-6,
            num_mels=128,
            num_channels=256,
            subsampling_kernel=5,
            subsampling_stride=2,
            vocab_size=512,
        )

    @classmethod
    def read(cls, reader: ConfigFields) -> "LasrConfig":
        """Reads the fields of a CTC model or of an encoder alone."""
        encoder, vocab_size, blank_id = read_ctc(
            reader, ARCHITECTURES, default_blank=0, ignored=WITHOUT_EFFECT
        )
        heads, width = encoder.count("num_attention_heads"), encoder.count("hidden_size")
        encoder.exactly("num_key_value_heads", (None, heads), default=None)
        encoder.exactly("head_dim", (None, width // heads), default=None)
        rotary = read_rotary(encoder)
        if rotary != Rotary(theta=rotary.theta):
            allowed = "only rope_type 'default' is supported"
            raise encoder.error("rope_parameters", "scaled", allowed, "use another")
        return cls(
            num_layers=encoder.count("num_hidden_layers"),
            embed_dim=width,
            mlp_dim=encoder.count("intermediate_size"),
            num_heads=heads,
            kernel_size=encoder.count("conv_kernel_size"),
            norm_eps=encoder.positive("layer_norm_eps"),
            num_mels=encoder.count("num_mel_bins"),
            num_channels=encoder.count("subsampling_conv_channels"),
            subsampling_kernel=encoder.count("subsampling_conv_kernel_size"),
            subsampling_stride=encoder.count("subsampling_conv_stride"),
            mlp_residual=encoder.pair("feed_forward_residual_weights"),
            convolution_residual=encoder.pair("conv_residual_weights"),
            rotary_base=rotary.theta,
            activation=encoder.one_of("hidden_act", HUGGING_FACE_ACTIVATIONS),
            bias=encoder.flag("attention_bias"),
            convolution_bias=encoder.flag("convolution_bias"),
            vocab_size=vocab_size,
            blank_id=blank_id,
        )


def count_frames[N: (int, Array)](config: LasrConfig, length: N) -> N:
    """Returns the number of frames after the convolutions; below 1 if the input is too short."""
    for _ in range(NUM_CONVOLUTIONS):
        length = (length - config.subsampling_kernel) // config.subsampling_stride + 1
    return length


def least_frames(config: LasrConfig) -> int:
    """Returns the number of spectrogram frames that give one frame."""
    length = 1
    for _ in range(NUM_CONVOLUTIONS):
        length = (length - 1) * config.subsampling_stride + config.subsampling_kernel
    return length
