"""The configuration of BERT: its sizes, and how they are read from a config.json."""

from dataclasses import dataclass, replace
from typing import Literal

from models.family_config import FamilyConfig, check_choice, check_heads, check_positive
from models.hf_config import ConfigFields, Schema
from models.layers import ACTIVATIONS, HUGGING_FACE_ACTIVATIONS

# The classes that may have saved a file, and those whose files always hold a head.
POOLER, MASKED_LM = "pooler", "masked_lm"
ARCHITECTURES: dict[str, frozenset[str]] = {
    "BertModel": frozenset(),
    "BertForMaskedLM": frozenset({MASKED_LM}),
    "BertForQuestionAnswering": frozenset(),
    "BertForTokenClassification": frozenset(),
    "BertForPreTraining": frozenset({POOLER, MASKED_LM}),
    "BertForNextSentencePrediction": frozenset({POOLER}),
    "BertForSequenceClassification": frozenset({POOLER}),
    "BertForMultipleChoice": frozenset({POOLER}),
}
SCHEMA = Schema(
    defaults={
        "hidden_act": "gelu",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "tie_word_embeddings": True,
        "type_vocab_size": 2,
        "vocab_size": 30522,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig(FamilyConfig):
    """Sizes and constants of one BERT encoder.

    Attributes:
      num_layers: Number of blocks.
      embed_dim: Width of the hidden states.
      mlp_dim: Width inside the MLP.
      num_heads: Attention heads; divides embed_dim.
      vocab_size: Rows of the word embedding.
      max_seq_len: Rows of the position embedding, the longest sequence.
      num_token_types: Rows of the token type embedding.
      norm_eps: Added to the variance in every LayerNorm.
      activation: GELU in its exact form, "gelu", or its tanh approximation, "gelu_tanh".
      pooler: Whether there is a pooler on the first token.
      masked_lm: Whether there is a head that predicts masked tokens.
    """

    schema = SCHEMA

    num_layers: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    vocab_size: int
    max_seq_len: int
    num_token_types: int
    norm_eps: float
    activation: Literal["gelu", "gelu_tanh"] = "gelu"
    pooler: bool = True
    masked_lm: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError unless the sizes fit together."""
        check_positive(self)
        check_heads(self)
        check_choice(self, "activation", ACTIVATIONS)

    @classmethod
    def base(cls) -> "BertConfig":
        """BERT-Base: 12 layers x 768."""
        return cls(
            num_layers=12,
            embed_dim=768,
            mlp_dim=3072,
            num_heads=12,
            vocab_size=30522,
            max_seq_len=512,
            num_token_types=2,
            norm_eps=1e-12,
        )

    @classmethod
    def large(cls) -> "BertConfig":
        """BERT-Large: 24 layers x 1024."""
        return replace(cls.base(), num_layers=24, embed_dim=1024, mlp_dim=4096, num_heads=16)

    @classmethod
    def minilm(cls) -> "BertConfig":
        """MiniLM-L6: 6 layers x 384 (Wang et al. 2020, as in all-MiniLM-L6-v2)."""
        return replace(cls.base(), num_layers=6, embed_dim=384, mlp_dim=1536)

    @classmethod
    def read(cls, reader: ConfigFields) -> "BertConfig":
        """Reads everything but the heads, which are settled when the tensors are known."""
        reader.architecture(ARCHITECTURES, "BertModel")
        reader.refuse("is_decoder", "add_cross_attention", "is_encoder_decoder")
        reader.exactly("position_embedding_type", ("absolute",), default="absolute")
        reader.exactly("pruned_heads", ({}, None), default=None)
        width = reader.count("hidden_size")
        return cls(
            num_layers=reader.count("num_hidden_layers"),
            embed_dim=width,
            mlp_dim=reader.count("intermediate_size"),
            num_heads=reader.divisor("num_attention_heads", of="hidden_size", size=width),
            vocab_size=reader.count("vocab_size"),
            max_seq_len=reader.count("max_position_embeddings"),
            num_token_types=reader.count("type_vocab_size"),
            norm_eps=reader.positive("layer_norm_eps"),
            activation=reader.one_of("hidden_act", HUGGING_FACE_ACTIVATIONS),
        )
