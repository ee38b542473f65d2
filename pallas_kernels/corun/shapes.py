"""Pairs of a GEMM and bandwidth-bound work of another sub-batch, for tests and benchmarks."""

from dataclasses import dataclass

from pallas_kernels.corun.tiles import predicted_s
from pallas_kernels.decode_attention.shapes import DecodeShape
from pallas_kernels.gemm.activations import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class CorunShape:
    """A GEMM (m, k) x (k, n) beside a norm, or column sums, of (rows, width)."""

    name: str
    m: int
    k: int
    n: int
    rows: int
    width: int
    partner: str
    activation: Activation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPairShape:
    """A GEMM (m, k) x (k, n) beside the attention of some sequences of a cache.

    Those from first_sequence on, num_sequences of them. A gated GEMM has no bias and residual, any
    other has both.
    """

    name: str
    m: int
    k: int
    n: int
    attention: DecodeShape
    first_sequence: int
    num_sequences: int
    gated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLayerShape:
    """A decode step's layer of a model with gated MLP, for two halves of a batch."""

    name: str
    batch_size: int
    num_keys: int
    embed_dim: int = 4_096
    mlp_dim: int = 14_336
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """K and N of each GEMM; "up" has a gate of the same shape."""
        d, heads = self.embed_dim, self.num_heads * self.head_dim
        return {
            "qkv": (d, heads + 2 * self.num_kv_heads * self.head_dim),
            "out": (heads, d),
            "up": (d, self.mlp_dim),
            "down": (self.mlp_dim, d),
        }

    def parts(self, ctas: int, multiple: int = 16) -> dict[str, tuple[int, int]]:
        """First and number of the other half's sequences that run beside each GEMM, by its time."""
        half, first, found = self.batch_size // 2, 0, {}
        seconds = {
            name: predicted_s(half, n, k, gated=name == "up", ctas=ctas)
            for name, (k, n) in self.products.items()
        }
        passed, total = 0.0, sum(seconds.values())
        for name, own in seconds.items():
            passed += own
            last = round(half * passed / total / multiple) * multiple
            found[name] = (first, last - first)
            first = last
        return found


SHAPES = [
    CorunShape(
        name="decode-like pair: gate and up beside 2 GB",
        m=1_024,
        k=4_096,
        n=28_672,
        rows=61_440 * 128,
        width=128,
        partner="sums",
    ),
    CorunShape(
        name="bert-base: up of 48 sequences beside norm of 48",
        m=18_432,
        k=768,
        n=3_072,
        rows=18_432,
        width=768,
        partner="norm",
        activation="gelu",
    ),
    CorunShape(
        name="bloom-7b1: up of 4 sequences beside norm of 4",
        m=2_048,
        k=4_096,
        n=16_384,
        rows=2_048,
        width=4_096,
        partner="norm",
        activation="gelu_tanh",
    ),
]

RAGGED = [
    CorunShape(
        name="fewer tiles than CTAs", m=264, k=192, n=320, rows=64, width=128, partner="sums"
    ),
    CorunShape(
        name="ragged norm",
        m=1_000,
        k=768,
        n=1_600,
        rows=1_003,
        width=512,
        partner="norm",
        activation="gelu",
    ),
]


_GROUPED = DecodeShape(
    name="grouped",
    batch_size=9,
    num_keys=1_000,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    full=False,
)
ATTENTION_PAIRS = [
    AttentionPairShape(
        name="grouped heads, some sequences",
        m=264,
        k=512,
        n=640,
        attention=_GROUPED,
        first_sequence=2,
        num_sequences=5,
    ),
    AttentionPairShape(
        name="gated, more tiles than CTAs",
        m=520,
        k=256,
        n=1_600,
        attention=_GROUPED,
        first_sequence=0,
        num_sequences=9,
        gated=True,
    ),
    AttentionPairShape(
        name="one head, alibi",
        m=1_000,
        k=192,
        n=1_600,
        attention=DecodeShape(
            name="alibi",
            batch_size=5,
            num_keys=520,
            num_heads=16,
            num_kv_heads=16,
            head_dim=64,
            num_tokens=2,
            alibi=True,
            full=False,
        ),
        first_sequence=1,
        num_sequences=4,
    ),
]

DECODE_LAYERS = [
    DecodeLayerShape(name="llama3-8b 1024x512", batch_size=1_024, num_keys=512),
    DecodeLayerShape(name="llama3-8b 768x512", batch_size=768, num_keys=512),
    DecodeLayerShape(name="llama3-8b 512x1024", batch_size=512, num_keys=1_024),
    DecodeLayerShape(name="llama3-8b 256x2048", batch_size=256, num_keys=2_048),
]
