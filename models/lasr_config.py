"""The configuration of LASR: sizes, Hugging Face's fields, and how many frames it makes of audio.

The modules are in `models.lasr`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Array

from models.conformer_config import check_choice, check_positive
from models.errors import ConfigError
from models.hf_config import ConfigFields
from models.layers import ACTIVATIONS, Activation
from models.rotary import Rotary, read_rotary
from models.wav2vec2_conformer import HUGGING_FACE_ACTIVATIONS

CTC, ENCODER = "LasrForCTC", "LasrEncoder"
NUM_CONVOLUTIONS = 2
# Positions of any number are rotated: max_position_embeddings bounds nothing.
WITHOUT_EFFECT = """
    activation_dropout batch_norm_momentum ctc_loss_reduction ctc_zero_infinity dropout
    dropout_positions layerdrop max_position_embeddings
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LasrConfig:
    """Sizes and constants of one LASR encoder.

    Attributes:
      num_layers: Number of blocks.
      embed_dim: Width of the hidden states.
      mlp_dim: Width inside the MLPs.
      num_heads: Attention heads of an even size; divides embed_dim.
      kernel_size: Frames that the depthwise convolution sees at once; an even one sees one more
        after a frame than before it.
      norm_eps: Added to the variance in every LayerNorm.
      num_mels: Bins of the spectrogram.
      num_channels: Channels after the second of the two strided convolutions.
      subsampling_kernel: Frames that each of them sees at once.
      subsampling_stride: How far each moves.
      mlp_residual: What an MLP's input and its output are multiplied by before they are added.
      convolution_residual: The same of the convolution.
      rotary_base: Base of the frequencies of rotary positions.
      activation: Of MLPs and convolution.
      bias: Whether the Linears of MLPs and attention have biases.
      convolution_bias: Whether the convolution and the Linears around it have biases.
      vocab_size: Entries of the CTC head; 0 for a model without one.
      blank_id: Which of them is CTC's blank.
    """

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
        names = ("num_layers", "embed_dim", "mlp_dim", "num_heads", "kernel_size", "norm_eps")
        check_positive(self, *names, "num_mels", "num_channels", "rotary_base")
        check_positive(self, "subsampling_kernel", "subsampling_stride")
        check_choice(self, "activation", ACTIVATIONS)
        if self.embed_dim % (2 * self.num_heads):
            raise ConfigError(
                f"LasrConfig: embed_dim is {self.embed_dim} with {self.num_heads} heads; rotary"
                f" positions need a multiple of {2 * self.num_heads}; change one of them"
            )
        if self.vocab_size:
            check_positive(self, "vocab_size")

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
    def from_hugging_face(
        cls, fields: Mapping[str, object], origin: str = "config.json"
    ) -> "LasrConfig":
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
        if fields.get("model_type") == "lasr_encoder":
            reader.architecture((ENCODER,), ENCODER)
            return _read(reader, vocab_size=0, blank_id=0)
        reader.architecture((CTC,), CTC)
        reader.ignore(*WITHOUT_EFFECT.split())
        encoder = reader.section("encoder_config")
        if encoder is None:
            raise reader.error("encoder_config", "missing", "an object is needed", "add it")
        vocabulary, blank = reader.count("vocab_size"), reader.index_or("pad_token_id", 0)
        reader.warn_unknown()
        return _read(encoder, vocab_size=vocabulary, blank_id=blank)


def _read(reader: ConfigFields, *, vocab_size: int, blank_id: int) -> LasrConfig:
    reader.ignore(*WITHOUT_EFFECT.split())
    heads, width = reader.count("num_attention_heads"), reader.count("hidden_size")
    reader.exactly("num_key_value_heads", (None, heads), default=None)
    reader.exactly("head_dim", (None, width // heads), default=None)
    rotary = read_rotary(reader)
    if rotary != Rotary(theta=rotary.theta):
        raise reader.error(
            "rope_parameters", "scaled", "only rope_type 'default' is supported", "use another"
        )
    config = LasrConfig(
        num_layers=reader.count("num_hidden_layers"),
        embed_dim=width,
        mlp_dim=reader.count("intermediate_size"),
        num_heads=heads,
        kernel_size=reader.count("conv_kernel_size"),
        norm_eps=reader.positive("layer_norm_eps"),
        num_mels=reader.count("num_mel_bins"),
        num_channels=reader.count("subsampling_conv_channels"),
        subsampling_kernel=reader.count("subsampling_conv_kernel_size"),
        subsampling_stride=reader.count("subsampling_conv_stride"),
        mlp_residual=reader.pair_or("feed_forward_residual_weights", (1.5, 0.5)),
        convolution_residual=reader.pair_or("conv_residual_weights", (2.0, 1.0)),
        rotary_base=rotary.theta,
        activation=reader.one_of("hidden_act", HUGGING_FACE_ACTIVATIONS),
        bias=reader.flag("attention_bias", default=False),
        convolution_bias=reader.flag("convolution_bias", default=False),
        vocab_size=vocab_size,
        blank_id=blank_id,
    )
    reader.warn_unknown()
    return config


def count_frames[N: (int, Array)](config: LasrConfig, length: N) -> N:
    """Returns how many frames the convolutions make of so many; below 1 where there are too few."""
    for _ in range(NUM_CONVOLUTIONS):
        length = (length - config.subsampling_kernel) // config.subsampling_stride + 1
    return length


def least_frames(config: LasrConfig) -> int:
    """Returns the fewest frames of a spectrogram that make one."""
    length = 1
    for _ in range(NUM_CONVOLUTIONS):
        length = (length - 1) * config.subsampling_stride + config.subsampling_kernel
    return length
