"""The configuration of Conformer encoders, and what every Conformer's configuration checks."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from models.errors import ConfigError
from models.layers import ACTIVATIONS, Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformerConfig:
    """Sizes and constants of one Conformer encoder.

    Attributes:
      num_layers: Number of blocks.
      embed_dim: Width of the hidden states.
      mlp_dim: Width inside the MLPs.
      num_heads: Attention heads; divides embed_dim.
      kernel_size: Frames that the depthwise convolution sees at once; odd.
      positions: Whether attention knows positions by their difference, "relative", or by rotation
        of what queries and keys are made of, "rotary".
      norm_eps: Added to the variance in the LayerNorm after the last block.
      rotary_base: The slowest wave of rotary positions.
      activation: Of MLPs and convolution.
      bias: Whether the Linears of MLPs and attention have biases.
      convolution_bias: Whether the convolution and the Linears around it have biases.
      masks_convolution: Whether padding is zeros to the convolution of every block, else only to
        the first block as a whole.
      final_norm: Whether there is a LayerNorm after the last block, beside the block's own.
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
        names = ("num_layers", "embed_dim", "mlp_dim", "num_heads", "kernel_size")
        check_positive(self, *names, "norm_eps", "rotary_base")
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
                f"ConformerConfig: kernel_size is {self.kernel_size}; only an odd one has a middle;"
                " choose an odd one"
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


def check_positive(config: object, *names: str) -> None:
    """Raises ConfigError unless the fields of a configuration are positive."""
    values = {name: getattr(config, name) for name in names}
    if bad := [f"{name} is {value}" for name, value in values.items() if not value > 0]:
        kind = type(config).__name__
        raise ConfigError(f"{kind}: {', '.join(bad)}; sizes are positive; correct them")


def check_choice(config: object, name: str, allowed: Iterable[str]) -> None:
    """Raises ConfigError unless a field of a configuration has one of the allowed values."""
    value, names = getattr(config, name), list(allowed)
    if value not in names:
        kind = type(config).__name__
        supported = f"supported are {', '.join(names)}"
        raise ConfigError(f"{kind}: {name} is {value!r}; {supported}; choose one")
