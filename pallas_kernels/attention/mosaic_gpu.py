"""Attention forward on Hopper: turns a call into the operands of the kernel (kernel.py).

Not here: the choice of the implementation and the checks of a caller's arguments (api.py).
"""

from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import items
from pallas_kernels.attention.places import Given
from pallas_kernels.attention.tile import ALIGNMENT, NEVER, Problem, Tile, choose_tile
from pallas_kernels.mosaic import Deferred

if TYPE_CHECKING:
    from pallas_kernels.attention import kernel
else:  # The layouts in it are Mosaic's.
    kernel = Deferred("pallas_kernels.attention.kernel")


def _pad(x: Array, axis: int, multiple: int) -> Array:
    missing = -x.shape[axis] % multiple
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)]) if missing else x


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    scale: float,
    causal: bool,
    window: int | None,
    lengths: Int[Array, " B"] | None,
    query_lengths: Int[Array, " B"] | None,
    query_starts: Int[Array, " B"] | None,
    alibi_slopes: Float[Array, " N"] | None,
    bias: Float[Array, "_ N T S"] | None,
    key_bias: Float[Array, "B S"] | None,
    relative_rows: Float[Array, "R N H"] | None,
    relative_shift: Float[Array, "N H"] | None,
    softcap: float | None,
    sms: int,
    tile: Tile | None = None,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Runs the kernel; arguments as in api.attention, checked there.

    TMA and WGMMA want T and S in multiples of 8 and H in multiples of 16; other sizes are padded by
    a copy. If T = S is no such multiple but B T is, the sequences are taken as packed.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      scale: Factor of the scores.
      causal: Whether a query sees only keys up to its own position.
      window: Number of last keys a query sees.
      lengths: Number of valid keys.
      query_lengths: Number of valid queries.
      query_starts: Position of the first query among the keys.
      alibi_slopes: Slope of each query head.
      bias: Added to the scaled scores.
      key_bias: Added to the scaled scores of each key.
      relative_rows: A row for each difference of positions.
      relative_shift: Added to queries in their products with relative_rows.
      softcap: Bound of the scaled scores before biases are added.
      sms: Size of the grid.
      tile: The tile; chosen by shape if None.
      interpret: Replaces what jax's interpreter lacks; for tests on a CPU.

    Returns:
      The attention output.

    Raises:
      NotImplementedError: A bias whose T or S is no multiple of 8, or a tile that does not fit.
    """
    b, t, n, h = q.shape
    s, groups = k.shape[1:3]
    if bias is not None and (t % ALIGNMENT or s % ALIGNMENT):
        raise NotImplementedError(
            f"attention(implementation='mosaic_gpu'): bias of {t} x {s}; TMA reads rows and "
            "columns in multiples of 8; pad them or use implementation='xla'"
        )
    alone = query_lengths is None and query_starts is None and bias is None
    alone &= relative_rows is None and key_bias is None
    if alone and t == s and t % ALIGNMENT and b * t % ALIGNMENT == 0 and h % 64 == 0:
        whole = np.full(b, t, np.int32)
        out = _attend_packed(
            *(x.reshape(b * t, -1, h) for x in (q, k, v)),
            starts=np.arange(b, dtype=np.int32) * t,
            lengths=whole,
            keys=whole if lengths is None else jnp.clip(lengths, 0, t),
            scale=scale,
            causal=causal,
            window=window,
            alibi_slopes=alibi_slopes,
            softcap=softcap,
            sms=sms,
            tile=tile,
            interpret=interpret,
        )
        return out.reshape(q.shape)
    q, k, v = (_pad(_pad(x, 1, ALIGNMENT), 3, 16) for x in (q, k, v))
    valid_keys = _cast(lengths, jnp.int32)
    if lengths is None and (k.shape[1] != s or relative_rows is not None):
        # With rows of differences ptxas finds registers for all only where the last tile is masked.
        valid_keys = np.full(b, s, np.int32)
    problem = Problem(
        batch_size=b,
        num_queries=q.shape[1],
        num_keys=k.shape[1],
        num_heads=n,
        num_kv_heads=groups,
        head_dim=q.shape[3],
        scale=scale,
        causal=causal,
        window=window,
        has_lengths=valid_keys is not None or key_bias is not None,
        has_query_lengths=query_lengths is not None,
        has_starts=query_starts is not None,
        has_alibi=alibi_slopes is not None,
        bias_batch=0 if bias is None else bias.shape[0],
        has_key_bias=key_bias is not None,
        has_relative=relative_rows is not None,
        softcap=softcap,
    )
    tile = choose_tile(problem) if tile is None else tile
    sms = min(sms, items.num_items(problem, tile))
    rows = None
    if relative_rows is not None:
        # Query 0 and key 0 meet the last row of the query tiles. Beyond its rows TMA reads zeros.
        in_front = items.num_tiles(problem, tile) * tile.block_q - t
        rows = relative_rows.astype(q.dtype)
        if in_front:
            rows = jnp.pad(rows, ((in_front, 0), (0, 0), (0, 0)))
        rows = _pad(_pad(rows, 0, ALIGNMENT), 2, 16)
        relative_shift = jnp.zeros((n, h)) if relative_shift is None else relative_shift
        relative_shift = _pad(relative_shift, 1, 16)
    biased = None
    if key_bias is not None:
        valid_keys, key_bias, biased = _by_tiles(key_bias, valid_keys, problem.unit, tile)
    given = Given(
        q=q,
        k=k,
        v=v,
        lengths=valid_keys,
        query_lengths=_cast(query_lengths, jnp.int32),
        starts=_cast(query_starts, jnp.int32),
        slopes=_cast(alibi_slopes, jnp.float32),
        bias=_cast(bias, q.dtype),
        key_bias=key_bias,
        key_biased=biased,
        rows=rows,
        shift=relative_shift,
        dealt=items.deal(problem, tile, sms) if causal else None,
    )
    return kernel.launch(problem, tile, given, sms, interpret)[:, :t, :, :h]


def _by_tiles(
    key_bias: Float[Array, "B S"], lengths: Array | np.ndarray | None, unit: float, tile: Tile
) -> tuple[Int[Array, " B"], Float[Array, "B _ _"], Int[Array, "B _"]]:
    """Turns a bias by key into operands of the kernel; most keys have none.

    Returns:
      The number of keys of each sequence up to the last valid one; the bias by key tiles, in the
      units of the softmax; whether each tile has any bias.
    """
    key = jnp.arange(key_bias.shape[1], dtype=jnp.int32)[None]
    counts = key_bias > NEVER
    if lengths is not None:
        counts &= key < lengths[:, None]
    ends = jnp.max(jnp.where(counts, key + 1, 0), axis=1)
    bias = jnp.where(key < ends[:, None], key_bias.astype(jnp.float32) / unit, 0.0)
    bias = _pad(bias, 1, tile.block_kv).reshape(len(bias), -1, tile.block_kv)
    return ends, bias, jnp.any(bias != 0, axis=2).astype(jnp.int32)


def _cast(x: Array | np.ndarray | None, dtype) -> Array | np.ndarray | None:
    return None if x is None else x.astype(dtype)


def attention_packed(
    q: Float[Array, "X N H"],
    k: Float[Array, "X K H"],
    v: Float[Array, "X K H"],
    *,
    offsets: Int[Array, " C"],
    scale: float,
    causal: bool,
    window: int | None,
    alibi_slopes: Float[Array, " N"] | None,
    sms: int,
    tile: Tile | None = None,
    interpret: bool = False,
) -> Float[Array, "X N H"]:
    """Runs the kernel on sequences that follow one another; arguments as in api.attention_packed.

    TMA starts at multiples of 8 rows: an item starts up to 7 rows early, which are masked, and
    where a tile has rows of others it is stored by smaller copies. The number of tokens is padded
    to a multiple of 8 and the head size to one of 64, by copies.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      offsets: First token of each sequence and the end of the last; 0, then none smaller than the
        one before, and none beyond the tokens.
      scale: Factor of the scores.
      causal: Whether a query sees only keys up to its own position.
      window: Number of last keys a query sees.
      alibi_slopes: Slope of each query head.
      sms: Size of the grid.
      tile: The tile; chosen by shape if None.
      interpret: Replaces what jax's interpreter lacks; for tests on a CPU.

    Returns:
      The attention output.

    Raises:
      NotImplementedError: A tile that does not fit.
    """
    # The tokens beyond the last offset are one more sequence, without keys: its rows get zero.
    lengths = jnp.diff(offsets, append=len(q))
    return _attend_packed(
        q,
        k,
        v,
        starts=offsets,
        lengths=lengths,
        keys=lengths.at[-1].set(0),
        scale=scale,
        causal=causal,
        window=window,
        alibi_slopes=alibi_slopes,
        softcap=None,
        sms=sms,
        tile=tile,
        interpret=interpret,
    )


def _attend_packed(
    q,
    k,
    v,
    *,
    starts,
    lengths,
    keys,
    scale,
    causal,
    window,
    alibi_slopes,
    softcap,
    sms,
    tile,
    interpret,
):
    """Attends in sequences of any starts and lengths that together cover all tokens once.

    `keys` is the number of each sequence's tokens that count as keys.
    """
    total, n, h = q.shape
    q, k, v = (_pad(_pad(x, 0, ALIGNMENT), 2, 64)[None] for x in (q, k, v))
    problem = Problem(
        batch_size=1,
        num_queries=q.shape[1],
        num_keys=q.shape[1],
        num_heads=n,
        num_kv_heads=k.shape[2],
        head_dim=q.shape[3],
        scale=scale,
        causal=causal,
        window=window,
        has_alibi=alibi_slopes is not None,
        packed=True,
        softcap=softcap,
    )
    tile = choose_tile(problem) if tile is None else tile
    most = n * items.most_packed_tiles(tile, total, len(starts))
    given = Given(
        q=q,
        k=k,
        v=v,
        slopes=_cast(alibi_slopes, jnp.float32),
        packed=items.pack(problem, tile, starts, lengths, keys),
    )
    return kernel.launch(problem, tile, given, min(sms, most), interpret)[0, :total, :, :h]
