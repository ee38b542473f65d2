"""Decode attention on Hopper: a few queries of each sequence read its KV cache once.

A CTA runs independent streams, each a consumer warpgroup with a TMA warpgroup of its own that keeps
a ring of key and value tiles full. The query heads of a key-value head, times the query tokens, are
the columns of both products, which stand transposed so that the cache is the 64-row operand of
    WGMMA and eight columns suffice: S^T (keys, columns) = K q^T        O^T (H, columns) += V^T P^T
Where sequences are few, each is split over streams and the parts are joined by their log-sum-exp.

Not here: the choice between implementations and the checks of what a caller may pass (api.py).
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.decode_attention.splits import choose_splits
from pallas_kernels.mosaic import plgpu

SMEM_BYTES = 232_448
MAX_COLUMNS = 32
LOG2_E = math.log2(math.e)
# Start of the running maximum; finite, since exp2(-inf - LOWEST) is 0 and exp2(-inf + inf) is NaN.
LOWEST = -1e30
REDUCTION_WORDS = 512  # f32 of scratch for maxima over the four warps of a consumer


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The sizes of one CTA: pairs of a consumer and a TMA warpgroup, each with its own ring.

    Args:
      streams: Independent streams; each takes two of at most eight warpgroups.
      block_kv: Keys of a tile, a multiple of 64.
      depth: Tiles in a ring, keys and values taking turns.
    """

    streams: int = 2
    block_kv: int = 128
    depth: int = 3

    def __post_init__(self):
        """Raises ValueError for sizes that the hardware cannot hold."""
        if not 1 <= self.streams <= 4:
            raise ValueError(
                f"Tile(streams={self.streams}): 1 to 4, a CTA has at most eight warpgroups"
            )
        if self.block_kv % 64 or not 64 <= self.block_kv <= 256:
            raise ValueError(
                f"Tile(block_kv={self.block_kv}): a multiple of 64 up to 256, the limit of a TMA "
                "box"
            )
        if not 2 <= self.depth <= 32 // self.streams:
            raise ValueError(
                f"Tile(depth={self.depth}): at least 2, for all streams together at most 32"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The static part of a call; `rows` are tokens times grouped heads of a key-value head."""

    batch_size: int
    num_tokens: int
    num_keys: int
    num_kv_heads: int
    rows: int
    head_dim: int
    scale: float
    splits: int = 1
    has_alibi: bool = False
    page_size: int | None = None
    first_sequence: int = 0  # of a contiguous cache that holds further sequences
    softcap: float | None = None

    @property
    def columns(self) -> int:
        """Rows padded to a multiple of 8, as WGMMA wants its N."""
        return -(-self.rows // 8) * 8

    @property
    def items(self) -> int:
        """Work items: parts of the cache of one key-value head of one sequence."""
        return self.batch_size * self.num_kv_heads * self.splits

    def fixed_bytes(self, tile: Tile) -> int:
        """Shared memory of a CTA beside its rings, without barriers."""
        queries, weights = 2 * 2 * self.columns * self.head_dim, 2 * self.columns * tile.block_kv
        out = 4 * self.columns * self.head_dim
        return tile.streams * (queries + weights + out + 4 * REDUCTION_WORDS) + 4096

    def smem_bytes(self, tile: Tile) -> int:
        """Shared memory of a CTA, without barriers."""
        return (
            self.fixed_bytes(tile) + 2 * tile.streams * tile.depth * tile.block_kv * self.head_dim
        )


def choose_tile(problem: Problem) -> Tile:
    """Picks the deepest tile that fits, by measurements (docs/design/attention.md)."""
    block_kv = 128 if problem.head_dim <= 128 and problem.columns == 8 else 64
    if (
        problem.page_size is not None
        and problem.page_size % block_kv
        and block_kv % problem.page_size
    ):
        block_kv = 64
    # A thread has 128 registers with two streams and 255 with one.
    two = _deepest(problem, 2, block_kv)
    return two if problem.columns <= 16 and two.depth > 2 else _deepest(problem, 1, block_kv)


def _deepest(problem: Problem, streams: int, block_kv: int) -> Tile:
    room = SMEM_BYTES - problem.fixed_bytes(Tile(streams=streams, block_kv=block_kv))
    depth = room // (2 * streams * block_kv * problem.head_dim)
    return Tile(streams=streams, block_kv=block_kv, depth=max(2, min(depth, 8)))


class Part(NamedTuple):
    """One work item: tiles first .. last - 1 of the cache of one key-value head of one sequence."""

    batch: Array
    kv_head: Array
    split: Array
    keys: Array
    first: Array
    last: Array


def matrix():
    """Returns the layout of a product in the registers of a warpgroup."""
    return plgpu.Layout.WGMMA


def column():
    """Returns the layout of one number for each column of a product."""
    return plgpu.Layout.WGMMA.reduce(0)


def _mod(a: Array, b: int) -> Array:
    return lax.rem(a, jnp.int32(b))


def _part(problem: Problem, tile: Tile, item: Array, lengths) -> Part:
    """Heads are innermost, so that streams that run together read neighbouring memory."""
    kv_head, item = _mod(item, problem.num_kv_heads), lax.div(item, jnp.int32(problem.num_kv_heads))
    split, batch = _mod(item, problem.splits), lax.div(item, jnp.int32(problem.splits))
    keys = jnp.clip(lengths[batch], 0, problem.num_keys)
    tiles = lax.div(keys + (tile.block_kv - 1), jnp.int32(tile.block_kv))
    share = lax.div(tiles + (problem.splits - 1), jnp.int32(problem.splits))
    first = jnp.minimum(split * share, tiles)
    return Part(batch, kv_head, split, keys, first, jnp.minimum(first + share, tiles))


def _over_columns(v: Array, shape: tuple[int, ...]) -> Array:
    return lax.broadcast_in_dim(v, shape, [1])


def _reduce_keys(kind: str, x: Array, scratch, interpret: bool) -> Array:
    """Maximum or sum over the rows of x, which lie in all four warps.

    jnp.max would do, but Mosaic gives all warpgroups of a CTA one and the same scratch for it: a
    race.
    """
    if interpret:
        return x.max(axis=0) if kind == "max" else x.sum(axis=0)

    @plgpu.inline_mgpu(
        arg_types=(matrix(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((x.shape[1],), jnp.float32, layout=column()),
    )
    def reduce(_, x, scratch):
        return x.reduce(kind, 0, scratch)

    return reduce(x, scratch)


def _scores(problem: Problem, tile: Tile, part: Part, products: Array, t: Array, slopes) -> Array:
    """Scaled scores in units of log2, -inf where a key does not count for a column."""
    shape = (tile.block_kv, problem.columns)
    key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=matrix()) + t * tile.block_kv
    if problem.softcap is None:
        scores = products * (problem.scale * LOG2_E)
    else:
        capped = jnp.tanh(products * (problem.scale / problem.softcap))
        scores = capped * (problem.softcap * LOG2_E)
    if slopes is not None:
        distance = (key - (part.keys - 1)).astype(jnp.float32)
        scores += distance * _over_columns(slopes * LOG2_E, shape)
    if problem.num_tokens == 1:
        return jnp.where(key < part.keys, scores, -jnp.inf)
    group = problem.rows // problem.num_tokens
    token = lax.div(plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=matrix()), jnp.int32(group))
    visible = jnp.minimum(part.keys - problem.num_tokens + 1 + token, part.keys)
    return jnp.where(key < visible, scores, -jnp.inf)


def _kernel_body(problem: Problem, tile: Tile, sms: int, interpret: bool, *refs) -> None:
    refs = list(refs)
    q_g, k_g, v_g, lengths_g = refs[:4]
    del refs[:4]
    table_g = refs.pop(0) if problem.page_size is not None else None
    slopes_g = refs.pop(0) if problem.has_alibi else None
    o_g = refs.pop(0)
    lse_g = refs.pop(0) if problem.splits > 1 else None
    q_s, kv_s, p_s, o_s, reduction_s, q_full, q_empty, full, empty = refs[:9]
    streams, depth, columns = tile.streams, tile.depth, problem.columns
    sm, wg = lax.axis_index("sm"), lax.axis_index("wg")
    stream = _mod(wg, streams)
    me = sm * streams + stream
    count = lax.div(problem.items - 1 - me + sms * streams, jnp.int32(sms * streams))
    dtype = q_g.dtype
    # Rows of the next head must not be read or written. TMA drops what lies beyond a dimension, but
    # a slice that
    # is known to reach beyond is refused: hence a start that is zero and not known to be.
    box = pl.ds(jnp.minimum(sm, 0) * 8, columns) if problem.rows < 8 else pl.ds(0, columns)

    def slot_of(step, t, which):
        return _mod(2 * (step + t) + which, depth)

    def consume(i, step):
        part = _part(problem, tile, me + i * sms * streams, lengths_g)
        step -= part.first  # so that tile t is step + t
        q_slot = _mod(i, 2)
        slopes = None
        if slopes_g is not None:
            slopes = plgpu.load(slopes_g.at[part.kv_head], layout=column(), optimized=False)

        def load(o_ref):
            return o_ref[...] if interpret else plgpu.wgmma_accumulator_load(o_ref, wait_n=None)

        def attend(o_ref):
            def advance(t, carry):
                m, sums = carry
                k_slot, v_slot = slot_of(step, t, 0), slot_of(step, t, 1)
                plgpu.barrier_wait(full.at[stream * depth + k_slot])

                def multiply(s_ref):
                    plgpu.wgmma(
                        s_ref, kv_s.at[stream, k_slot], q_s.at[stream, q_slot].transpose((1, 0))
                    )
                    return s_ref[...]

                products = pl.run_scoped(multiply, plgpu.ACC((tile.block_kv, columns)))
                plgpu.barrier_arrive(empty.at[stream * depth + k_slot])
                scores = _scores(problem, tile, part, products, t, slopes)
                m_new = jnp.maximum(
                    m, _reduce_keys("max", scores, reduction_s.at[stream], interpret)
                )
                shrink = jnp.exp2(m - m_new)
                p = jnp.exp2(scores - _over_columns(m_new, scores.shape))
                sums = sums * _over_columns(shrink, sums.shape) + p
                p_s.at[stream].transpose((1, 0))[...] = p.astype(dtype)
                plgpu.commit_smem()
                o = load(o_ref)
                o_ref[...] = o * _over_columns(shrink, o.shape)
                plgpu.barrier_wait(full.at[stream * depth + v_slot])
                if interpret:  # an accumulator cannot be written there: o_ref is shared memory
                    weighted = jnp.dot(
                        kv_s[stream, v_slot].T, p_s[stream].T, preferred_element_type=jnp.float32
                    )
                    o_ref[...] += weighted
                    plgpu.commit_smem()
                else:
                    values = kv_s.at[stream, v_slot].transpose((1, 0))
                    plgpu.wgmma(o_ref, values, p_s.at[stream].transpose((1, 0)))
                    plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(empty.at[stream * depth + v_slot])
                return m_new, sums

            if interpret:
                o_ref[...] = jnp.zeros_like(o_ref)
            m = plgpu.layout_cast(jnp.full((columns,), LOWEST, jnp.float32), column())
            sums = plgpu.layout_cast(jnp.zeros((tile.block_kv, columns), jnp.float32), matrix())
            plgpu.barrier_wait(q_full.at[stream * 2 + q_slot])
            m, sums = lax.fori_loop(part.first, part.last, advance, (m, sums))
            total = _reduce_keys("add", sums, reduction_s.at[stream], interpret)
            if lse_g is not None:
                lse_g[part.split, part.batch, part.kv_head] = m + jnp.log2(total)
            inverse = jnp.where(total > 0, 1 / total, 0.0)
            o = load(o_ref)
            return o * _over_columns(inverse, o.shape)

        if interpret:
            o = attend(refs[-1].at[stream])
        else:
            o = pl.run_scoped(attend, plgpu.ACC((problem.head_dim, columns)))
        plgpu.barrier_arrive(q_empty.at[stream * 2 + q_slot])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last item's store has read o_s
        if lse_g is None:
            o_s.at[stream].transpose((1, 0))[...] = o.astype(dtype)
            target = o_g.at[part.batch, part.kv_head, box]
        else:
            o_s[stream] = o
            target = o_g.at[part.split, part.batch, part.kv_head]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_s.at[stream], target)
        return step + part.last

    def fetch_tile(source, part, t, pages, slot):
        barrier = full.at[stream * depth + slot]
        start = t * tile.block_kv
        if problem.page_size is None:
            rows = pl.ds(start, tile.block_kv)
            plgpu.copy_gmem_to_smem(
                source.at[problem.first_sequence + part.batch, rows, part.kv_head],
                kv_s.at[stream, slot],
                barrier,
            )
            return
        size = min(problem.page_size, tile.block_kv)
        for i, page in enumerate(pages):
            offset = _mod(lax.div(start, jnp.int32(size)), problem.page_size // size) * size
            target = kv_s.at[stream, slot, pl.ds(i * size, size)]
            plgpu.copy_gmem_to_smem(
                source.at[page, pl.ds(offset, size), part.kv_head], target, barrier
            )

    def pages_of(part, t):
        if problem.page_size is None or table_g is None:
            return []
        size = min(problem.page_size, tile.block_kv)
        last = problem.num_keys // problem.page_size - 1
        numbers = [
            jnp.minimum(lax.div(t * tile.block_kv + i * size, jnp.int32(problem.page_size)), last)
            for i in range(tile.block_kv // size)
        ]
        return [jnp.clip(table_g[part.batch, number], 0, k_g.shape[0] - 1) for number in numbers]

    def produce(i, step):
        part = _part(problem, tile, me + i * sms * streams, lengths_g)
        step -= part.first
        q_slot = _mod(i, 2)
        plgpu.barrier_wait(q_empty.at[stream * 2 + q_slot])
        queries = q_g.at[part.batch, part.kv_head, box]
        plgpu.copy_gmem_to_smem(queries, q_s.at[stream, q_slot], q_full.at[stream * 2 + q_slot])

        def fetch(t, _):
            pages = pages_of(part, t)
            for which, source in enumerate((k_g, v_g)):
                slot = slot_of(step, t, which)
                plgpu.barrier_wait(empty.at[stream * depth + slot])
                fetch_tile(source, part, t, pages, slot)

        lax.fori_loop(part.first, part.last, fetch, None)
        return step + part.last

    @pl.when(wg < streams)
    def _():
        for slot in range(depth):
            plgpu.barrier_arrive(empty.at[stream * depth + slot])
        for slot in range(2):
            plgpu.barrier_arrive(q_empty.at[stream * 2 + slot])
        lax.fori_loop(0, count, consume, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(wg >= streams)
    def _():
        lax.fori_loop(0, count, produce, jnp.int32(0))
        for slot in range(depth):  # no arrival is left unobserved
            plgpu.barrier_wait(empty.at[stream * depth + slot])
        for slot in range(2):
            plgpu.barrier_wait(q_empty.at[stream * 2 + slot])


def _scratch(problem: Problem, tile: Tile, dtype, interpret: bool) -> list:
    streams, depth, columns, h = tile.streams, tile.depth, problem.columns, problem.head_dim
    copies = 1 if problem.page_size is None else max(1, tile.block_kv // problem.page_size)
    out = (streams, columns, h) if problem.splits == 1 else (streams, h, columns)
    scratch = [
        plgpu.SMEM((streams, 2, columns, h), dtype),
        plgpu.SMEM((streams, depth, tile.block_kv, h), dtype),
        plgpu.SMEM((streams, columns, tile.block_kv), dtype),
        plgpu.SMEM(out, dtype if problem.splits == 1 else jnp.float32),
        plgpu.SMEM((streams, REDUCTION_WORDS), jnp.float32),
        plgpu.Barrier(num_barriers=2 * streams),
        plgpu.Barrier(num_barriers=2 * streams),
        plgpu.Barrier(num_arrivals=copies, num_barriers=depth * streams),
        plgpu.Barrier(num_barriers=depth * streams),
    ]
    if interpret:
        scratch.append(plgpu.SMEM((streams, h, columns), jnp.float32))
    return scratch


def _join(o: Float[Array, "Z B K H C"], lse: Float[Array, "Z B K C"]) -> Float[Array, "B K C H"]:
    """Averages the parts of a split cache, weighted by their sums of exponentials."""
    highest = lse.max(axis=0)
    weights = jnp.where(jnp.isfinite(lse), jnp.exp2(lse - highest[None]), 0.0)
    total = weights.sum(axis=0)
    weights = weights / jnp.where(total > 0, total, 1.0)[None]
    return jnp.einsum("zbkhc,zbkc->bkch", o, weights)


def _launch(
    problem: Problem, tile: Tile, sms: int, interpret: bool, operands: list[Array]
) -> Array:
    """Runs the kernel on as few SMs of the budget as give each stream the same number of items."""
    rounds = -(-problem.items // (sms * tile.streams))
    sms = -(-problem.items // (rounds * tile.streams))
    dtype, heads = operands[0].dtype, (problem.batch_size, problem.num_kv_heads)
    if problem.splits == 1:
        out = (jax.ShapeDtypeStruct(operands[0].shape, dtype),)
    else:
        parts = (problem.splits, *heads)
        out = (
            jax.ShapeDtypeStruct((*parts, problem.head_dim, problem.columns), jnp.float32),
            jax.ShapeDtypeStruct((*parts, problem.columns), jnp.float32),
        )
    out = plgpu.kernel(
        functools.partial(_kernel_body, problem, tile, sms, interpret),
        out_type=out,
        scratch_types=_scratch(problem, tile, dtype, interpret),
        grid=(sms,),
        grid_names=("sm",),
        num_threads=2 * tile.streams,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="pbjax_decode_attention",
    )(*operands)
    return out[0] if problem.splits == 1 else _join(*out).astype(dtype)


def decode_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "_ _ K H"],
    v: Float[Array, "_ _ K H"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    page_table: Int[Array, "B M"] | None,
    alibi_slopes: Float[Array, " N"] | None,
    sms: int,
    softcap: float | None = None,
    first_sequence: int = 0,
    tile: Tile | None = None,
    splits: int | None = None,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Runs the kernel; arguments as in api.decode_attention, checked there.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      lengths: Number of valid keys, the query tokens included.
      scale: Factor of the scores.
      page_table: Pages of each sequence.
      alibi_slopes: Slope of each query head.
      sms: The budget; the grid may be smaller.
      softcap: Bound of the scaled scores.
      first_sequence: The sequence of the cache that is the first of q.
      tile: The tile; chosen by shape if None.
      splits: Parts of each cache; chosen by shape if None.
      interpret: Replaces what jax's interpreter lacks; for tests on a CPU.

    Returns:
      The attention output.

    Raises:
      NotImplementedError: More query rows, other page sizes or larger tiles than fit.
    """
    b, t, n, h = q.shape
    num_kv_heads = k.shape[2]
    group = n // num_kv_heads
    rows = t * group
    problem = Problem(
        batch_size=b,
        num_tokens=t,
        num_keys=k.shape[1] if page_table is None else page_table.shape[1] * k.shape[1],
        num_kv_heads=num_kv_heads,
        rows=rows,
        head_dim=h,
        scale=scale,
        has_alibi=alibi_slopes is not None,
        page_size=None if page_table is None else k.shape[1],
        first_sequence=first_sequence,
        softcap=softcap,
    )
    if splits is None:
        splits = choose_splits(b * num_kv_heads, problem.num_keys, sms)
    problem = dataclasses.replace(problem, splits=splits)
    tile = choose_tile(problem) if tile is None else tile
    _refuse(problem, tile)
    missing = 0 if rows < 8 else problem.columns - rows
    folded = jnp.swapaxes(q.reshape(b, t, num_kv_heads, group, h), 1, 2).reshape(
        b, num_kv_heads, rows, h
    )
    operands = [
        jnp.pad(folded, ((0, 0), (0, 0), (0, missing), (0, 0))) if missing else folded,
        k,
        v,
    ]
    # New arrays: XLA hands a slice on where it lies, and a launch wants multiples of 256 bytes.
    operands.append(jnp.clip(lengths.astype(jnp.int32), 0, problem.num_keys))
    if page_table is not None:
        operands.append(jnp.clip(page_table.astype(jnp.int32), 0, k.shape[0] - 1))
    if alibi_slopes is not None:
        slopes = jnp.tile(alibi_slopes.astype(jnp.float32).reshape(num_kv_heads, group), (1, t))
        operands.append(jnp.pad(slopes, ((0, 0), (0, problem.columns - rows))))
    out = _launch(problem, tile, sms, interpret, operands)[:, :, :rows]
    return jnp.swapaxes(out.reshape(b, num_kv_heads, t, group, h), 1, 2).reshape(q.shape)


def _refuse(problem: Problem, tile: Tile) -> None:
    """Raises NotImplementedError for what the kernel cannot do."""
    ours = "decode_attention(implementation='mosaic_gpu')"
    if problem.rows > MAX_COLUMNS:
        raise NotImplementedError(
            f"{ours}: {problem.rows} query rows a key-value head; at most {MAX_COLUMNS}, tokens "
            "times grouped heads; use attention for longer queries"
        )
    if problem.head_dim % 64 or problem.head_dim > 256:
        raise NotImplementedError(
            f"{ours}: head size is {problem.head_dim}; 64, 128, 192 and 256 fit; use "
            "implementation='xla'"
        )
    size = problem.page_size
    if size is None and problem.num_keys % 8:
        raise NotImplementedError(
            f"{ours}: a cache of {problem.num_keys} keys; TMA wants a multiple of 8; allocate it so"
        )
    if size is not None and (size % 8 or (size % tile.block_kv and tile.block_kv % size)):
        raise NotImplementedError(
            f"{ours}: pages of {size} keys; multiples of 8 that divide {tile.block_kv} or that it "
            "divides; choose another page size"
        )
    if (needed := problem.smem_bytes(tile)) > SMEM_BYTES:
        raise NotImplementedError(
            f"{ours}: {tile} needs {needed} bytes of shared memory; an SM has {SMEM_BYTES}; lower "
            "block_kv or depth"
        )
