"""The configuration of Conformer encoders, and the reading of CTC heads."""

from dataclasses import dataclass
from typing import Literal

from models import layers
from models.errors import ConfigError
from models.family_config import check_choice, check_positive
from models.hf_config import ConfigFields
from models.layers import ACTIVATIONS, Activation

HUGGING_FACE_ACTIVATIONS: dict[str, Activation] = {
    **layers.HUGGING_FACE_ACTIVATIONS,
    "silu": "silu",
    "swish": "silu",
}
# Fields of a subclass's CTC head; both are 0 without a head.
CTC_FIELDS = ("vocab_size", "blank_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformerConfig:
    """Sizes and constants of one Conformer encoder.

    Attributes:
      num_layers: Number of blocks.
      embed_dim: Width of the hidden states.
      mlp_dim: Width inside the MLPs.
      num_heads: Attention heads; divides embed_dim.
      kernel_size: Frames in the window of the depthwise convolution; odd.
      positions: "relative" for scores by difference of positions, "rotary" for a rotation of the
        input of queries and keys.
      norm_eps: Added to the variance in the LayerNorm after the last block.
      rotary_base: The base of the frequencies of rotary positions.
      activation: Activation of MLPs and convolution.
      bias: Whether the Linears of MLPs and attention have biases.
      convolution_bias: Whether the convolution and the Linears around it have biases.
      masks_convolution: Whether padding is zeroed before the convolution of every block; otherwise
        only before the first block.
      final_norm: Whether a LayerNorm follows the last block, after the block's own.
    """

    num_layers: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    kernel_size: int
    positions: Literal["relative", "rotary"]
    norm_eps: float = 1e-5
    rotary_base: float = 10000.0
    activation: Activation = "silu"
    bias: bool = True
    convolution_bias: bool = False
    masks_convolution: bool = False
    final_norm: bool = True

    def __post_init__(self) -> None:
        """Raises ConfigError unless the sizes fit together."""
        check_positive(self, or_zero=CTC_FIELDS)
        check_choice(self, "positions", ("relative", "rotary"))
        check_choice(self, "activation", ACTIVATIONS)
        heads, dim = self.num_heads, self.embed_dim
        even = 2 * heads if self.positions == "rotary" else 2
        if dim % heads or dim % even:
            raise ConfigError(
                f"ConformerConfig: embed_dim is {dim} with {heads} heads; the heads must divide it"
                f" and {self.positions} positions need a multiple of {even}; change one of them"
            )
        if self.kernel_size % 2 == 0:
            raise ConfigError(
                f"ConformerConfig: kernel_size is {self.kernel_size}; only an odd number has a"
                " middle; choose one"
            )

    @classmethod
    def conformer_l(cls) -> "ConformerConfig":
        """Conformer-L, the large encoder of Gulati et al. 2020: 17 layers x 512."""
        return cls(
            num_layers=17,
            embed_dim=512,
            mlp_dim=2048,
            num_heads=8,
            kernel_size=31,
            positions="relative",
        )


def read_ctc(
    reader: ConfigFields, classes: tuple[str, str], *, default_blank: int, ignored: str
) -> tuple[ConfigFields, int, int]:
    """Reads the head of an encoder with CTC, whose own fields are a section of such a file.

    Args:
      reader: The fields of a CTC model, or of an encoder alone.
      classes: The names of both classes.
      default_blank: Entry of the blank in a file without pad_token_id.
      ignored: Names of fields without effect, of the model and of the encoder.

    Returns:
      The fields of the encoder, the number of entries of the head, and which of them is the blank.
      An encoder alone has no entries.
    """
    with_head, alone = classes
    reader.ignore(*ignored.split())
    if str(reader.model_type).endswith("_encoder"):
        reader.architecture((alone,), alone)
        return reader, 0, 0
    reader.architecture((with_head,), with_head)
    encoder = reader.section("encoder_config")
    if encoder is None:
        encoder = reader.empty("encoder_config")
    encoder.ignore(*ignored.split())
    return encoder, reader.count("vocab_size"), reader.index_or("pad_token_id", default_blank)
