"""The GEMMs of the six models, at the batch sizes of their benchmarks."""

from dataclasses import dataclass

from pallas_kernels.gemm.activations import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmShape:
    """One GEMM of a model: (m, k) x (k, n) and its epilogue."""

    name: str
    m: int
    k: int
    n: int
    bias: bool = False
    residual: bool = False
    activation: Activation | None = None
    gated: bool = False
    scale: float = 1.0


def _layer(name, m, d, f, activation, *, bias=True, qkv=None, gated=False) -> list[GemmShape]:
    """The four GEMMs of a Transformer layer."""
    return [
        GemmShape(name=f"{name} qkv", m=m, k=d, n=qkv or 3 * d, bias=bias),
        GemmShape(name=f"{name} out", m=m, k=d, n=d, bias=bias, residual=True),
        GemmShape(name=f"{name} up", m=m, k=d, n=f, bias=bias, activation=activation, gated=gated),
        GemmShape(name=f"{name} down", m=m, k=f, n=d, bias=bias, residual=True),
    ]


BERT = _layer("bert-base 96x384", 36_864, 768, 3_072, "gelu")
VIT = _layer("vit-base 256x197", 50_432, 768, 3_072, "gelu")
GPT2 = _layer("gpt2-xl 16x512", 8_192, 1_600, 6_400, "gelu_tanh")
BLOOM = _layer("bloom-7b1 8x512", 4_096, 4_096, 16_384, "gelu_tanh")
LLAMA = _layer("llama3-8b 8x512", 4_096, 4_096, 14_336, "silu", bias=False, qkv=6_144, gated=True)
DECODE = [
    shape
    for rows in (512, 256, 128, 64)
    for shape in _layer(
        f"llama3-8b {rows}x1", rows, 4_096, 14_336, "silu", bias=False, qkv=6_144, gated=True
    )
]
CONFORMER = [
    GemmShape(name="conformer-l 32x512 qkv", m=16_384, k=512, n=1_536, bias=True),
    GemmShape(name="conformer-l 32x512 out", m=16_384, k=512, n=512, bias=True, residual=True),
    GemmShape(name="conformer-l 32x512 up", m=16_384, k=512, n=2_048, bias=True, activation="silu"),
    GemmShape(
        name="conformer-l 32x512 down",
        m=16_384,
        k=2_048,
        n=512,
        bias=True,
        residual=True,
        scale=0.5,
    ),
    GemmShape(
        name="conformer-l 32x512 glu", m=16_384, k=512, n=512, activation="sigmoid", gated=True
    ),
]
SHAPES = [*BERT, *VIT, *GPT2, *BLOOM, *LLAMA, *DECODE, *CONFORMER]
# A residual's result goes to a norm, and what has none reads one.
PRE_NORM = [*VIT, *GPT2, *BLOOM, *LLAMA, *DECODE[:4]]

# Sub-batches that share the weight of one GEMM: their rows, and the GEMM of all of them.
GROUPED = [
    ((3_072, 5_120), GPT2[1]),
    ((3_072, 5_120), GPT2[3]),
    ((200, 312), DECODE[1]),
]

# Rows that do not fill a tile, on fewer SMs than tiles: what sub-batches of a searched split look
# like.
RAGGED = [
    GemmShape(name="ragged rows", m=1_000, k=768, n=3_072, bias=True, activation="gelu"),
    GemmShape(name="ragged columns", m=2_008, k=1_600, n=1_600, bias=True, residual=True),
    GemmShape(name="odd rows", m=517, k=512, n=512, bias=True, residual=True),
    GemmShape(name="narrow columns", m=2_008, k=512, n=2_048, bias=True, activation="silu"),
    GemmShape(name="one tile", m=8, k=64, n=64, bias=True, activation="relu", scale=2.0),
    GemmShape(name="ragged gate", m=776, k=192, n=448, activation="silu", gated=True),
]
