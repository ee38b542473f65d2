"""The public decode attention: what a caller may pass, and which implementation answers."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments import check_arrays, number, whole
from pallas_kernels.attention.api import check_softcap
from pallas_kernels.decode_attention import mosaic_gpu, xla
from pallas_kernels.dispatch import Implementation, run_kernel


def decode_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "_ _ K H"],
    v: Float[Array, "_ _ K H"],
    lengths: Int[Array, " B"],
    *,
    page_table: Int[Array, "B M"] | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    first_sequence: int = 0,
    sm_budget: int | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N H"]:
    """Attention of the last T queries of each sequence over its KV cache, which is read once.

    Query t of a sequence has position lengths - T + t and sees the keys up to its own; a query
    without a key gets zero. Query head n reads key-value head n // (N / K). Entries of the cache
    beyond a length do not count, but must be finite.

    Args:
      q: Queries, f16 or bf16 for the kernel; T times N / K at most 32 there.
      k: Keys (B, S, K, H); with a page table a pool (pages, page size, K, H).
      v: Values, in the layout of the keys.
      lengths: Number of valid keys of each sequence, including those of the T queries. Clipped to
        0 .. S.
      page_table: Pages of each sequence, in order; entries beyond its length are clipped into the
        pool and not used.
      alibi_slopes: Slope of each query head, computed inside from positions.
      scale: Factor of the scores; 1 / sqrt(H) if None.
      softcap: Bound of the scaled scores: they become softcap tanh(score / softcap) before slopes
        are applied. The kernel's tanh has a relative error of 2^-11.
      first_sequence: The sequence of a contiguous cache that is the first of q, if the cache holds
        more sequences than q. So a batch is attended to in parts without copies.
      sm_budget: Number of SMs the kernel may fill; all if None. 48 read nearly as fast as all. XLA
        takes no budget.
      implementation: "mosaic_gpu", "xla", or None for the best that can.

    Returns:
      The weighted values in the dtype of q.

    Raises:
      TypeError: A dtype does not fit.
      ValueError: Shapes do not fit, or the budget exceeds the device's SMs.
      NotImplementedError: The named implementation cannot do this.

    Source: Dao et al. 2023 (Flash-Decoding) for the split caches; Kwon et al. 2023 (PagedAttention)
    for the pages.
    """
    first_sequence = whole("decode_attention", "first_sequence", first_sequence)
    check_decode_attention(q, k, v, lengths, page_table, alibi_slopes, first_sequence)
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "lengths": lengths,
        "scale": check_scale(q, scale),
        "softcap": check_softcap("decode_attention", softcap),
        "page_table": page_table,
        "alibi_slopes": alibi_slopes,
        "first_sequence": first_sequence,
    }

    def launch(sms: int) -> Array:
        _require_kernel(q)
        return _decode_attention(**arguments, sms=sms)

    return run_kernel(
        "decode_attention",
        launch=launch,
        plain=lambda: xla.decode_attention_xla(**arguments),
        sm_budget=sm_budget,
        implementation=implementation,
        arguments=arguments,
    )


# One launch is traced, lowered and compiled once for all its uses in a program.
_decode_attention = jax.jit(
    mosaic_gpu.decode_attention, static_argnames=("scale", "softcap", "first_sequence", "sms")
)


def check_decode_attention(
    q, k, v, lengths, page_table, alibi_slopes, first_sequence: int = 0
) -> None:
    """Raises unless the operands of `decode_attention` fit together; see there."""
    needed = {"q": q, "k": k, "v": v, "lengths": lengths}
    check_arrays(
        "decode_attention", needed, {"page_table": page_table, "alibi_slopes": alibi_slopes}
    )
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or 0 in q.shape + k.shape:
        raise ValueError(
            f"decode_attention(q{q.shape}, k{k.shape}, v{v.shape}): wrong ranks, empty, or unequal "
            "k and v; q is (B, T, N, H), k and v are (B, S, K, H) or (pages, page size, K, H); "
            "reshape them"
        )
    batch_size, num_tokens, num_heads, head_dim = q.shape
    num_keys = k.shape[1] if page_table is None else page_table.shape[-1] * k.shape[1]
    if k.shape[3] != head_dim:
        raise ValueError(
            f"decode_attention(q{q.shape}, k{k.shape}): the head sizes differ; both have one H; "
            "correct q or k"
        )
    _check_sequences(batch_size, k.shape, page_table, first_sequence)
    if num_heads % k.shape[2]:
        raise ValueError(
            f"decode_attention(): {num_heads} query heads over {k.shape[2]} key-value heads; N "
            "must be a multiple of K; check the number of heads"
        )
    if num_tokens > num_keys:
        raise ValueError(
            f"decode_attention(): {num_tokens} query tokens and room for {num_keys} keys; the "
            "cache holds the new tokens too; write them first"
        )
    if not jnp.issubdtype(q.dtype, jnp.floating) or not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"decode_attention(): dtypes {q.dtype}, {k.dtype}, {v.dtype}; q, k and v share one "
            "floating dtype; cast them"
        )
    _check_tables(batch_size, num_heads, lengths, page_table, alibi_slopes)


def check_scale(q, scale: float | None) -> float:
    """Returns the factor of the scores; raises ValueError unless it is positive and finite."""
    if scale is None:
        return 1 / math.sqrt(q.shape[-1])
    scale = number("decode_attention", "scale", scale)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(
            f"decode_attention(scale={scale}): the kernel takes maxima before it scales; a "
            "positive finite number is allowed; correct it"
        )
    return scale


def _check_sequences(batch_size: int, cache, page_table, first: int) -> None:
    if page_table is not None and first:
        raise ValueError(
            f"decode_attention(first_sequence={first}): with a page table, which lists pages of "
            "q's sequences alone; 0 is allowed; pass those rows of the table"
        )
    if page_table is None and not 0 <= first <= cache[0] - batch_size:
        raise ValueError(
            f"decode_attention(first_sequence={first}): q has {batch_size} sequences, the cache "
            f"{cache[0]}; q's must be among them; correct first_sequence, or pass page_table if "
            "the cache is paged"
        )


def _check_tables(batch_size, num_heads, lengths, page_table, alibi_slopes) -> None:
    if lengths.shape != (batch_size,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"decode_attention(lengths={lengths.dtype}{lengths.shape}): integers of shape "
            f"({batch_size},); one a sequence"
        )
    if page_table is not None and (
        page_table.ndim != 2
        or page_table.shape[0] != batch_size
        or not jnp.issubdtype(page_table.dtype, jnp.integer)
    ):
        raise ValueError(
            f"decode_attention(page_table={page_table.dtype}{page_table.shape}): integers of shape "
            f"({batch_size}, pages of a sequence); one row a sequence"
        )
    if alibi_slopes is not None and alibi_slopes.shape != (num_heads,):
        raise ValueError(
            f"decode_attention(alibi_slopes{alibi_slopes.shape}): shape ({num_heads},); one slope "
            "a query head"
        )


def _require_kernel(q: jax.Array) -> None:
    if q.dtype not in (jnp.float16, jnp.bfloat16):
        raise NotImplementedError(
            f"decode_attention(implementation='mosaic_gpu'): dtype is {q.dtype}; WGMMA takes "
            "float16 and bfloat16; cast, or use implementation='xla'"
        )
