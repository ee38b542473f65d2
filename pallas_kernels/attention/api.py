"""The public attention functions: what a caller may pass, and which implementation answers."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments import check_arrays, number, whole
from pallas_kernels.attention import mosaic_gpu, xla
from pallas_kernels.dispatch import Implementation, run_kernel


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    causal: bool = False,
    window: int | None = None,
    lengths: Int[Array, " B"] | None = None,
    query_lengths: Int[Array, " B"] | None = None,
    query_starts: Int[Array, " B"] | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    bias: Float[Array, "_ N T S"] | None = None,
    key_bias: Float[Array, "B S"] | None = None,
    relative_rows: Float[Array, "R N H"] | None = None,
    relative_shift: Float[Array, "N H"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sm_budget: int | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N H"]:
    """softmax(cap(scale (q k^T + (q + shift) row^T)) - slope |i - j| + bias) v of keys that count.

    cap(x) is softcap tanh(x / softcap), or x where there is no softcap.

    The row of query t and key s is relative_rows[T - 1 - t + s], one for each difference of
    positions, as in Transformer-XL and Conformers; without such rows the term is 0. A query without
    a valid key gets zero. Query head n reads key-value head n // (N / K). Keys and values beyond a
    sequence's length do not count, but must be finite. The kernel computes scores and sums in f32
    and rounds the weights to the dtype of q.

    Args:
      q: Queries, f16 or bf16 for the kernel; query t stands at position query_starts + t.
      k: Keys; key s stands at position s.
      v: Values.
      causal: Whether a query sees only keys up to its own position.
      window: Number of last keys a query sees, its own position included; with causal only.
      lengths: Number of valid keys of each sequence; all if None. Clipped to 0 .. S.
      query_lengths: Number of valid queries of each sequence; all if None. The rows beyond are
        zero, and whole tiles of them cost nothing.
      query_starts: Position of query 0 of each sequence, with causal or alibi_slopes; 0 if None.
      alibi_slopes: Slope of each query head, computed inside from positions.
      bias: Added to the scaled scores; one for all sequences, or one each. Rounded to the dtype of
        q by the kernel.
      key_bias: Added to the scaled scores of each key for all queries, in f32. A key with -1e30 or
        less does not count, and such keys at the end of a sequence cost nothing. So padding in any
        place needs no bias of full size.
      relative_rows: A row for each difference of positions, from that of last query and first key
        to that of first query and last key: T + S - 1 rows. Further rows are not read; an even
        number costs no copy. The kernel, for H up to 128, computes these scores tile by tile and
        rounds them to the dtype of q.
      relative_shift: Added to queries in their products with relative_rows, not with keys; 0 if
        None.
      scale: Factor of the scores; 1 / sqrt(H) if None.
      softcap: Bound of the scaled scores, before biases and masks. The kernel uses the GPU's
        approximate tanh, with a relative error of 2^-11, a quarter of bfloat16's rounding.
      sm_budget: Number of SMs the kernel may fill; all if None. XLA takes no budget.
      implementation: "mosaic_gpu", "xla", or None for the best that can.

    Returns:
      The weighted values in the dtype of q.

    Raises:
      TypeError: A dtype does not fit.
      ValueError: Shapes or options do not fit, or the budget exceeds the device's SMs.
      NotImplementedError: The named implementation cannot do this.

    Source: Dao 2023 (FlashAttention-2), algorithm 1; Shah et al. 2024 (FlashAttention-3), algorithm
    2; Press et al. 2022 for ALiBi; Dai et al. 2019, section 3.3, for differences of positions;
    Gemma Team 2024 (Gemma 2), section 2, for the cap.
    """
    window = None if window is None else whole("attention", "window", window)
    check_attention(
        q, k, v, window, causal, (lengths, query_lengths, query_starts), alibi_slopes, bias
    )
    check_relative(q, k, query_starts, relative_rows, relative_shift)
    check_key_bias(q, k, key_bias)
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "scale": _check_scale(q, scale),
        "causal": causal,
        "window": window,
        "lengths": lengths,
        "query_lengths": query_lengths,
        "query_starts": query_starts,
        "alibi_slopes": alibi_slopes,
        "bias": bias,
        "key_bias": key_bias,
        "relative_rows": relative_rows,
        "relative_shift": relative_shift,
        "softcap": check_softcap("attention", softcap),
    }

    def launch(sms: int) -> Array:
        _require_kernel("attention", q)
        if relative_rows is not None and q.shape[3] > 128:
            raise NotImplementedError(
                f"attention(relative_rows, implementation='mosaic_gpu'): head size is {q.shape[3]};"
                " with scores by difference up to 128 fit; use implementation='xla'"
            )
        return _attention(**arguments, sms=sms)

    return run_kernel(
        "attention",
        launch=launch,
        plain=lambda: xla.attention_xla(**arguments),
        sm_budget=sm_budget,
        implementation=implementation,
        arguments=arguments,
    )


def attention_packed(
    q: Float[Array, "X N H"],
    k: Float[Array, "X K H"],
    v: Float[Array, "X K H"],
    offsets: Int[Array, " C"],
    *,
    causal: bool = False,
    window: int | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    scale: float | None = None,
    sm_budget: int | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "X N H"]:
    """Attention of each token over its own sequence; sequences follow each other without padding.

    Sequence i is rows offsets[i] .. offsets[i + 1] - 1 of q, k and v; the rows are known only when
    the program runs. The kernel does no work for padding, as there is none. XLA's form holds the
    scores of all pairs of tokens in memory.

    Args:
      q: Queries of all sequences, f16 or bf16 for the kernel.
      k: Keys.
      v: Values.
      offsets: First row of each sequence, starting with 0, then the end of the last. Rows beyond
        it must be finite; their results are zero. Offsets that decrease or exceed the rows are
        replaced by the nearest valid ones.
      causal: Whether a query sees only keys up to its own position.
      window: Number of last keys a query sees, its own position included; with causal only.
      alibi_slopes: Slope of each query head, computed inside from positions.
      scale: Factor of the scores; 1 / sqrt(H) if None.
      sm_budget: Number of SMs the kernel may fill; all if None. XLA takes no budget.
      implementation: "mosaic_gpu", "xla", or None for the best that can.

    Returns:
      The weighted values in the dtype of q.

    Raises:
      TypeError: A dtype does not fit.
      ValueError: Shapes or options do not fit, or the budget exceeds the device's SMs.
      NotImplementedError: The named implementation cannot do this.
    """
    window = None if window is None else whole("attention_packed", "window", window)
    check_attention_packed(q, k, v, offsets, window, causal, alibi_slopes)
    offsets = lax.cummax(jnp.clip(offsets.astype(jnp.int32).at[0].set(0), 0, q.shape[0]))
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "offsets": offsets,
        "scale": _check_scale(q, scale),
        "causal": causal,
        "window": window,
        "alibi_slopes": alibi_slopes,
    }

    def launch(sms: int) -> Array:
        _require_kernel("attention_packed", q)
        return _attention_packed(**arguments, sms=sms)

    return run_kernel(
        "attention_packed",
        launch=launch,
        plain=lambda: xla.attention_packed_xla(**arguments),
        sm_budget=sm_budget,
        implementation=implementation,
    )


# One launch is traced, lowered and compiled once for all its uses in a program.
_STATIC = ("scale", "causal", "window", "sms")
_attention = jax.jit(mosaic_gpu.attention, static_argnames=(*_STATIC, "softcap"))
_attention_packed = jax.jit(mosaic_gpu.attention_packed, static_argnames=_STATIC)


def check_attention_packed(q, k, v, offsets, window, causal, alibi_slopes) -> None:
    """Raises unless the operands of `attention_packed` fit together; see there."""
    check_arrays("attention_packed", {"q": q, "k": k, "v": v, "offsets": offsets})
    if q.ndim != 3 or k.ndim != 3:
        raise ValueError(
            f"attention_packed(q{q.shape}, k{k.shape}): wrong ranks; q is (tokens, N, H), k and v "
            "are (tokens, K, H); reshape them"
        )
    if q.shape[0] != k.shape[0]:
        raise ValueError(
            f"attention_packed(q{q.shape}, k{k.shape}): {q.shape[0]} and {k.shape[0]} tokens; a "
            "sequence's queries and keys are the same tokens; for others use attention()"
        )
    if offsets.ndim != 1 or len(offsets) < 2 or not jnp.issubdtype(offsets.dtype, jnp.integer):
        raise ValueError(
            f"attention_packed(offsets={offsets.dtype}{offsets.shape}): integers of shape (number "
            "of sequences + 1,); the first row of each, and the end of the last"
        )
    check_attention(
        q[None], k[None], v[None], window, causal, (None, None, None), alibi_slopes, None
    )


def check_attention(q, k, v, window, causal, counts, alibi_slopes, bias) -> None:
    """Raises unless the operands of `attention` fit together; see there."""
    names = ("lengths", "query_lengths", "query_starts")
    optional = {**dict(zip(names, counts, strict=True)), "alibi_slopes": alibi_slopes, "bias": bias}
    check_arrays("attention", {"q": q, "k": k, "v": v}, optional)
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        raise ValueError(
            f"attention(q{q.shape}, k{k.shape}, v{v.shape}): wrong ranks or unequal k and v; q is "
            "(B, T, N, H), k and v are (B, S, K, H); reshape them"
        )
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]) or 0 in q.shape + k.shape:
        raise ValueError(
            f"attention(q{q.shape}, k{k.shape}): batch or head size differ, or a dimension is "
            "empty; both have one B and one H; check the layout, heads come third"
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"attention(): {q.shape[2]} query heads over {k.shape[2]} key-value heads; N must be a "
            "multiple of K; check the number of heads"
        )
    if not jnp.issubdtype(q.dtype, jnp.floating) or not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"attention(): dtypes {q.dtype}, {k.dtype}, {v.dtype}; q, k and v share one floating "
            "dtype; cast them"
        )
    if window is not None and (not causal or window < 1):
        raise ValueError(
            f"attention(window={window}, causal={causal}): a window is at least 1 and causal; pass "
            "causal=True"
        )
    batch_size, num_queries, num_heads = q.shape[:3]
    for name, x in zip(names, counts, strict=True):
        if x is not None and (x.shape != (batch_size,) or not jnp.issubdtype(x.dtype, jnp.integer)):
            raise ValueError(
                f"attention({name}={x.dtype}{x.shape}): integers of shape ({batch_size},); one a "
                "sequence"
            )
    if alibi_slopes is not None and alibi_slopes.shape != (num_heads,):
        raise ValueError(
            f"attention(alibi_slopes{alibi_slopes.shape}): shape ({num_heads},); one slope a query "
            "head"
        )
    scores = (num_heads, num_queries, k.shape[1])
    if bias is not None and (
        bias.ndim != 4 or bias.shape[0] not in (1, batch_size) or bias.shape[1:] != scores
    ):
        raise ValueError(
            f"attention(bias{bias.shape}): the scores are {(batch_size, *scores)}; the first "
            "dimension may be 1, the others are whole; broadcast it"
        )


def check_relative(q, k, query_starts, rows, shift) -> None:
    """Raises unless rows by difference of positions fit the queries and keys of `attention`."""
    num_queries, num_heads, head_dim = q.shape[1:]
    if rows is None:
        if shift is not None:
            raise ValueError(
                f"attention(relative_shift{shift.shape}): there are no relative_rows; queries are "
                "shifted for these alone; pass both or neither"
            )
        return
    needed = num_queries + k.shape[1] - 1
    if rows.ndim != 3 or rows.shape[0] < needed or rows.shape[1:] != (num_heads, head_dim):
        raise ValueError(
            f"attention(relative_rows{rows.shape}): {num_queries} queries and {k.shape[1]} keys "
            f"need (at least {needed}, {num_heads}, {head_dim}); one row a difference and head"
        )
    if shift is not None and shift.shape != (num_heads, head_dim):
        raise ValueError(
            f"attention(relative_shift{shift.shape}): shape ({num_heads}, {head_dim}); one vector "
            "a query head"
        )
    if query_starts is not None:
        raise ValueError(
            "attention(relative_rows, query_starts): query 0 and key 0 have difference 0; rows "
            "already say what stands where; pass the rows of the queries' true positions instead"
        )


def check_key_bias(q, k, key_bias) -> None:
    """Raises unless a bias by key fits the keys of `attention`."""
    if key_bias is None:
        return
    check_arrays("attention", {"key_bias": key_bias})
    of_keys = (q.shape[0], k.shape[1])
    if key_bias.shape != of_keys or not jnp.issubdtype(key_bias.dtype, jnp.floating):
        raise ValueError(
            f"attention(key_bias={key_bias.dtype}{key_bias.shape}): floats of shape {of_keys}, one "
            "a key of each sequence, are allowed; what depends on queries or heads is a bias"
        )


def _check_scale(q: jax.Array, scale: float | None) -> float:
    if scale is None:
        return 1 / math.sqrt(q.shape[-1])
    scale = number("attention", "scale", scale)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(
            f"attention(scale={scale}): a positive number; the kernel takes maxima before it scales"
        )
    return scale


def check_softcap(kernel: str, softcap: float | None) -> float | None:
    """Returns the bound of the scores; raises ValueError unless it is positive and finite."""
    if softcap is None:
        return None
    softcap = number(kernel, "softcap", softcap)
    if not (math.isfinite(softcap) and softcap > 0):
        raise ValueError(
            f"{kernel}(softcap={softcap}): a positive finite number is allowed; pass None for "
            "scores without a bound"
        )
    return softcap


def _require_kernel(name: str, q: jax.Array) -> None:
    head_dim = q.shape[-1]
    if q.dtype not in (jnp.float16, jnp.bfloat16):
        raise NotImplementedError(
            f"{name}(implementation='mosaic_gpu'): dtype is {q.dtype}; WGMMA takes float16 and "
            "bfloat16; cast, or use implementation='xla'"
        )
    if head_dim % 8 or not 32 <= head_dim <= 256:
        raise NotImplementedError(
            f"{name}(implementation='mosaic_gpu'): head size is {head_dim}; multiples of 8 from "
            "32 to 256 fit; use implementation='xla'"
        )
