"""The attention of models at their benchmarks' sizes, for tests and benchmarks alike."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """One attention: (B, T, N, H) queries over (B, S, K, H) keys, and the terms of its scores.

    With lengths, num_valid_keys is every sequence's; None: all keys where it is timed, else drawn.
    """

    name: str
    batch_size: int
    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool = False
    window: int | None = None
    lengths: bool = False
    num_valid_keys: int | None = None
    query_lengths: bool = False
    query_starts: bool = False
    alibi: bool = False
    bias_batch: int = 0
    key_bias: bool = False
    relative: bool = False
    softcap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedShape:
    """Sequences of several lengths without padding, and some rows that belong to none."""

    name: str
    lengths: tuple[int, ...]
    num_spare_rows: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool = False
    window: int | None = None
    alibi: bool = False

    @property
    def num_rows(self) -> int:
        """Rows of the queries."""
        return sum(self.lengths) + self.num_spare_rows

    @property
    def offsets(self) -> np.ndarray:
        """First row of each sequence, and the end of the last."""
        return np.cumsum([0, *self.lengths], dtype=np.int32)


def _packed(name, lengths, heads, head_dim, *, kv_heads=None, **terms) -> PackedShape:
    return PackedShape(
        name=f"packed {name}",
        lengths=tuple(map(int, lengths)),
        num_spare_rows=-sum(map(int, lengths)) % 128,
        num_heads=heads,
        num_kv_heads=kv_heads or heads,
        head_dim=head_dim,
        **terms,
    )


def _between(shortest: int, longest: int, number: int) -> np.ndarray:
    """Lengths at equal distances, in an order without a pattern."""
    lengths = np.linspace(shortest, longest, number).astype(np.int32)
    return np.random.default_rng(0).permutation(lengths)


def _square(name, batch_size, length, heads, head_dim, *, kv_heads=None, **terms) -> AttentionShape:
    return AttentionShape(
        name=name,
        batch_size=batch_size,
        num_queries=length,
        num_keys=length,
        num_heads=heads,
        num_kv_heads=kv_heads or heads,
        head_dim=head_dim,
        **terms,
    )


MODELS = [
    _square("vit-base 256x197", 256, 197, 12, 64),
    _square("vit-base 256x200, 197 valid", 256, 200, 12, 64, lengths=True, num_valid_keys=197),
    _square("bert-base 96x384", 96, 384, 12, 64, lengths=True),
    _square("bert-base 96x384, any keys", 96, 384, 12, 64, key_bias=True),
    _square("conformer-l 32x512", 32, 512, 8, 64, lengths=True, bias_batch=32),
    _square("conformer-l 32x512, relative", 32, 512, 8, 64, lengths=True, relative=True),
    _square("gpt2-xl 16x512", 16, 512, 25, 64, causal=True),
    _square("bloom-7b1 8x512", 8, 512, 32, 128, causal=True, alibi=True),
    _square("llama3-8b 8x512", 8, 512, 32, 128, kv_heads=8, causal=True),
]

# Another family, with capped scores: Gemma 2, section 2.
CAPPED = [
    _square("gemma2-9b 4x2048", 4, 2048, 16, 256, kv_heads=8, causal=True, softcap=50.0),
    _square("gemma2-27b 4x2048", 4, 2048, 32, 128, kv_heads=16, causal=True, softcap=50.0),
]

# 16,384 tokens of 2,048 features, as the length grows.
SWEEP = [
    _square(
        f"{length} x {heads} x {head_dim}{', causal' if causal else ''}",
        tokens // length,
        length,
        heads,
        head_dim,
        causal=causal,
    )
    for heads, head_dim in ((32, 64), (16, 128))
    for length, tokens in ((384, 18_432), (1_024, 16_384), (2_048, 16_384), (4_096, 16_384))
    for causal in (False, True)
]

# Lengths that fill no tile, heads that fill no swizzle, terms in combination.
RAGGED = [
    _square("odd length", 2, 197, 4, 64),
    _square("odd length, taken as packed", 8, 197, 4, 64),
    _square("odd length, taken as packed, causal", 8, 333, 4, 128, causal=True, lengths=True),
    _square("three consumers", 2, 384, 4, 64),
    AttentionShape(
        name="chunk of a prompt",
        batch_size=2,
        num_queries=333,
        num_keys=777,
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,
        causal=True,
        lengths=True,
        query_starts=True,
    ),
    _square("padded batch", 3, 640, 4, 64, lengths=True, query_lengths=True),
    _square("padded causal batch", 3, 640, 4, 128, causal=True, lengths=True, query_lengths=True),
    _square("window", 2, 640, 4, 64, causal=True, window=100, lengths=True),
    _square("window, 128", 2, 640, 4, 128, causal=True, window=300),
    _square("alibi both ways", 2, 640, 4, 64, alibi=True),
    _square("alibi, lengths", 2, 640, 4, 128, causal=True, alibi=True, lengths=True),
    _square("bias each", 2, 640, 4, 64, bias_batch=2),
    _square("bias for all", 2, 640, 4, 128, causal=True, bias_batch=1, lengths=True),
    _square("keys that count", 2, 640, 4, 64, key_bias=True),
    _square("keys that count, odd", 3, 333, 4, 64, key_bias=True, lengths=True),
    _square("keys that count, causal", 2, 640, 4, 128, kv_heads=2, causal=True, key_bias=True),
    _square("keys that count, alibi", 2, 512, 4, 128, causal=True, alibi=True, key_bias=True),
    _square("keys that count, bias", 2, 640, 4, 128, key_bias=True, bias_batch=1),
    _square("softcap", 2, 640, 4, 64, softcap=2.0),
    _square("softcap, odd length, taken as packed", 8, 197, 4, 64, softcap=2.0),
    _square("softcap, causal", 2, 640, 4, 128, kv_heads=2, causal=True, softcap=1.0, lengths=True),
    _square("softcap, bias, keys", 2, 512, 4, 64, softcap=2.0, bias_batch=2, key_bias=True),
    _square("softcap, relative", 2, 333, 4, 64, softcap=2.0, relative=True),
    _square("relative", 2, 640, 4, 64, relative=True),
    _square("relative, 500", 2, 500, 4, 32, relative=True, lengths=True),
    _square("relative, causal", 2, 333, 4, 64, kv_heads=2, relative=True, causal=True),
    _square("relative, 128", 2, 640, 4, 128, relative=True, lengths=True, query_lengths=True),
    AttentionShape(
        name="relative, more keys",
        batch_size=2,
        num_queries=200,
        num_keys=333,
        num_heads=4,
        num_kv_heads=4,
        head_dim=96,
        lengths=True,
        relative=True,
    ),
    _square("all terms", 2, 512, 4, 256, causal=True, window=77, alibi=True, bias_batch=1),
    _square("head 32", 1, 200, 2, 32),
    _square("head 40", 1, 200, 2, 40, causal=True),
    _square("head 72", 1, 200, 2, 72, kv_heads=1, lengths=True),
    _square("head 96", 1, 200, 2, 96),
    _square("head 192", 1, 200, 2, 192, causal=True),
    _square("head 256", 1, 200, 2, 256),
]
# Lengths known only when the program runs; the longest takes part in padding where there is any.
PACKED = [
    _packed("bert-base 96x(64..384)", _between(64, 384, 96), 12, 64),
    _packed("gpt2-xl 24x(64..1024)", _between(64, 1024, 24), 25, 64, causal=True),
    _packed("llama3-8b 16x(128..2048)", _between(128, 2048, 16), 32, 128, kv_heads=8, causal=True),
]
_FEW = (5, 0, 123, 200, 3, 8, 333, 1)
PACKED_RAGGED = [
    _packed("ragged", _FEW, 4, 64),
    _packed("ragged, 128", _FEW, 4, 128, kv_heads=2),
    _packed("ragged, causal", _FEW, 4, 64, causal=True),
    _packed("ragged, causal, 128", _FEW, 4, 128, kv_heads=2, causal=True),
    _packed("window", _FEW, 4, 64, causal=True, window=100),
    _packed("alibi", _FEW, 4, 128, causal=True, alibi=True),
    _packed("alibi both ways", _FEW, 4, 64, alibi=True),
    _packed("head 40", _FEW, 2, 40),
    _packed("head 256", _FEW, 2, 256, causal=True),
    _packed("one sequence", (520,), 2, 64),
]
SHAPES = [*MODELS, *CAPPED, *SWEEP, *RAGGED]
