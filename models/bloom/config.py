"""The configuration of BLOOM: its sizes, and how they are read from a config.json."""

from dataclasses import dataclass, replace

from models.family_config import FamilyConfig, check_heads, check_positive
from models.hf_config import ConfigFields, Schema

# For each class that may have saved the file: whether it has a language model head.
ARCHITECTURES = {"BloomForCausalLM": True, "BloomModel": False}
# Fields of the original code's execution, and a length that ALiBi does not bound.
WITHOUT_EFFECT = """
    attention_softmax_in_fp32 bias_dropout_fusion is_decoder masked_softmax_fusion offset_alibi
    seq_length skip_bias_add skip_bias_add_qkv slow_but_exact
"""
SCHEMA = Schema(
    defaults={
        "hidden_size": 64,
        "layer_norm_epsilon": 1e-5,
        "n_head": 8,
        "n_layer": 2,
        "tie_word_embeddings": True,
        "vocab_size": 250880,
    },
    aliases={
        "hidden_size": ("n_embed",),
        "n_head": ("num_attention_heads",),
        "n_layer": ("num_hidden_layers",),
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BloomConfig(FamilyConfig):
    """Sizes and constants of one BLOOM decoder; the MLP is four times as wide as the model.

    Attributes:
      num_layers: Number of blocks.
      embed_dim: Width of the hidden states.
      num_heads: Attention heads; divides embed_dim.
      vocab_size: Rows of the word embedding.
      norm_eps: Added to the variance in every LayerNorm.
      lm_head: Whether there is a language model head.
      tie_embeddings: Whether the head is the word embedding.
    """

    schema = SCHEMA

    num_layers: int
    embed_dim: int
    num_heads: int
    vocab_size: int
    norm_eps: float
    lm_head: bool = True
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        """Raises ConfigError unless the sizes fit together."""
        check_positive(self)
        check_heads(self)

    @classmethod
    def bloom_560m(cls) -> "BloomConfig":
        """BLOOM 560M: 24 layers x 1024."""
        return cls(num_layers=24, embed_dim=1024, num_heads=16, vocab_size=250880, norm_eps=1e-5)

    @classmethod
    def bloom_1b1(cls) -> "BloomConfig":
        """BLOOM 1.1B: 24 layers x 1536."""
        return replace(cls.bloom_560m(), embed_dim=1536)

    @classmethod
    def bloom_1b7(cls) -> "BloomConfig":
        """BLOOM 1.7B: 24 layers x 2048."""
        return replace(cls.bloom_560m(), embed_dim=2048)

    @classmethod
    def bloom_3b(cls) -> "BloomConfig":
        """BLOOM 3B: 30 layers x 2560."""
        return replace(cls.bloom_560m(), num_layers=30, embed_dim=2560, num_heads=32)

    @classmethod
    def bloom_7b1(cls) -> "BloomConfig":
        """BLOOM 7.1B: 30 layers x 4096."""
        return replace(cls.bloom_3b(), embed_dim=4096)

    @classmethod
    def read(cls, reader: ConfigFields) -> "BloomConfig":
        """Reads the fields, under today's names or the names of the first BLOOM files."""
        head = ARCHITECTURES[reader.architecture(ARCHITECTURES, "BloomForCausalLM")]
        reader.refuse("apply_residual_connection_post_layernorm")
        reader.refuse("add_cross_attention", "is_encoder_decoder")
        reader.exactly("pruned_heads", ({}, None), default=None)
        if reader.count_or("pretraining_tp", 1) > 1:
            reader.refuse("slow_but_exact")
        reader.ignore(*WITHOUT_EFFECT.split())
        width = reader.count("hidden_size")
        heads = reader.divisor("n_head", of="the width", size=width)
        reader.exactly("n_inner", (None, 4 * width), default=None)
        return cls(
            num_layers=reader.count("n_layer"),
            embed_dim=width,
            num_heads=heads,
            vocab_size=reader.count("vocab_size"),
            norm_eps=reader.positive("layer_norm_epsilon"),
            lm_head=head,
            tie_embeddings=reader.flag("tie_word_embeddings"),
        )
