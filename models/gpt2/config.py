"""The configuration of GPT-2: its sizes, and how they are read from a config.json."""

from dataclasses import dataclass, replace
from typing import Literal

from models.family_config import FamilyConfig, check_choice, check_heads, check_positive
from models.hf_config import ConfigFields, Schema
from models.layers import ACTIVATIONS, HUGGING_FACE_ACTIVATIONS

# For each class that may have saved the file: whether it has a language model head.
ARCHITECTURES = {"GPT2LMHeadModel": True, "GPT2Model": False}
SCHEMA = Schema(
    defaults={
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "tie_word_embeddings": True,
        "vocab_size": 50257,
    },
    aliases={
        "n_embd": ("hidden_size",),
        "n_head": ("num_attention_heads",),
        "n_layer": ("num_hidden_layers",),
        "n_positions": ("max_position_embeddings", "n_ctx"),
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GPT2Config(FamilyConfig):
    """Sizes and constants of one GPT-2 decoder.

    Attributes:
      num_layers: Number of blocks.
      embed_dim: Width of the hidden states.
      mlp_dim: Width inside the MLP.
      num_heads: Attention heads; divides embed_dim.
      vocab_size: Rows of the word embedding.
      max_seq_len: Rows of the position embedding, the longest sequence.
      norm_eps: Added to the variance in every LayerNorm.
      activation: GELU in its tanh approximation, "gelu_tanh", or its exact form, "gelu".
      lm_head: Whether there is a language model head.
      tie_embeddings: Whether the head is the word embedding.
    """

    schema = SCHEMA

    num_layers: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    vocab_size: int
    max_seq_len: int
    norm_eps: float
    activation: Literal["gelu", "gelu_tanh"] = "gelu_tanh"
    lm_head: bool = True
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        """Raises ConfigError unless the sizes fit together."""
        check_positive(self)
        check_heads(self)
        check_choice(self, "activation", ACTIVATIONS)

    @classmethod
    def small(cls) -> "GPT2Config":
        """GPT-2 124M: 12 layers x 768."""
        return cls(
            num_layers=12,
            embed_dim=768,
            mlp_dim=3072,
            num_heads=12,
            vocab_size=50257,
            max_seq_len=1024,
            norm_eps=1e-5,
        )

    @classmethod
    def medium(cls) -> "GPT2Config":
        """GPT-2 355M: 24 layers x 1024."""
        return replace(cls.small(), num_layers=24, embed_dim=1024, mlp_dim=4096, num_heads=16)

    @classmethod
    def large(cls) -> "GPT2Config":
        """GPT-2 774M: 36 layers x 1280."""
        return replace(cls.small(), num_layers=36, embed_dim=1280, mlp_dim=5120, num_heads=20)

    @classmethod
    def xl(cls) -> "GPT2Config":
        """GPT-2 1.5B: 48 layers x 1600."""
        return replace(cls.small(), num_layers=48, embed_dim=1600, mlp_dim=6400, num_heads=25)

    @classmethod
    def read(cls, reader: ConfigFields) -> "GPT2Config":
        """Reads the fields of a decoder that scales attention in the usual way."""
        head = ARCHITECTURES[reader.architecture(ARCHITECTURES, "GPT2LMHeadModel")]
        reader.exactly("scale_attn_weights", (True,), default=True)
        reader.refuse("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn")
        reader.refuse("add_cross_attention", "is_encoder_decoder")
        reader.exactly("pruned_heads", ({}, None), default=None)
        reader.ignore("is_decoder")
        width = reader.count("n_embd")
        return cls(
            num_layers=reader.count("n_layer"),
            embed_dim=width,
            mlp_dim=reader.count_or("n_inner", 4 * width),
            num_heads=reader.divisor("n_head", of="n_embd", size=width),
            vocab_size=reader.count("vocab_size"),
            max_seq_len=reader.count("n_positions"),
            norm_eps=reader.positive("layer_norm_epsilon"),
            activation=reader.one_of("activation_function", HUGGING_FACE_ACTIVATIONS),
            lm_head=head,
            tie_embeddings=reader.flag("tie_word_embeddings"),
        )
