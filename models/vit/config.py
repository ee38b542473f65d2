"""The configuration of ViT: its sizes, and how they are read from a config.json."""

from dataclasses import dataclass, replace
from typing import Literal

from models.errors import ConfigError
from models.family_config import FamilyConfig, check_choice, check_heads, check_positive
from models.hf_config import ConfigFields, Schema
from models.layers import ACTIVATIONS, HUGGING_FACE_ACTIVATIONS

CLASSIFIER, FEATURES = "ViTForImageClassification", "ViTModel"
ARCHITECTURES = (CLASSIFIER, FEATURES)
SCHEMA = Schema(
    defaults={
        "hidden_act": "gelu",
        "hidden_size": 768,
        "image_size": 224,
        "intermediate_size": 3072,
        "layer_norm_eps": 1e-12,
        "num_attention_heads": 12,
        "num_channels": 3,
        "num_hidden_layers": 12,
        "patch_size": 16,
        "qkv_bias": True,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ViTConfig(FamilyConfig):
    """Sizes and constants of one Vision Transformer.

    Attributes:
      num_layers: Number of blocks.
      embed_dim: Width of the hidden states.
      mlp_dim: Width inside the MLP.
      num_heads: Attention heads; divides embed_dim.
      image_size: Height and width of the images, in pixels.
      patch_size: Height and width of a patch; divides image_size.
      num_channels: Colour channels.
      norm_eps: Added to the variance in every LayerNorm.
      num_labels: Classes of the head; 0 for a model without one.
      qkv_bias: Whether query, key and value have biases.
      activation: GELU in its exact form, "gelu", or its tanh approximation, "gelu_tanh".
      pooler: Whether there is a pooler on the first token.
    """

    schema = SCHEMA

    num_layers: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    image_size: int
    patch_size: int
    num_channels: int
    norm_eps: float
    num_labels: int = 0
    qkv_bias: bool = True
    activation: Literal["gelu", "gelu_tanh"] = "gelu"
    pooler: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError unless the sizes fit together."""
        check_positive(self, or_zero=["num_labels"])
        check_heads(self)
        check_choice(self, "activation", ACTIVATIONS)
        if self.image_size % self.patch_size:
            raise ConfigError(
                f"ViTConfig: image_size is {self.image_size} with patches of {self.patch_size};"
                " the patches must divide it; change one of them"
            )

    @property
    def num_patches(self) -> int:
        """Patches of one image."""
        return (self.image_size // self.patch_size) ** 2

    @classmethod
    def base(cls) -> "ViTConfig":
        """ViT-B/16: 12 layers x 768, 224 pixels, 1000 labels."""
        return cls(
            num_layers=12,
            embed_dim=768,
            mlp_dim=3072,
            num_heads=12,
            image_size=224,
            patch_size=16,
            num_channels=3,
            norm_eps=1e-12,
            num_labels=1000,
        )

    @classmethod
    def large(cls) -> "ViTConfig":
        """ViT-L/16: 24 layers x 1024, 224 pixels, 1000 labels."""
        return replace(cls.base(), num_layers=24, embed_dim=1024, mlp_dim=4096, num_heads=16)

    @classmethod
    def read(cls, reader: ConfigFields) -> "ViTConfig":
        """Reads everything but the pooler of a feature model, which the tensors tell."""
        architecture = reader.architecture(ARCHITECTURES, FEATURES)
        reader.exactly("pooler_act", ("tanh",), default="tanh")
        reader.ignore("encoder_stride")
        width, image = reader.count("hidden_size"), reader.count("image_size")
        reader.exactly("pooler_output_size", (None, width), default=None)
        return cls(
            num_layers=reader.count("num_hidden_layers"),
            embed_dim=width,
            mlp_dim=reader.count("intermediate_size"),
            num_heads=reader.divisor("num_attention_heads", of="hidden_size", size=width),
            image_size=image,
            patch_size=reader.divisor("patch_size", of="image_size", size=image),
            num_channels=reader.count("num_channels"),
            norm_eps=reader.positive("layer_norm_eps"),
            num_labels=reader.num_labels() if architecture == CLASSIFIER else 0,
            qkv_bias=reader.flag("qkv_bias"),
            activation=reader.one_of("hidden_act", HUGGING_FACE_ACTIVATIONS),
        )
