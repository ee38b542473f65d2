"""The decode attention of the three decoders, for tests and benchmarks alike."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeShape:
    """T queries a sequence over a cache of S keys; `lengths` full, or random from 0 to S."""

    name: str
    batch_size: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_tokens: int = 1
    alibi: bool = False
    page_size: int | None = None
    full: bool = True
    softcap: float | None = None

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values in 16 bits: what a step must read where the lengths are full."""
        return 4 * self.batch_size * self.num_keys * self.num_kv_heads * self.head_dim


def _shape(name, batch_size, num_keys, heads, kv_heads, head_dim, **terms) -> DecodeShape:
    return DecodeShape(
        name=name,
        batch_size=batch_size,
        num_keys=num_keys,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        **terms,
    )


MODELS = [
    _shape("llama3-8b 512x1024", 512, 1_024, 32, 8, 128),
    _shape("llama3-8b 512x1024, pages of 64", 512, 1_024, 32, 8, 128, page_size=64),
    _shape("llama3-8b 4x32768", 4, 32_768, 32, 8, 128),
    _shape("bloom-7b1 64x2048", 64, 2_048, 32, 32, 128, alibi=True),
    _shape("gpt2-xl 256x1024", 256, 1_024, 25, 25, 64),
]

# Lengths from nothing to all, parts without a key, several tokens, pages of each kind.
RAGGED = [
    _shape("one sequence", 1, 8_192, 32, 8, 128, full=False),
    _shape("one head", 5, 1_000, 16, 16, 64, full=False),
    _shape("four tokens", 3, 1_000, 8, 2, 128, num_tokens=4, full=False),
    _shape("three tokens", 3, 1_000, 8, 2, 128, num_tokens=3, full=False, alibi=True),
    _shape("eight tokens", 4, 512, 32, 8, 128, num_tokens=8, full=False),
    _shape("alibi", 64, 1_024, 32, 32, 128, num_tokens=2, alibi=True, full=False),
    _shape("softcap", 7, 1_000, 16, 8, 128, full=False, softcap=1.0),
    _shape("softcap, split, alibi", 2, 8_192, 8, 8, 64, full=False, softcap=2.0, alibi=True),
    _shape("pages of 16", 7, 1_024, 32, 8, 128, page_size=16, full=False),
    _shape("pages of 64", 300, 1_024, 32, 8, 128, page_size=64, full=False),
    _shape("pages of 256", 7, 1_024, 32, 8, 128, page_size=256, full=False, num_tokens=2),
    _shape("head 192", 4, 512, 8, 1, 192, full=False),
    _shape("head 256", 3, 512, 8, 2, 256, full=False),
]
SHAPES = [*MODELS, *RAGGED]
