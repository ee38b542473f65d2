"""The shared memory of the attention kernel: tiles, and the barriers that guard them."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.attention.tile import ROWS, Problem, Tile
from pallas_kernels.mosaic import plgpu


class Ring(NamedTuple):
    """Tiles in shared memory, and barriers that signal full and empty tiles.

    A launch has their types, a kernel the references.
    """

    tiles: Any
    full: Any
    empty: Any


class Scratch(NamedTuple):
    """The shared memory of a CTA; absent parts are None.

    Attributes:
      q: Query tiles, by slot and consumer; outputs leave from there.
      k: Key tiles.
      v: Value tiles.
      turn: Barriers by which consumers take turns in issuing products.
      held: Barriers that keep ptxas from moving instructions across.
      packed_rows: Outputs of tiles with rows of several sequences, by consumer.
      bias: Bias tiles, by consumer.
      rows: Tiles of rows of differences.
      accumulators: Outputs in f32, by consumer, for jax's interpreter.
    """

    q: Ring
    k: Ring
    v: Ring
    turn: Any
    held: Any
    packed_rows: Any
    bias: Ring | None
    rows: Ring | None
    accumulators: Any


def scratch_types(problem: Problem, tile: Tile, dtype: DTypeLike, *, interpret: bool) -> Scratch:
    """Returns the types of a CTA's shared memory.

    Args:
      problem: The call.
      tile: The tile.
      dtype: The dtype of queries, keys and values.
      interpret: Whether jax's interpreter runs the kernel.
    """
    consumers, depth = tile.consumers, tile.depth
    rows = plgpu.SMEM((consumers, ROWS, problem.head_dim), dtype)
    each_consumer = plgpu.Barrier(num_barriers=consumers)
    each_query = plgpu.Barrier(num_barriers=tile.query_slots * consumers)
    queries = plgpu.SMEM((tile.query_slots, consumers, ROWS, problem.head_dim), dtype)
    bias = plgpu.SMEM((consumers, ROWS, tile.block_kv), dtype)

    def ring(slots: int) -> Ring:
        """Returns the types of a ring of key tiles, which all consumers read."""
        return Ring(
            tiles=plgpu.SMEM((slots, tile.block_kv, problem.head_dim), dtype),
            full=plgpu.Barrier(num_barriers=slots),
            empty=plgpu.Barrier(num_arrivals=consumers, num_barriers=slots),
        )

    accumulators = plgpu.SMEM((consumers, ROWS, problem.head_dim), jnp.float32)
    return Scratch(
        q=Ring(queries, each_query, each_query),
        k=ring(depth),
        v=ring(depth),
        turn=each_consumer,
        held=each_consumer if tile.holds else None,
        packed_rows=rows if problem.packed else None,
        bias=Ring(bias, each_consumer, each_consumer) if problem.bias_batch else None,
        rows=ring(tile.relative_depth) if problem.has_relative else None,
        accumulators=accumulators if interpret else None,
    )
