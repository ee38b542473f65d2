"""The norms of the six models, at the batch sizes of their benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NormShape:
    """One norm of a model over (rows, width); `centred` is LayerNorm, else RMSNorm."""

    name: str
    rows: int
    width: int
    centred: bool
    residual: bool = True
    bias: bool = True


SHAPES = [
    NormShape(name="bert-base 96x384", rows=36_864, width=768, centred=True),
    NormShape(name="vit-base 256x197", rows=50_432, width=768, centred=True),
    NormShape(name="gpt2-xl 16x512", rows=8_192, width=1_600, centred=True),
    NormShape(name="bloom-7b1 8x512", rows=4_096, width=4_096, centred=True),
    NormShape(name="llama3-8b 8x512", rows=4_096, width=4_096, centred=False, bias=False),
    NormShape(name="llama3-8b 512x1", rows=512, width=4_096, centred=False, bias=False),
    NormShape(name="conformer-l 32x512", rows=16_384, width=512, centred=True),
    NormShape(
        name="conformer-l 32x512, no residual",
        rows=16_384,
        width=512,
        centred=True,
        residual=False,
    ),
    NormShape(name="large 131072x4096", rows=131_072, width=4_096, centred=False, bias=False),
    NormShape(name="large 65536x2048", rows=65_536, width=2_048, centred=True),
]

# Shapes whose results are also quantised.
QUANTIZED = [SHAPES[0], SHAPES[2], SHAPES[4], SHAPES[7]]

# Widths at the edges of the layouts, rows that do not fill a chunk.
RAGGED = [
    NormShape(name="narrowest", rows=37, width=64, centred=True),
    NormShape(name="vectors of two", rows=1_001, width=1_984, centred=True),
    NormShape(name="vectors of four", rows=1_001, width=1_152, centred=False, bias=False),
    NormShape(name="wide, vectors of two", rows=333, width=2_304, centred=True),
    NormShape(name="widest", rows=333, width=16_384, centred=True),
    NormShape(name="widest, no residual", rows=77, width=16_384, centred=True, residual=False),
    NormShape(name="one row", rows=1, width=8_192, centred=False, bias=False),
]
