"""The configuration of LLaMA: its sizes, and how they are read from a config.json."""

from dataclasses import dataclass, replace

from models.errors import ConfigError
from models.family_config import FamilyConfig, check_positive
from models.hf_config import ConfigFields, Schema
from models.rotary import Rotary, read_rotary

# For each class that may have saved the file: whether it has a language model head.
ARCHITECTURES = {"LlamaForCausalLM": True, "LlamaModel": False}
SCHEMA = Schema(
    defaults={
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(FamilyConfig):
    """Sizes and constants of one LLaMA decoder.

    Attributes:
      num_layers: Number of blocks.
      embed_dim: Width of the hidden states.
      mlp_dim: Width inside the MLP.
      num_heads: Query heads.
      num_kv_heads: Key and value heads; divides num_heads.
      head_dim: Width of one head, even.
      vocab_size: Rows of the word embedding.
      max_seq_len: The longest sequence.
      norm_eps: Added to the mean square in every RMSNorm.
      rope_theta: Base of the rotary frequencies.
      rope_factor: The divisor of low frequencies in llama3's scaling; 1 leaves all as they are.
      rope_low: Wavelengths above rope_original_len / rope_low are divided in full.
      rope_high: Wavelengths below rope_original_len / rope_high are kept.
      rope_original_len: The longest sequence before scaling.
      lm_head: Whether there is a language model head.
      tie_embeddings: Whether the head is the word embedding.
    """

    schema = SCHEMA

    num_layers: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_seq_len: int
    norm_eps: float
    rope_theta: float
    rope_factor: float = 1.0
    rope_low: float = 1.0
    rope_high: float = 4.0
    rope_original_len: int = 8192
    lm_head: bool = True
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError unless the sizes fit together."""
        check_positive(self)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"LlamaConfig: num_heads is {self.num_heads} with {self.num_kv_heads} kv heads;"
                " the kv heads must divide it; change one of them"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"LlamaConfig: head_dim is {self.head_dim}; rotary positions turn pairs of"
                " features, so it is even; change it"
            )
        if self.rope_low >= self.rope_high:
            raise ConfigError(
                f"LlamaConfig: rope_low is {self.rope_low} with rope_high {self.rope_high};"
                " it must be the lower; correct them"
            )

    @property
    def rotary(self) -> Rotary:
        """The rotary positions."""
        return Rotary(
            theta=self.rope_theta,
            factor=self.rope_factor,
            low=self.rope_low,
            high=self.rope_high,
            original_len=self.rope_original_len,
        )

    @classmethod
    def llama3_8b(cls) -> "LlamaConfig":
        """LLaMA 3 8B: 32 layers x 4096, 8 kv heads."""
        sizes = {"num_layers": 32, "embed_dim": 4096, "mlp_dim": 14336, "vocab_size": 128256}
        heads = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
        return cls(**sizes, **heads, max_seq_len=8192, norm_eps=1e-5, rope_theta=500000.0)

    @classmethod
    def llama3_70b(cls) -> "LlamaConfig":
        """LLaMA 3 70B: 80 layers x 8192, 8 kv heads."""
        return replace(cls.llama3_8b(), num_layers=80, embed_dim=8192, mlp_dim=28672, num_heads=64)

    @classmethod
    def llama31_8b(cls) -> "LlamaConfig":
        """LLaMA 3.1 8B: LLaMA 3 8B with rope scaling for 131,072 tokens."""
        return replace(cls.llama3_8b(), max_seq_len=131072, rope_factor=8.0)

    @classmethod
    def llama31_70b(cls) -> "LlamaConfig":
        """LLaMA 3.1 70B: LLaMA 3 70B with rope scaling for 131,072 tokens."""
        return replace(cls.llama3_70b(), max_seq_len=131072, rope_factor=8.0)

    @classmethod
    def llama32_1b(cls) -> "LlamaConfig":
        """LLaMA 3.2 1B: 16 layers x 2048, head tied to the embedding."""
        return replace(
            cls.llama31_8b(),
            num_layers=16,
            embed_dim=2048,
            mlp_dim=8192,
            head_dim=64,
            rope_factor=32.0,
            tie_embeddings=True,
        )

    @classmethod
    def llama32_3b(cls) -> "LlamaConfig":
        """LLaMA 3.2 3B: 28 layers x 3072, head tied to the embedding."""
        return replace(cls.llama32_1b(), num_layers=28, embed_dim=3072, num_heads=24, head_dim=128)

    @classmethod
    def read(cls, reader: ConfigFields) -> "LlamaConfig":
        """Reads the fields as transformers 4 or 5 writes them."""
        head = ARCHITECTURES[reader.architecture(ARCHITECTURES, "LlamaForCausalLM")]
        reader.refuse("attention_bias", "mlp_bias", "add_cross_attention", "is_encoder_decoder")
        reader.exactly("hidden_act", ("silu", "swish"), default="silu")
        reader.exactly("pruned_heads", ({}, None), default=None)
        reader.exactly("partial_rotary_factor", (1.0, 1, None), default=None)
        # Slices matrix products over devices, with the same result.
        reader.ignore("is_decoder", "pretraining_tp")
        heads, width = reader.count("num_attention_heads"), reader.count("hidden_size")
        kv_heads = reader.count_or("num_key_value_heads", heads)
        if heads % kv_heads:
            allowed = f"it must divide num_attention_heads {heads}"
            raise reader.error("num_key_value_heads", str(kv_heads), allowed, "correct")
        if width % heads and not reader.has("head_dim"):
            allowed = f"without head_dim it must divide hidden_size {width}"
            raise reader.error("num_attention_heads", str(heads), allowed, "correct")
        rotary = read_rotary(reader)
        return cls(
            num_layers=reader.count("num_hidden_layers"),
            embed_dim=width,
            mlp_dim=reader.count("intermediate_size"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=reader.count_or("head_dim", width // heads),
            vocab_size=reader.count("vocab_size"),
            max_seq_len=reader.count("max_position_embeddings"),
            norm_eps=reader.positive("rms_norm_eps"),
            lm_head=head,
            tie_embeddings=reader.flag("tie_word_embeddings"),
            rope_theta=rotary.theta,
            rope_factor=rotary.factor,
            rope_low=rotary.low,
            rope_high=rotary.high,
            rope_original_len=rotary.original_len,
        )
