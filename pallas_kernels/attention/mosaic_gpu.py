"""Attention forward on Hopper tensor cores, as a persistent kernel.

A CTA is one TMA warpgroup and two or three consumer warpgroups of 64 query rows each. In each step
a consumer issues the scores of the next key tile and the product of the last weights with their
values, and takes the softmax of the scores while that product still runs; the consumers issue in
turn, so that one multiplies while another exponentiates. Key tiles go from the last to the first,
so that a masked tile comes first and a causal maximum is found early. The grid is the SM budget.

Not here: the choice between implementations and the checks of what a caller may pass (api.py).
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

ROWS = 64  # query rows of a consumer warpgroup: the M of WGMMA
SMEM_BYTES = 232_448
LOG2_E = math.log2(math.e)
# Start of the running maximum; finite, since exp2(-inf - LOWEST) is 0 and exp2(-inf + inf) is NaN.
LOWEST = -1e30
L2_SHARE_BYTES = 24 << 20  # keys and values that may be live in L2 at a time

MATRIX = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)
COLUMN = plgpu.Layout.WGMMA.reduce(0)
REGISTERS = {2: (240, 24), 3: (160, 32)}  # of a consumer's and of the TMA warpgroup's threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What one CTA holds: warpgroups of 64 query rows each, and rings of key and value tiles.

    Args:
      consumers: Consumer warpgroups, 2 or 3. With 3 a thread has 160 registers, which head sizes to
        64 fit in.
      block_kv: Keys of a tile; a multiple of 64, since WGMMA takes the probabilities 64 columns at
        a time.
      depth: Tiles in the ring of keys and in the ring of values.
      in_turn: The consumers issue their products in turn.
    """

    consumers: int = 2
    block_kv: int = 128
    depth: int = 2
    in_turn: bool = True

    def __post_init__(self):
        """Refuses what the hardware cannot hold."""
        if self.consumers not in REGISTERS:
            raise ValueError(
                f"Tile(consumers={self.consumers}): 2 or 3 share the registers of an SM"
            )
        if self.block_kv % 64 or not 64 <= self.block_kv <= 256:
            raise ValueError(
                f"Tile(block_kv={self.block_kv}): a multiple of 64 up to 256, the limit of a TMA "
                "box"
            )
        if self.depth < 1:
            raise ValueError(f"Tile(depth={self.depth}): at least 1")

    @property
    def block_q(self) -> int:
        """Query rows of a CTA."""
        return self.consumers * ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The static part of a call: shapes after padding, and which terms the scores have."""

    batch_size: int
    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    causal: bool = False
    window: int | None = None
    has_lengths: bool = False
    has_query_lengths: bool = False
    has_starts: bool = False
    has_alibi: bool = False
    bias_batch: int = 0

    @property
    def group(self) -> int:
        """Query heads of a key-value head."""
        return self.num_heads // self.num_kv_heads

    def smem_bytes(self, tile: Tile) -> int:
        """Shared memory of a CTA, without barriers."""
        rows = tile.block_q * self.head_dim * (1 if self.shares_output() else 2)
        rings = 2 * tile.depth * tile.block_kv * self.head_dim
        bias = tile.block_q * tile.block_kv if self.bias_batch else 0
        return 2 * (rows + rings + bias)

    def shares_output(self) -> bool:
        """Whether the output is staged where the queries were, as large heads leave no room."""
        return self.head_dim > 128

    def masks_beyond_last(self, tile: Tile) -> bool:
        """Whether a key tile before the last may need a mask: the causal edge crosses several."""
        aligned = not self.has_starts and tile.block_kv % tile.block_q == 0
        return self.causal and not aligned

    def heads_per_section(self, tile: Tile) -> int:
        """How many heads run their query tiles, longest first, before the next heads start."""
        heads = self.batch_size * self.num_heads
        if not self.causal:
            return self.group
        room = L2_SHARE_BYTES * self.group // (4 * self.num_keys * self.head_dim)
        return max(d for d in range(1, heads + 1) if heads % d == 0 and d <= max(room, 1))


def choose_tile(problem: Problem) -> Tile:
    """Picks the tile by what was measured on an H200 (docs/kernels_attention.md)."""
    plain = not (problem.causal or problem.has_alibi or problem.bias_batch)
    if problem.head_dim <= 64:
        three = plain and problem.num_queries > 2 * ROWS
        return Tile(consumers=3 if three else 2, depth=4)
    if problem.head_dim <= 128 and not problem.bias_batch:
        return Tile(in_turn=False)
    if problem.head_dim <= 192:
        return Tile(block_kv=64)
    return Tile(block_kv=64, depth=1 if problem.bias_batch else 2)


class Place(NamedTuple):
    """One work item: a query tile of one head, and its key tiles first .. last - 1."""

    batch: Array
    head: Array
    row: Array  # first query row
    start: Array  # position of query row 0 among the keys
    keys: Array  # number of valid keys
    queries: Array  # number of valid query rows
    first: Array
    last: Array
    clear_first: Array  # tiles clear_first .. clear_last - 1 need no mask
    clear_last: Array


def _ceil_div(a: Array, b: int) -> Array:
    return lax.div(a + (b - 1), jnp.int32(b))


def _mod(a: Array, b: int) -> Array:
    return lax.rem(a, jnp.int32(b))


def _place(problem: Problem, tile: Tile, item: Array, lengths, query_lengths, starts) -> Place:
    """Where work item `item` lies; a section of heads starts with its last query tiles."""
    tiles = -(-problem.num_queries // tile.block_q)
    section_heads = problem.heads_per_section(tile)
    section, within = (
        lax.div(item, jnp.int32(section_heads * tiles)),
        _mod(item, section_heads * tiles),
    )
    row = (tiles - 1 - lax.div(within, jnp.int32(section_heads))) * tile.block_q
    index = section * section_heads + _mod(within, section_heads)
    batch, head = lax.div(index, jnp.int32(problem.num_heads)), _mod(index, problem.num_heads)

    keys, start = jnp.int32(problem.num_keys), jnp.int32(0)
    if lengths is not None:
        keys = jnp.clip(lengths[batch], 0, problem.num_keys)
    if starts is not None:
        start = jnp.clip(starts[batch], 0, problem.num_keys)
    queries = jnp.int32(problem.num_queries)
    if query_lengths is not None:
        queries = query_lengths[batch]
        keys = jnp.where(row < queries, keys, 0)
    seen_by_all, seen_by_any, first, clear_first = keys, keys, jnp.int32(0), jnp.int32(0)
    if problem.causal:
        seen_by_all = jnp.minimum(keys, row + start + 1)
        seen_by_any = jnp.minimum(keys, row + start + tile.block_q)
    # Where there is no key, one tile is taken and masked.
    last = jnp.maximum(_ceil_div(seen_by_any, tile.block_kv), 1)
    if problem.window is not None:
        oldest = jnp.maximum(row + start + 1 - problem.window, 0)
        first = jnp.minimum(lax.div(oldest, jnp.int32(tile.block_kv)), last - 1)
        clear_first = _ceil_div(oldest + tile.block_q - 1, tile.block_kv)
    clear_last = lax.div(seen_by_all, jnp.int32(tile.block_kv))
    return Place(batch, head, row, start, keys, queries, first, last, clear_first, clear_last)


def _for_each_item(problem: Problem, tile: Tile, sms: int, sm: Array, run: Callable) -> None:
    """Calls run(item, step) for the items of this CTA; run returns the number of steps done so far.

    Causal items, longest first, are dealt in snake order: forwards in even rounds and backwards in
    odd ones.
    """
    items = problem.batch_size * problem.num_heads * -(-problem.num_queries // tile.block_q)
    if not problem.causal:
        count = lax.div(items - 1 - sm + sms, jnp.int32(sms))
        lax.fori_loop(0, count, lambda i, step: run(sm + i * sms, step), jnp.int32(0))
        return

    def dealt(i, step):
        item = i * sms + lax.select(_mod(i, 2) == 0, sm, sms - 1 - sm)
        return lax.cond(item < items, functools.partial(run, item), lambda step: step, step)

    lax.fori_loop(0, -(-items // sms), dealt, jnp.int32(0))


def _allowed(problem: Problem, tile: Tile, place: Place, row: Array, key: Array) -> Array:
    """Which of the scores of rows row .. and keys key .. count."""
    shape = (ROWS, tile.block_kv)
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=MATRIX)
    if not problem.causal:
        return column < place.keys - key
    position = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=MATRIX) + (
        row + place.start - key
    )
    allowed = column < jnp.minimum(position + 1, place.keys - key)
    if problem.window is not None:
        allowed &= column > position - problem.window
    return allowed


def _alibi(problem: Problem, tile: Tile, place: Place, row: Array, key: Array, slope: Array):
    """ALiBi in units of log2 for rows row .. and keys key .., as a matrix and a scalar to add.

    A causal row may shift by a constant: then only the scalar depends on where the tile lies.
    """
    shape = (ROWS, tile.block_kv)
    column = plgpu.broadcasted_iota(jnp.int32, (tile.block_kv,), 0, layout=COLUMN)
    column = column.astype(jnp.float32)
    if problem.causal:
        offset = (key - row - place.start - (ROWS - 1)).astype(jnp.float32)
        return lax.broadcast_in_dim(column * slope, shape, [1]), offset * slope
    position = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW).astype(jnp.float32)
    position += (row + place.start - key).astype(jnp.float32)
    distance = lax.broadcast_in_dim(column, shape, [1]) - lax.broadcast_in_dim(position, shape, [0])
    return jnp.abs(distance) * -slope, jnp.float32(0)


def _over_rows(v: Array, shape: tuple[int, ...]) -> Array:
    return lax.broadcast_in_dim(v, shape, [0])


def _softmax_step(scores, terms, shift, m, total, factor: float):
    """Online softmax by log2: weights, new maximum and sum, and the factor for what came before."""
    if terms is None:
        m_new = jnp.maximum(m, scores.max(axis=1) * factor)
        p = jnp.exp2(scores * factor - _over_rows(m_new, scores.shape))
    else:
        scores = scores * factor + terms
        m_new = jnp.maximum(m, scores.max(axis=1) + shift)
        p = jnp.exp2(scores - _over_rows(m_new - shift, scores.shape))
    shrink = jnp.exp2(m - m_new)
    return p, m_new, total * shrink + p.sum(axis=1), shrink


def _kernel_body(problem: Problem, tile: Tile, sms: int, interpret: bool, *refs) -> None:
    refs = list(refs)
    q_g, k_g, v_g = refs[:3]
    del refs[:3]
    lengths_g = refs.pop(0) if problem.has_lengths else None
    query_lengths_g = refs.pop(0) if problem.has_query_lengths else None
    starts_g = refs.pop(0) if problem.has_starts else None
    slopes_g = refs.pop(0) if problem.has_alibi else None
    bias_g = refs.pop(0) if problem.bias_batch else None
    o_g, q_s, k_s, v_s, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn = refs[:11]
    del refs[:11]
    o_s = q_s if problem.shares_output() else refs.pop(0)
    b_s, b_full, b_empty = refs[:3] if problem.bias_batch else (None, None, None)
    sm, wg = lax.axis_index("sm"), lax.axis_index("wg")
    dtype, depth, consumers = q_g.dtype, tile.depth, tile.consumers
    factor = problem.scale * LOG2_E
    tail = bool(problem.num_keys % tile.block_kv)
    mask_last = problem.causal or problem.has_lengths or problem.has_query_lengths or tail
    registers = REGISTERS[consumers]

    def attend_rows(place, row, step):
        steps = place.last - place.first
        slope = None if slopes_g is None else slopes_g[place.head] * LOG2_E

        def key_of(j):
            return (place.last - 1 - j) * tile.block_kv

        def masked(scores, j):
            return jnp.where(_allowed(problem, tile, place, row, key_of(j)), scores, -jnp.inf)

        def terms_of(j):
            terms, shift = None, jnp.float32(0)
            if slope is not None:
                terms, shift = _alibi(problem, tile, place, row, key_of(j), slope)
            if b_s is not None and b_full is not None and b_empty is not None:
                plgpu.barrier_wait(b_full.at[wg])
                bias = plgpu.layout_cast(b_s[wg], MATRIX).astype(jnp.float32) * LOG2_E
                plgpu.commit_smem()  # read by all threads before TMA writes it again
                plgpu.barrier_arrive(b_empty.at[wg])
                terms = bias if terms is None else terms + bias
            return terms, shift

        def load(o_ref):
            return o_ref[...] if interpret else plgpu.wgmma_accumulator_load(o_ref, wait_n=None)

        def attend(o_ref):
            def scores_of(j, meanwhile=None, wait_n=1):
                slot = _mod(step + j, depth)
                plgpu.barrier_wait(k_full.at[slot])
                if meanwhile is not None and tile.in_turn:
                    plgpu.barrier_wait(turn.at[wg])

                def multiply(s_ref):
                    plgpu.wgmma(s_ref, q_s.at[wg], k_s.at[slot].transpose((1, 0)))
                    if meanwhile is None:
                        return s_ref[...]
                    meanwhile()
                    if tile.in_turn:
                        plgpu.barrier_arrive(turn.at[_mod(wg + 1, consumers)])
                    return plgpu.wgmma_accumulator_load(s_ref, wait_n=wait_n)

                scores = pl.run_scoped(multiply, plgpu.ACC((ROWS, tile.block_kv)))
                plgpu.barrier_arrive(k_empty.at[slot])
                return scores

            def add_values(p, j):
                slot = _mod(step + j, depth)
                plgpu.barrier_wait(v_full.at[slot])
                if interpret:  # no WGMMA with its left operand in registers there
                    o_ref[...] += jnp.dot(p, v_s[slot], preferred_element_type=jnp.float32)
                    plgpu.commit_smem()
                else:
                    plgpu.wgmma(o_ref, p, v_s.at[slot])

            def values_added(j):
                if not interpret:
                    plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(v_empty.at[_mod(step + j, depth)])

            def advance(j, carry, mask):
                m, total, p = carry
                # A masked step does not overlap: with a product in flight over the end of one loop
                # and into the next, ptxas serialises every WGMMA (C7513).
                scores = scores_of(j, lambda: add_values(p, j - 1), wait_n=0 if mask else 1)
                if mask:
                    scores = masked(scores, j)
                p, m, total, shrink = _softmax_step(scores, *terms_of(j), m, total, factor)
                values_added(j - 1)
                o = load(o_ref)
                o_ref[...] = o * _over_rows(shrink, o.shape)
                return m, total, p.astype(dtype)

            if interpret:
                o_ref[...] = jnp.zeros_like(o_ref)
            m = plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), ROW)
            total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ROW)
            plgpu.barrier_wait(q_full.at[wg])
            scores = scores_of(jnp.int32(0))
            if mask_last:
                scores = masked(scores, jnp.int32(0))
            p, m, total, _ = _softmax_step(scores, *terms_of(jnp.int32(0)), m, total, factor)
            carry, start = (m, total, p.astype(dtype)), jnp.int32(1)
            if problem.masks_beyond_last(tile):
                stop = jnp.clip(place.last - place.clear_last, start, steps)
                carry = lax.fori_loop(start, stop, functools.partial(advance, mask=True), carry)
                start = stop
            stop = steps
            if problem.window is not None:
                stop = jnp.clip(place.last - place.clear_first, start, steps)
            carry = lax.fori_loop(start, stop, functools.partial(advance, mask=False), carry)
            if problem.window is not None:
                carry = lax.fori_loop(stop, steps, functools.partial(advance, mask=True), carry)
            m, total, p = carry
            if not problem.shares_output():
                plgpu.barrier_arrive(q_empty.at[wg])
            add_values(p, steps - 1)
            inverse = jnp.where(total > 0, 1 / total, 0.0)
            if query_lengths_g is not None:
                index = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
                inverse = jnp.where(index < place.queries - row, inverse, 0.0)
            values_added(steps - 1)
            o = load(o_ref)
            return o * _over_rows(inverse, o.shape)

        if interpret:
            o = attend(refs[-1].at[wg])
        else:
            o = pl.run_scoped(attend, plgpu.ACC((ROWS, problem.head_dim)))
        if not problem.shares_output():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last item's store has read o_s
        o_s[wg] = o.astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_s.at[wg], o_g.at[place.batch, pl.ds(row, ROWS), place.head])
        if problem.shares_output():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(q_empty.at[wg])

    def pass_by(place, step):
        """What a consumer does whose rows all lie beyond the queries: keep the barriers going."""

        def see_key_tile(j):
            slot = _mod(step + j, depth)
            plgpu.barrier_wait(k_full.at[slot])
            plgpu.barrier_arrive(k_empty.at[slot])
            if b_full is not None and b_empty is not None:
                plgpu.barrier_wait(b_full.at[wg])
                plgpu.barrier_arrive(b_empty.at[wg])

        def see_value_tile(j):
            slot = _mod(step + j, depth)
            plgpu.barrier_wait(v_full.at[slot])
            plgpu.barrier_arrive(v_empty.at[slot])

        def advance(j, _):
            if tile.in_turn:
                plgpu.barrier_wait(turn.at[wg])
                plgpu.barrier_arrive(turn.at[_mod(wg + 1, consumers)])
            see_key_tile(j)
            see_value_tile(j - 1)

        steps = place.last - place.first
        plgpu.barrier_wait(q_full.at[wg])
        plgpu.barrier_arrive(q_empty.at[wg])
        see_key_tile(jnp.int32(0))
        lax.fori_loop(1, steps, advance, None)
        see_value_tile(steps - 1)

    def consume(item, step):
        place = _place(problem, tile, item, lengths_g, query_lengths_g, starts_g)
        row = place.row + wg * ROWS
        if problem.num_queries % tile.block_q == 0:
            attend_rows(place, row, step)
        else:
            lax.cond(
                row < problem.num_queries,
                lambda: attend_rows(place, row, step),
                lambda: pass_by(place, step),
            )
        return step + place.last - place.first

    def produce(item, step):
        place = _place(problem, tile, item, lengths_g, query_lengths_g, starts_g)
        kv_head = lax.div(place.head, jnp.int32(problem.group))
        for w in range(consumers):
            rows = pl.ds(place.row + w * ROWS, ROWS)
            plgpu.barrier_wait(q_empty.at[w])
            plgpu.copy_gmem_to_smem(q_g.at[place.batch, rows, place.head], q_s.at[w], q_full.at[w])

        def fetch(j, source, ring, full, empty):
            slot, t = _mod(step + j, depth), place.last - 1 - j
            keys = pl.ds(t * tile.block_kv, tile.block_kv)
            plgpu.barrier_wait(empty.at[slot])
            plgpu.copy_gmem_to_smem(
                source.at[place.batch, keys, kv_head], ring.at[slot], full.at[slot]
            )

        def fetch_keys(j):
            fetch(j, k_g, k_s, k_full, k_empty)
            if bias_g is None or b_s is None or b_full is None or b_empty is None:
                return
            batch = place.batch if problem.bias_batch > 1 else 0
            keys = pl.ds((place.last - 1 - j) * tile.block_kv, tile.block_kv)
            for w in range(consumers):
                rows = pl.ds(place.row + w * ROWS, ROWS)
                plgpu.barrier_wait(b_empty.at[w])
                plgpu.copy_gmem_to_smem(
                    bias_g.at[batch, place.head, rows, keys], b_s.at[w], b_full.at[w]
                )

        def fetch_both(j, _):
            fetch_keys(j)
            fetch(j - 1, v_g, v_s, v_full, v_empty)

        steps = place.last - place.first
        fetch_keys(jnp.int32(0))
        lax.fori_loop(1, steps, fetch_both, None)
        fetch(steps - 1, v_g, v_s, v_full, v_empty)
        return step + steps

    @pl.when(wg < consumers)
    def _():
        plgpu.set_max_registers(registers[0], action="increase")
        for slot in range(depth):
            plgpu.barrier_arrive(k_empty.at[slot])
            plgpu.barrier_arrive(v_empty.at[slot])
        plgpu.barrier_arrive(q_empty.at[wg])
        if b_empty is not None:
            plgpu.barrier_arrive(b_empty.at[wg])
        if tile.in_turn:
            pl.when(wg == consumers - 1)(lambda: plgpu.barrier_arrive(turn.at[0]))
        _for_each_item(problem, tile, sms, sm, consume)
        plgpu.wait_smem_to_gmem(0)
        if tile.in_turn:
            pl.when(wg == 0)(lambda: plgpu.barrier_wait(turn.at[0]))

    @pl.when(wg == consumers)
    def _():
        plgpu.set_max_registers(registers[1], action="decrease")
        _for_each_item(problem, tile, sms, sm, produce)
        for w in range(consumers):  # no arrival is left unobserved
            plgpu.barrier_wait(q_empty.at[w])
            if b_empty is not None:
                plgpu.barrier_wait(b_empty.at[w])
        for slot in range(depth):
            plgpu.barrier_wait(k_empty.at[slot])
            plgpu.barrier_wait(v_empty.at[slot])


def _scratch(problem: Problem, tile: Tile, dtype, interpret: bool) -> list:
    consumers, depth = tile.consumers, tile.depth
    rows = plgpu.SMEM((consumers, ROWS, problem.head_dim), dtype)
    ring = plgpu.SMEM((depth, tile.block_kv, problem.head_dim), dtype)
    each_consumer = plgpu.Barrier(num_barriers=consumers)
    filled = plgpu.Barrier(num_barriers=depth)
    freed = plgpu.Barrier(num_arrivals=consumers, num_barriers=depth)
    scratch = [
        rows,
        ring,
        ring,
        each_consumer,
        each_consumer,
        filled,
        freed,
        filled,
        freed,
        each_consumer,
    ]
    if not problem.shares_output():
        scratch.append(rows)
    if problem.bias_batch:
        bias = plgpu.SMEM((consumers, ROWS, tile.block_kv), dtype)
        scratch += [bias, each_consumer, each_consumer]
    if interpret:
        scratch.append(plgpu.SMEM((consumers, ROWS, problem.head_dim), jnp.float32))
    return scratch


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
    sms: int,
    tile: Tile | None = None,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Runs the kernel; arguments as in api.attention, checked there.

    TMA and WGMMA want T and S in multiples of 8 and H in multiples of 16; what is missing is padded
    by a copy.

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
      sms: Size of the grid.
      tile: The tile; chosen by shape if None.
      interpret: Replaces what jax's interpreter lacks; for tests on a CPU.

    Returns:
      The attention output.

    Raises:
      NotImplementedError: A bias whose T or S is no multiple of 8, or a tile that does not fit.
    """
    _, t, _, h = q.shape
    s = k.shape[1]
    if bias is not None and (t % 8 or s % 8):
        raise NotImplementedError(
            f"attention(implementation='mosaic_gpu'): bias of {t} x {s}; TMA reads rows and "
            "columns in multiples of 8; pad them or use implementation='xla'"
        )
    q, k, v = (_pad(_pad(x, 1, 8), 3, 16) for x in (q, k, v))
    if lengths is None and k.shape[1] != s:
        lengths = jnp.full(k.shape[:1], s, jnp.int32)
    problem = Problem(
        batch_size=q.shape[0],
        num_queries=q.shape[1],
        num_keys=k.shape[1],
        num_heads=q.shape[2],
        num_kv_heads=k.shape[2],
        head_dim=q.shape[3],
        scale=scale,
        causal=causal,
        window=window,
        has_lengths=lengths is not None,
        has_query_lengths=query_lengths is not None,
        has_starts=query_starts is not None,
        has_alibi=alibi_slopes is not None,
        bias_batch=0 if bias is None else bias.shape[0],
    )
    tile = choose_tile(problem) if tile is None else tile
    if (needed := problem.smem_bytes(tile)) > SMEM_BYTES - 4096:
        raise NotImplementedError(
            f"attention(implementation='mosaic_gpu'): {tile} needs {needed} bytes of shared memory "
            "at head size "
            f"{problem.head_dim}; an SM has {SMEM_BYTES}; use a smaller block_kv or depth"
        )
    operands = [q, k, v]
    operands += [
        x.astype(jnp.int32) for x in (lengths, query_lengths, query_starts) if x is not None
    ]
    operands += [] if alibi_slopes is None else [alibi_slopes.astype(jnp.float32)]
    operands += [] if bias is None else [bias.astype(q.dtype)]
    items = problem.batch_size * problem.num_heads * -(-problem.num_queries // tile.block_q)
    sms = min(sms, items)
    out = plgpu.kernel(
        functools.partial(_kernel_body, problem, tile, sms, interpret),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=_scratch(problem, tile, q.dtype, interpret),
        grid=(sms,),
        grid_names=("sm",),
        num_threads=tile.consumers + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="pbjax_attention",
    )(*operands)
    return out[:, :t, :, :h]
