"""Attention forward on Hopper tensor cores, as a persistent kernel.

A CTA is one TMA warpgroup and two or three consumer warpgroups of 64 query rows each. In each step
a consumer issues the scores of the next key tile and the product of the last weights with their
values, and takes the softmax of the scores while products run; the consumers issue in turn, so that
one multiplies while another exponentiates. Key tiles go from the last to the first, so that a
masked tile comes first and a causal maximum is found early. The next item's queries and first keys
load while an item runs; its output leaves from where its queries were. The grid is the SM budget.

Rows of differences of positions run along with the keys in a ring of their own. Their product runs
beside that of the last weights; brought to its keys (relative.py), the scores start from it.

Not here: how a call becomes operands (mosaic_gpu.py), the tile (tile.py), which CTA does what
(items.py, places.py), shared memory (scratch.py), what becomes of scores in registers (scores.py).
"""

import functools
from dataclasses import fields
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from pallas_kernels.attention import items, relative
from pallas_kernels.attention.places import Given, divide, for_each_item, modulo, place_of
from pallas_kernels.attention.scores import (
    COLUMN,
    LOG2_E,
    LOWEST,
    MATRIX,
    ROW,
    alibi,
    allowed,
    capped,
    over_rows,
    softmax_step,
)
from pallas_kernels.attention.scratch import scratch_types
from pallas_kernels.attention.tile import (
    ALIGNMENT,
    BARRIER_BYTES,
    REGISTERS,
    ROWS,
    SMEM_BYTES,
    Problem,
    Tile,
)
from pallas_kernels.mosaic import plgpu


class Rows(NamedTuple):
    """Rows of differences: their place in memory, and the ring of their tiles."""

    source: jax.Ref
    shift: jax.Ref
    tiles: jax.Ref
    full: jax.Ref
    empty: jax.Ref


def _kernel_body(
    problem: Problem, tile: Tile, sms: int, interpret: bool, names: tuple[str, ...], *refs
) -> None:
    """Runs one CTA.

    Args:
      problem: The sizes of the call.
      tile: The sizes of the CTA.
      sms: The size of the grid.
      interpret: Whether jax's interpreter runs this.
      names: The fields of `Given` that are present.
      refs: The references of these fields, of the output, and the scratch.
    """
    *operands, o_g, scratch = refs
    given = Given(**dict(zip(names, operands, strict=True)))
    q, k, v, turn = scratch.q, scratch.k, scratch.v, scratch.turn
    ring = None
    if scratch.rows is not None and given.rows is not None and given.shift is not None:
        ring = Rows(given.rows, given.shift, *scratch.rows)
    first_rows = range(tile.relative_window - 1) if ring is not None else ()
    wg = lax.axis_index("wg")
    dtype, depth, consumers = given.q.dtype, tile.depth, tile.consumers
    factor = problem.unit * LOG2_E
    registers = REGISTERS[consumers]

    def rows_from(place, row, size=ROWS):
        return pl.ds((place.origin + lax.div(row, jnp.int32(ALIGNMENT))) * ALIGNMENT, size)

    def query_slot(number):
        return modulo(number, tile.query_slots)

    def query_barrier(number, w):
        return query_slot(number) * consumers + w

    def free_last_queries(number):
        """Frees the slot of the item before this one, whose output has left it by now."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(q.empty.at[query_barrier(number + 1, wg)])

    def store_rows(staged, place, o, row, begin, count):
        """Stores rows begin .. begin + count - 1 alone; the rows around belong to other items.

        Copies have 32, 16, .. 1 rows: a copy's size is static, and that of swizzled tiles aligned.
        """
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last item's rows have left
        staged[...] = o
        plgpu.commit_smem()
        for size in (2**i for i in reversed(range(ROWS.bit_length() - 1))):
            done = lax.div(count, jnp.int32(2 * size)) * (2 * size)

            @pl.when(modulo(count, 2 * size) >= size)
            def _(size=size, done=done):
                plgpu.copy_smem_to_gmem(
                    staged.at[pl.ds(begin + done, size)],
                    o_g.at[0, pl.ds(place.origin * ALIGNMENT + row + done, size), place.head],
                )

    def relative_slot(number, step, index):
        """Returns the slot of the item's tile of rows of differences with this index."""
        return modulo(step + number * (tile.relative_window - 1) + index, tile.relative_depth)

    def attend_rows(place, row, number, step):
        steps = place.last - place.first
        queries = q.tiles.at[query_slot(number), wg]
        slope = None if given.slopes is None else given.slopes[place.head] * LOG2_E

        def key_of(j):
            return (place.last - 1 - j) * tile.block_kv

        def masked(scores, j, *, last):
            seen = allowed(problem, tile, place, row, key_of(j), last=last)
            return jnp.where(seen, scores, -jnp.inf)

        def with_key_bias(scores, j):
            """Adds the bias of each key; most tiles of padded sequences have none."""
            bias, biased = given.key_bias, given.key_biased
            if bias is None or biased is None:
                return scores
            t = place.last - 1 - j

            def add(scores):
                of_keys = plgpu.load(bias.at[place.batch, t], layout=COLUMN, optimized=False)
                return scores + lax.broadcast_in_dim(of_keys, scores.shape, [1])

            return lax.cond(biased[place.batch, t] == 0, lambda scores: scores, add, scores)

        def terms_of(j):
            terms, shift = None, jnp.float32(0)
            if slope is not None:
                terms, shift = alibi(problem, tile, place, row, key_of(j), slope)
            if scratch.bias is not None:
                plgpu.barrier_wait(scratch.bias.full.at[wg])
                bias = plgpu.layout_cast(scratch.bias.tiles[wg], MATRIX)
                bias = bias.astype(jnp.float32) * LOG2_E
                plgpu.commit_smem()  # read by all threads before TMA writes it again
                plgpu.barrier_arrive(scratch.bias.empty.at[wg])
                terms = bias if terms is None else terms + bias
            return terms, shift

        def load(o_ref):
            return o_ref[...] if interpret else plgpu.wgmma_accumulator_load(o_ref, wait_n=None)

        def wait_for_rows(ring, index):
            plgpu.barrier_wait(ring.full.at[relative_slot(number, step, index)])

        def free_rows(ring, index):
            plgpu.barrier_arrive(ring.empty.at[relative_slot(number, step, index)])

        def shifted_queries(ring):
            """Returns the shifted queries for rows of differences, in registers."""
            rows = plgpu.layout_cast(queries[...], MATRIX).astype(jnp.float32)
            plgpu.commit_smem()
            add = plgpu.load(ring.shift.at[place.head], layout=COLUMN, optimized=False)
            add = lax.broadcast_in_dim(add.astype(jnp.float32), rows.shape, [1])
            return (rows + add).astype(dtype)

        def relative_scores(ring, shifted, j, meanwhile):
            """Computes the scores by position of key tile j while the last values are added."""
            wait_for_rows(ring, j + tile.relative_window - 1)

            def multiply(*accumulators):
                if meanwhile is not None:
                    plgpu.barrier_wait(turn.at[wg])
                parts = []
                for i, accumulator in enumerate(accumulators):
                    # Tiles come the last rows first; a consumer's first row is 64 after the next's.
                    tiles, piece = divide(consumers - 1 - wg + i, tile.block_kv // ROWS)
                    slot = relative_slot(number, step, j + tile.relative_window - 1 - tiles)
                    rows = ring.tiles.at[slot, pl.ds(piece * ROWS, ROWS)]
                    if interpret:
                        dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
                        parts.append(dot(shifted, rows[...].T))
                        plgpu.commit_smem()
                    else:
                        plgpu.wgmma(accumulator, shifted, rows.transpose((1, 0)))
                if meanwhile is not None:
                    meanwhile()
                    plgpu.barrier_arrive(turn.at[modulo(wg + 1, consumers)])
                if interpret:
                    return parts
                others = 0 if meanwhile is None else 1
                return [plgpu.wgmma_accumulator_load(x, wait_n=others) for x in accumulators]

            accumulators = [plgpu.ACC((ROWS, ROWS))] * (1 + tile.block_kv // ROWS)
            parts = pl.run_scoped(multiply, *accumulators)
            free_rows(ring, j)
            return relative.by_key(parts, dtype, interpret=interpret)

        def attend(o_ref):
            def scores_of(j, meanwhile=None, wait_n=1):
                slot = modulo(step + j, depth)
                start = None
                if ring is not None:
                    start, meanwhile = relative_scores(ring, shifted, j, meanwhile), None
                plgpu.barrier_wait(k.full.at[slot])
                if meanwhile is not None:
                    plgpu.barrier_wait(turn.at[wg])

                def multiply(s_ref):
                    if start is not None and not interpret:
                        s_ref[...] = start
                    plgpu.wgmma(s_ref, queries, k.tiles.at[slot].transpose((1, 0)))
                    if meanwhile is None:
                        return s_ref[...]
                    meanwhile()
                    plgpu.barrier_arrive(turn.at[modulo(wg + 1, consumers)])
                    return plgpu.wgmma_accumulator_load(s_ref, wait_n=wait_n)

                scores = pl.run_scoped(multiply, plgpu.ACC((ROWS, tile.block_kv)))
                plgpu.barrier_arrive(k.empty.at[slot])
                if start is not None and interpret:
                    scores += start
                return with_key_bias(capped(problem, scores), j)

            def add_values(p, j):
                slot = modulo(step + j, depth)
                plgpu.barrier_wait(v.full.at[slot])
                if interpret:  # no WGMMA with its left operand in registers there
                    o_ref[...] += jnp.dot(p, v.tiles[slot], preferred_element_type=jnp.float32)
                    plgpu.commit_smem()
                else:
                    plgpu.wgmma(o_ref, p, v.tiles.at[slot])

            def values_added(j):
                if not interpret:
                    plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(v.empty.at[modulo(step + j, depth)])

            def advance(j, carry, *, mask=None, overlap=True):
                m, total, p = carry
                # With products in flight in each of two loops, one after the other, ptxas
                # serialises every WGMMA (C7513): in all loops but one a step does not overlap.
                scores = scores_of(j, lambda: add_values(p, j - 1), wait_n=1 if overlap else 0)
                if mask is not None:
                    scores = mask(scores, j)
                p, m, total, shrink = softmax_step(scores, *terms_of(j), m, total, factor)
                p = p.astype(dtype)
                if scratch.held is not None:  # ptxas moves nothing over a wait for a barrier
                    plgpu.barrier_arrive(scratch.held.at[wg])
                    plgpu.barrier_wait(scratch.held.at[wg])
                values_added(j - 1)
                o = load(o_ref)
                o_ref[...] = o * over_rows(shrink, o.shape)
                return m, total, p

            if interpret:
                o_ref[...] = jnp.zeros_like(o_ref)
            m = plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), ROW)
            total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ROW)
            plgpu.barrier_wait(q.full.at[query_barrier(number, wg)])
            if ring is not None:
                shifted = shifted_queries(ring)
            for index in first_rows:
                wait_for_rows(ring, index)
            scores = scores_of(jnp.int32(0))
            if tile.query_slots > 1:
                free_last_queries(number)
            if problem.masks_last(tile):
                scores = masked(scores, jnp.int32(0), last=True)
            p, m, total, _ = softmax_step(scores, *terms_of(jnp.int32(0)), m, total, factor)
            carry, start = (m, total, p.astype(dtype)), jnp.int32(1)
            edge, stop = None, steps
            if problem.masks_two(tile):
                mask = functools.partial(masked, last=True)
                carry, start = advance(start, carry, mask=mask, overlap=False), start + 1
            elif problem.masks_beyond_last(tile):

                def edge(scores, j):
                    seen = j >= place.last - place.clear_last
                    return lax.cond(seen, lambda s: s, lambda s: masked(s, j, last=True), scores)

            if problem.masks_first():
                stop = jnp.clip(place.last - place.clear_first, start, steps)
            carry = lax.fori_loop(start, stop, functools.partial(advance, mask=edge), carry)
            if problem.masks_first():
                mask = functools.partial(masked, last=problem.masks_beyond_last(tile))
                masked_advance = functools.partial(advance, mask=mask, overlap=False)
                carry = lax.fori_loop(stop, steps, masked_advance, carry)
            m, total, p = carry
            for index in first_rows:
                free_rows(ring, steps + index)
            add_values(p, steps - 1)
            inverse = jnp.where(total > 0, 1 / total, 0.0)
            if given.query_lengths is not None:
                index = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
                inverse = jnp.where(index < place.queries - row, inverse, 0.0)
            values_added(steps - 1)
            o = load(o_ref)
            return o * over_rows(inverse, o.shape)

        if interpret:
            o = attend(scratch.accumulators.at[wg])
        else:
            o = pl.run_scoped(attend, plgpu.ACC((ROWS, problem.head_dim)))
        o = o.astype(dtype)

        def store_tile():
            queries[...] = o
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(queries, o_g.at[place.batch, rows_from(place, row), place.head])

        if scratch.packed_rows is None:
            store_tile()
        else:
            begin = jnp.maximum(place.low - row, 0)
            count = jnp.clip(place.queries - row, begin, ROWS) - begin
            staged = scratch.packed_rows.at[wg]
            lax.cond(
                count == ROWS,
                store_tile,
                lambda: store_rows(staged, place, o, row + begin, begin, count),
            )
        if tile.query_slots == 1:
            free_last_queries(number)

    def pass_by(place, number, step):
        """Keeps the barriers going for a consumer whose rows are all beyond the queries."""

        def see_key_tile(j):
            slot = modulo(step + j, depth)
            plgpu.barrier_wait(k.full.at[slot])
            plgpu.barrier_arrive(k.empty.at[slot])
            if scratch.bias is not None:
                plgpu.barrier_wait(scratch.bias.full.at[wg])
                plgpu.barrier_arrive(scratch.bias.empty.at[wg])
            if ring is not None:
                see_rows(ring, j + tile.relative_window - 1)

        def see_rows(ring, index):
            slot = relative_slot(number, step, index)
            plgpu.barrier_wait(ring.full.at[slot])
            plgpu.barrier_arrive(ring.empty.at[slot])

        def see_value_tile(j):
            slot = modulo(step + j, depth)
            plgpu.barrier_wait(v.full.at[slot])
            plgpu.barrier_arrive(v.empty.at[slot])

        def advance(j, _):
            plgpu.barrier_wait(turn.at[wg])
            plgpu.barrier_arrive(turn.at[modulo(wg + 1, consumers)])
            see_key_tile(j)
            see_value_tile(j - 1)

        steps = place.last - place.first
        plgpu.barrier_wait(q.full.at[query_barrier(number, wg)])
        free_last_queries(number)
        for index in first_rows:
            see_rows(ring, index)
        see_key_tile(jnp.int32(0))
        lax.fori_loop(1, steps, advance, None)
        see_value_tile(steps - 1)

    def consume(item, number, step):
        place = place_of(problem, tile, given, item)
        row = place.row + wg * ROWS
        if problem.num_queries % tile.block_q == 0 and not problem.packed:
            attend_rows(place, row, number, step)
        else:
            lax.cond(
                row < (place.queries if problem.packed else problem.num_queries),
                lambda: attend_rows(place, row, number, step),
                lambda: pass_by(place, number, step),
            )
        return step + place.last - place.first

    def produce(item, number, step):
        place = place_of(problem, tile, given, item)
        kv_head = lax.div(place.head, jnp.int32(problem.group))
        for w in range(consumers):
            rows = rows_from(place, place.row + w * ROWS)
            here = query_barrier(number, w)
            plgpu.barrier_wait(q.empty.at[here])
            plgpu.copy_gmem_to_smem(
                given.q.at[place.batch, rows, place.head],
                q.tiles.at[query_slot(number), w],
                q.full.at[here],
            )

        def fetch(j, source, ring):
            slot, t = modulo(step + j, depth), place.last - 1 - j
            keys = rows_from(place, t * tile.block_kv, tile.block_kv)
            plgpu.barrier_wait(ring.empty.at[slot])
            plgpu.copy_gmem_to_smem(
                source.at[place.batch, keys, kv_head], ring.tiles.at[slot], ring.full.at[slot]
            )

        def fetch_rows(ring, index):
            """Fetches the item's tile of rows with this index, the last rows first."""
            slot = relative_slot(number, step, index)
            t = place.last - 1 + tile.relative_window - 1 - index
            start = (items.num_tiles(problem, tile) - 1) * tile.block_q
            start += t * tile.block_kv - place.row
            start = lax.div(start, jnp.int32(ALIGNMENT)) * ALIGNMENT
            plgpu.barrier_wait(ring.empty.at[slot])
            plgpu.copy_gmem_to_smem(
                ring.source.at[pl.ds(start, tile.block_kv), place.head],
                ring.tiles.at[slot],
                ring.full.at[slot],
            )

        def fetch_keys(j):
            if ring is not None:
                fetch_rows(ring, j + tile.relative_window - 1)
            fetch(j, given.k, k)
            if given.bias is None or scratch.bias is None:
                return
            batch = place.batch if problem.bias_batch > 1 else 0
            keys = pl.ds((place.last - 1 - j) * tile.block_kv, tile.block_kv)
            for w in range(consumers):
                rows = pl.ds(place.row + w * ROWS, ROWS)
                plgpu.barrier_wait(scratch.bias.empty.at[w])
                plgpu.copy_gmem_to_smem(
                    given.bias.at[batch, place.head, rows, keys],
                    scratch.bias.tiles.at[w],
                    scratch.bias.full.at[w],
                )

        def fetch_both(j, _):
            fetch_keys(j)
            fetch(j - 1, given.v, v)

        steps = place.last - place.first
        for index in first_rows:
            fetch_rows(ring, index)
        fetch_keys(jnp.int32(0))
        lax.fori_loop(1, steps, fetch_both, None)
        fetch(steps - 1, given.v, v)
        return step + steps

    @pl.when(wg < consumers)
    def _():
        plgpu.set_max_registers(registers[0], action="increase")
        for slot in range(depth):
            plgpu.barrier_arrive(k.empty.at[slot])
            plgpu.barrier_arrive(v.empty.at[slot])
        plgpu.barrier_arrive(q.empty.at[wg])
        if scratch.bias is not None:
            plgpu.barrier_arrive(scratch.bias.empty.at[wg])
        if ring is not None:
            for slot in range(tile.relative_depth):
                plgpu.barrier_arrive(ring.empty.at[slot])
        pl.when(wg == consumers - 1)(lambda: plgpu.barrier_arrive(turn.at[0]))
        for_each_item(problem, tile, sms, given, consume)
        plgpu.wait_smem_to_gmem(0)
        if interpret:
            pl.when(wg == 0)(lambda: plgpu.barrier_wait(turn.at[0]))

    @pl.when(wg == consumers)
    def _():
        plgpu.set_max_registers(registers[1], action="decrease")
        count = for_each_item(problem, tile, sms, given, produce)
        if interpret:  # where no arrival may be left unobserved
            for w in range(consumers):
                plgpu.barrier_wait(q.empty.at[query_barrier(count, w)])
                if scratch.bias is not None:
                    plgpu.barrier_wait(scratch.bias.empty.at[w])
            for slot in range(depth):
                plgpu.barrier_wait(k.empty.at[slot])
                plgpu.barrier_wait(v.empty.at[slot])
            if ring is not None:
                for slot in range(tile.relative_depth):
                    plgpu.barrier_wait(ring.empty.at[slot])


def launch(
    problem: Problem, tile: Tile, given: Given[Array | np.ndarray], sms: int, interpret: bool
) -> Array:
    """Launches the kernel on the arrays of `given`; the output has the shape of the queries."""
    if (needed := problem.smem_bytes(tile)) > SMEM_BYTES - BARRIER_BYTES:
        raise NotImplementedError(
            f"attention(implementation='mosaic_gpu'): {tile} needs {needed} bytes of shared memory "
            f"at head size {problem.head_dim}; an SM has {SMEM_BYTES}; use a smaller block_kv or "
            "depth"
        )
    present = {field.name: getattr(given, field.name) for field in fields(given)}
    operands = {name: x for name, x in present.items() if x is not None}
    return plgpu.kernel(
        functools.partial(_kernel_body, problem, tile, sms, interpret, tuple(operands)),
        out_type=jax.ShapeDtypeStruct(given.q.shape, given.q.dtype),
        scratch_types=[scratch_types(problem, tile, given.q.dtype, interpret=interpret)],
        grid=(sms,),
        grid_names=("sm",),
        num_threads=tile.consumers + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="pbjax_attention",
    )(*operands.values())
