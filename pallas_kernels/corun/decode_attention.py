"""Decode attention as the partner of a GEMM: one warpgroup of each CTA copies and computes.

The products stand as in pallas_kernels.decode_attention: S^T (keys, columns) = K q^T and
O^T (H, columns) += V^T P^T, with eight columns. There a stream has a warpgroup that copies and one
that computes; here one does both, as the GEMM leaves one: a slot is filled again as soon as its
product is done, and the loads run on from item to item.

A launch does some of a cache's sequences, so that the GEMMs of one sub-batch's layer can share out
the attention of another.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.decode_attention import mosaic_gpu as decode
from pallas_kernels.gemm.mosaic_gpu import share
from pallas_kernels.mosaic import plgpu

COLUMNS = 8
REDUCTION_WORDS = 256  # f32 of scratch for maxima over the four warps: two columns a thread.


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything static about the attention of one launch.

    Attributes:
      problem: The shapes; its batch is the sequences of this launch.
      depth: Slots of the ring, of a tile of keys or of values each.
      emulated: Replaces what the interpreter lacks.
    """

    problem: decode.Problem
    depth: int
    emulated: bool = False

    @property
    def tile(self) -> decode.Tile:
        """Keys of a tile, in the words of decode_attention."""
        return decode.Tile(streams=1, block_kv=block_kv(self.problem.head_dim), depth=2)

    def scratch(self, dtype) -> list[Any]:
        """Shared memory and barriers of one CTA, in the order of Refs."""
        h, keys = self.problem.head_dim, self.tile.block_kv
        scratch = [
            plgpu.SMEM((2, COLUMNS, h), dtype),
            plgpu.SMEM((self.depth, keys, h), dtype),
            plgpu.SMEM((COLUMNS, keys), dtype),
            plgpu.SMEM((COLUMNS, h), dtype),
            plgpu.SMEM((REDUCTION_WORDS,), jnp.float32),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=self.depth),
        ]
        return [*scratch, plgpu.SMEM((h, COLUMNS), jnp.float32)] if self.emulated else scratch


class Refs(NamedTuple):
    """The references a warpgroup works on: operands, the result, scratch."""

    q: Any
    k: Any
    v: Any
    lengths: Any
    slopes: Any
    out: Any
    queries: Any
    ring: Any
    weights: Any
    results: Any
    reduction: Any
    q_full: Any
    full: Any
    emulated_acc: Any


class Cursor(NamedTuple):
    """The next load, number `load` of all: tile `tile` of an item's `tiles`.

    Even loads are keys, odd ones the values of the same tile.
    """

    item: Array
    tile: Array
    tiles: Array
    load: Array


def block_kv(head_dim: int) -> int:
    """Keys of a tile: copies of at least 16 KB, since every tile costs time of its own."""
    return 128 if head_dim == 64 else 64


def slot_bytes(head_dim: int) -> int:
    """Shared memory of one slot of the ring."""
    return 2 * block_kv(head_dim) * head_dim


def fixed_bytes(head_dim: int) -> int:
    """Shared memory beside the ring, without barriers."""
    return 2 * COLUMNS * (3 * head_dim + block_kv(head_dim)) + 4 * REDUCTION_WORDS


def name_refs(job: Job, refs) -> Refs:
    """Gives the references of a launch their names."""
    refs = list(refs)
    if not job.problem.has_alibi:
        refs.insert(4, None)
    return Refs(*refs, *([] if job.emulated else [None]))


def attend(job: Job, refs: Refs, me, workers: int) -> None:
    """The attention of items me, me + workers, ...: of one key-value head of one sequence each."""
    problem, block, h = job.problem, job.tile.block_kv, job.problem.head_dim
    count = share(problem.items, me, workers)
    dtype = refs.q.dtype
    # Only rows of this head may be read or written; see decode_attention.mosaic_gpu.
    rows = pl.ds(jnp.minimum(me, 0) * 8, COLUMNS) if problem.rows < COLUMNS else pl.ds(0, COLUMNS)

    def locate(i):
        """Sequence of this launch, and key-value head, of the i-th item."""
        item, heads = me + i * workers, jnp.int32(problem.num_kv_heads)
        return lax.div(item, heads), lax.rem(item, heads)

    def keys_of(i):
        return refs.lengths[locate(jnp.minimum(i, count - 1))[0]]

    def tiles_of(i):  # One at least: so that an item without keys is no special case.
        return jnp.maximum(lax.div(keys_of(i) + (block - 1), jnp.int32(block)), 1)

    def slot_of(load):
        return lax.rem(load, jnp.int32(job.depth))

    def fetch(which: int, cursor: Cursor) -> Cursor:
        """Starts the next load, which is one of keys (0) or of values (1)."""

        @pl.when(cursor.item < count)
        def _():
            (sequence, head), slot = locate(cursor.item), slot_of(cursor.load)
            keys = pl.ds(cursor.tile * block, block)
            source = (refs.k, refs.v)[which].at[problem.first_sequence + sequence, keys, head]
            plgpu.copy_gmem_to_smem(source, refs.ring.at[slot], refs.full.at[slot])

        item, tile, tiles, load = cursor
        if which == 1:
            item, tile, tiles = lax.cond(
                cursor.tile + 1 < cursor.tiles,
                lambda: (cursor.item, cursor.tile + 1, cursor.tiles),
                lambda: (cursor.item + 1, jnp.int32(0), tiles_of(cursor.item + 1)),
            )
        return Cursor(item, tile, tiles, load + 1)

    def refill(read: int, cursor: Cursor) -> Cursor:
        """Loads into the slot of keys (0) or values (1) that has been read."""
        return fetch((read + job.depth) % 2, cursor)

    def fetch_queries(i):
        slot = lax.rem(i, jnp.int32(2))

        @pl.when(i < count)
        def _():
            sequence, head = locate(i)
            source = refs.q.at[sequence, head, rows]
            plgpu.copy_gmem_to_smem(source, refs.queries.at[slot], refs.q_full.at[slot])

    def run_item(i, carry):
        step, cursor = carry
        (sequence, head), q_slot = locate(i), lax.rem(i, jnp.int32(2))
        tiles = tiles_of(i)
        part = decode.Part(sequence, head, jnp.int32(0), keys_of(i), jnp.int32(0), tiles)
        slopes = None
        if refs.slopes is not None:
            slopes = plgpu.load(refs.slopes.at[head], layout=decode.column(), optimized=False)

        def load(acc):
            if job.emulated:
                return acc[...]
            return plgpu.wgmma_accumulator_load(acc, wait_n=None)

        def arrived(load):
            slot = slot_of(load)
            plgpu.barrier_wait(refs.full.at[slot])
            return slot

        def products_of(slot):
            def multiply(acc):
                plgpu.wgmma(acc, refs.ring.at[slot], refs.queries.at[q_slot].transpose((1, 0)))
                return acc[...]

            return pl.run_scoped(multiply, plgpu.ACC((block, COLUMNS)))

        def add_values(acc, slot):
            if job.emulated:  # There no accumulator can be written: acc is shared memory.
                values, weights = refs.ring[slot].T, refs.weights[...].T
                acc[...] += jnp.dot(values, weights, preferred_element_type=jnp.float32)
                plgpu.commit_smem()
                return
            values = refs.ring.at[slot].transpose((1, 0))
            plgpu.wgmma(acc, values, refs.weights.transpose((1, 0)))
            plgpu.wgmma_wait(0)

        def attend_item(acc):
            def advance(t, carry):
                highest, sums, cursor = carry
                products = products_of(arrived(2 * (step + t)))
                cursor = refill(0, cursor)
                scores = decode._scores(problem, job.tile, part, products, t, slopes)
                reduced = decode._reduce_keys("max", scores, refs.reduction, job.emulated)
                new = jnp.maximum(highest, reduced)
                shrink = jnp.exp2(highest - new)
                p = jnp.exp2(scores - decode._over_columns(new, scores.shape))
                sums = sums * decode._over_columns(shrink, sums.shape) + p
                refs.weights.transpose((1, 0))[...] = p.astype(dtype)
                plgpu.commit_smem()
                o = load(acc)
                acc[...] = o * decode._over_columns(shrink, o.shape)
                add_values(acc, arrived(2 * (step + t) + 1))
                return new, sums, refill(1, cursor)

            if job.emulated:
                acc[...] = jnp.zeros_like(acc)
            lowest = jnp.full((COLUMNS,), decode.LOWEST, jnp.float32)
            zero = jnp.zeros((block, COLUMNS), jnp.float32)
            start = (
                plgpu.layout_cast(lowest, decode.column()),
                plgpu.layout_cast(zero, decode.matrix()),
            )
            plgpu.barrier_wait(refs.q_full.at[q_slot])
            _, sums, moved = lax.fori_loop(0, tiles, advance, (*start, cursor))
            fetch_queries(i + 2)
            total = decode._reduce_keys("add", sums, refs.reduction, job.emulated)
            o, inverse = load(acc), jnp.where(total > 0, 1 / total, 0.0)
            return o * decode._over_columns(inverse, o.shape), moved

        if job.emulated:
            o, moved = attend_item(refs.emulated_acc)
        else:
            o, moved = pl.run_scoped(attend_item, plgpu.ACC((h, COLUMNS)))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # The last item's store has read results.
        refs.results.transpose((1, 0))[...] = o.astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs.results, refs.out.at[sequence, head, rows])
        return step + tiles, moved

    @pl.when(count > 0)
    def _():
        zero = jnp.int32(0)
        cursor = Cursor(zero, zero, tiles_of(zero), zero)
        for load in range(job.depth):
            cursor = fetch(load % 2, cursor)
        for i in range(2):
            fetch_queries(jnp.int32(i))
        lax.fori_loop(0, count, run_item, (zero, cursor))
        plgpu.wait_smem_to_gmem(0)
