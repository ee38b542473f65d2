"""The six rows of the model benchmark, and random weights that two frameworks make alike.

Plain Python: bench_peers.py, jax_process.py and torch_models.py all read it.

Weights and inputs are not drawn but hashed, so that JAX and PyTorch hold the same bits without a
copy: value i of the tensor with seed s is 2 * h(i, s) - 1, times the tensor's scale, with h the
upper 24 bits of the 32-bit finaliser of MurmurHash3 on i * 0x9E3779B1 + s.
"""

import zlib
from dataclasses import dataclass, replace

PEAK_FLOPS_PER_S = 790e12  # A large bf16 product on an H200, measured.


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model at one batch.

    Attributes:
      name: The name of the row, and of its model on every side.
      title: The name in tables.
      unit: The unit that is counted: images or sequences.
      batch_size: Images or sequences of one call.
      length: Tokens or frames of a sequence; for images it follows from their size.
      num_layers: Layers; this and all that follow are named as in the models' configurations.
      embed_dim: See there.
      mlp_dim: See there.
      num_heads: See there.
      num_kv_heads: See there.
      vocab_size: See there; 0 for what takes no tokens.
      image_size: See there; 0 for what takes no images.
      causal: Whether half of the attention is left out.
    """

    name: str
    title: str
    unit: str
    batch_size: int
    length: int
    num_layers: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int = 0
    image_size: int = 0
    causal: bool = False

    @property
    def flops(self) -> int:
        """FLOPs of a call's matrix products and attention, without embeddings and heads."""
        dim, tokens = self.embed_dim, self.batch_size * self.length
        kv = dim * self.num_kv_heads // self.num_heads
        weights = 2 * dim * dim + 2 * dim * kv + 2 * dim * self.mlp_dim
        attention = 4 * self.length * dim // (2 if self.causal else 1)
        if self.name == "llama":  # The gate.
            weights += dim * self.mlp_dim
        if self.name == "conformer":  # A second MLP, the convolution's Linears, scores by position.
            weights += 2 * dim * self.mlp_dim + 3 * dim * dim
            attention += 2 * (2 * self.length - 1) * dim
        return tokens * self.num_layers * (2 * weights + attention)

    @property
    def bound_s(self) -> float:
        """The time below which no program runs."""
        return self.flops / PEAK_FLOPS_PER_S


def _row(name, title, unit, batch, length, sizes, **rest) -> Row:
    layers, dim, mlp, heads = sizes
    rest = {"num_kv_heads": heads} | rest
    return Row(
        name=name,
        title=title,
        unit=unit,
        batch_size=batch,
        length=length,
        num_layers=layers,
        embed_dim=dim,
        mlp_dim=mlp,
        num_heads=heads,
        **rest,
    )


ROWS = {
    row.name: row
    for row in (
        _row("vit", "ViT-Base", "img", 256, 197, (12, 768, 3072, 12), image_size=224),
        _row("bert", "BERT-Base", "seq", 96, 384, (12, 768, 3072, 12), vocab_size=30522),
        _row("conformer", "Conformer-L", "seq", 32, 512, (17, 512, 2048, 8)),
        _row(
            "gpt2", "GPT2-XL", "seq", 16, 512, (48, 1600, 6400, 25), vocab_size=50257, causal=True
        ),
        _row(
            "bloom",
            "BLOOM-7B1",
            "seq",
            8,
            512,
            (30, 4096, 16384, 32),
            vocab_size=250880,
            causal=True,
        ),
        _row(
            "llama",
            "LLaMA3-8B",
            "seq",
            8,
            512,
            (32, 4096, 14336, 32),
            vocab_size=128256,
            causal=True,
            num_kv_heads=8,
        ),
    )
}


def get_row(name: str, *, tiny: bool) -> Row:
    """Returns a row, or a small model of its kind, to try the scripts without a GPU."""
    row = ROWS[name]
    if not tiny:
        return row
    return replace(
        row,
        batch_size=4,
        length=5 if row.image_size else 32,
        num_layers=2,
        embed_dim=128,
        mlp_dim=512 if name == "bloom" else 256,
        num_heads=2,
        num_kv_heads=1 if name == "llama" else 2,
        vocab_size=row.vocab_size and 509,
        image_size=row.image_size and 32,
    )


def seed_of(name: str) -> int:
    """Returns the seed of a tensor or an input from its name."""
    return zlib.crc32(name.encode())


def scale_of(name: str, num_axes: int) -> tuple[float, float]:
    """Returns (middle, scale) of a tensor's values.

    Gains and variances lie around 1, biases around 0; matrices have the spread of fresh weights.
    """
    last = name.rsplit(".", 1)[-1]
    if last in ("running_var", "weight") and num_axes == 1:
        return 1.0, 0.1
    return 0.0, (0.0346 if num_axes > 1 else 0.02)
