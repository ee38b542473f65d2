"""The configuration of Parakeet: its sizes, their reading, and its number of frames."""

from dataclasses import dataclass, replace

from jaxtyping import Array

from models.conformer.config import HUGGING_FACE_ACTIVATIONS, ConformerConfig, read_ctc
from models.errors import ConfigError
from models.family_config import FamilyConfig
from models.hf_config import ConfigFields, Schema

ARCHITECTURES = ("ParakeetForCTC", "ParakeetEncoder")
WITHOUT_EFFECT = """
    activation_dropout ctc_loss_reduction ctc_zero_infinity dropout dropout_positions layerdrop
"""
SCHEMA = Schema(
    defaults={
        "attention_bias": True,
        "conv_kernel_size": 9,
        "convolution_bias": True,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "max_position_embeddings": 5000,
        "num_attention_heads": 8,
        "num_hidden_layers": 24,
        "num_mel_bins": 80,
        "scale_input": True,
        "subsampling_conv_channels": 256,
        "subsampling_conv_kernel_size": 3,
        "subsampling_conv_stride": 2,
        "subsampling_factor": 8,
        "vocab_size": 1025,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParakeetConfig(ConformerConfig, FamilyConfig):
    """Sizes and constants of a Conformer and of the strided convolutions before it.

    Attributes:
      num_mels: Bins of the spectrogram.
      num_convolutions: Strided convolutions over time and bins.
      num_channels: Channels of each convolution.
      subsampling_kernel: Frames and bins in the window of each convolution.
      subsampling_stride: Frames, and bins, between neighbouring windows.
      max_seq_len: The frames after the convolutions that the model was made for; positions are
        differences, computed for any length, so that more are no error.
      scale_input: Whether the output of the convolutions is scaled by the root of embed_dim.
      vocab_size: Entries of the CTC head; 0 for a model without one.
      blank_id: The entry of CTC's blank.
    """

    schema = SCHEMA

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
        factor = self.subsampling_stride**self.num_convolutions
        if count_frames(self, self.num_mels) * factor != self.num_mels:
            raise ConfigError(
                f"ParakeetConfig: num_mels is {self.num_mels}, which the convolutions reduce to"
                f" {count_frames(self, self.num_mels)}; a {factor}th of it is needed;"
                f" choose a multiple of {factor}"
            )

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
    def read(cls, reader: ConfigFields) -> "ParakeetConfig":
        """Reads the fields of a CTC model or of an encoder alone."""
        encoder, vocab_size, blank_id = read_ctc(
            reader, ARCHITECTURES, default_blank=1024, ignored=WITHOUT_EFFECT
        )
        heads = encoder.count("num_attention_heads")
        encoder.exactly("num_key_value_heads", (None, heads), default=None)
        factor = encoder.count("subsampling_factor")
        if factor < 2 or factor & (factor - 1):
            allowed = "a power of two above 1 is needed"
            raise encoder.error("subsampling_factor", str(factor), allowed, "correct it")
        return cls(
            num_layers=encoder.count("num_hidden_layers"),
            embed_dim=encoder.count("hidden_size"),
            mlp_dim=encoder.count("intermediate_size"),
            num_heads=heads,
            kernel_size=encoder.count("conv_kernel_size"),
            positions="relative",
            activation=encoder.one_of("hidden_act", HUGGING_FACE_ACTIVATIONS),
            bias=encoder.flag("attention_bias"),
            convolution_bias=encoder.flag("convolution_bias"),
            masks_convolution=True,
            final_norm=False,
            num_mels=encoder.count("num_mel_bins"),
            num_convolutions=factor.bit_length() - 1,
            num_channels=encoder.count("subsampling_conv_channels"),
            subsampling_kernel=encoder.count("subsampling_conv_kernel_size"),
            subsampling_stride=encoder.count("subsampling_conv_stride"),
            max_seq_len=encoder.count("max_position_embeddings"),
            scale_input=encoder.flag("scale_input"),
            vocab_size=vocab_size,
            blank_id=blank_id,
        )


def count_frames[N: (int, Array)](
    config: ParakeetConfig, length: N, strides: int | None = None
) -> N:
    """Returns the number of frames, or bins, after all or the first `strides` convolutions."""
    padding = (config.subsampling_kernel - 1) // 2 * 2
    for _ in range(config.num_convolutions if strides is None else strides):
        length = (length + padding - config.subsampling_kernel) // config.subsampling_stride + 1
    return length
