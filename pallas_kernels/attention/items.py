"""The work items of a call, and their distribution over CTAs.

An item is a query tile of one head. The order in which CTAs take items is found before the call if
the work is known by then, else by XLA (`pack`) or by plain arithmetic in the kernel.
"""

import functools
import heapq

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pallas_kernels.attention.tile import ALIGNMENT, Problem, Tile

# The cost of an item beside its steps, in steps: first scores, last values, output.
STEPS_AROUND = 1.5


def num_tiles(problem: Problem, tile: Tile) -> int:
    """Query tiles of a head; for packed sequences, an upper bound for all of them."""
    return -(-problem.num_queries // tile.block_q)


def num_items(problem: Problem, tile: Tile) -> int:
    """Work items of a call whose sequences are not packed."""
    return problem.batch_size * problem.num_heads * num_tiles(problem, tile)


@functools.cache
def deal(problem: Problem, tile: Tile, sms: int) -> np.ndarray:
    """Deals causal items: each, in their order, goes to the CTA that is free first.

    Dealt in turn, some CTAs would get 1.6 times the work of others: items of a section of heads
    come longest first, and sections are no multiple of the CTAs.

    Returns:
      (sms, 1 + most items of a CTA): the number of items, and the items.
    """
    tiles, section = num_tiles(problem, tile), problem.heads_per_section()
    free = [(0.0, sm) for sm in range(sms)]
    dealt = [[] for _ in range(sms)]
    for item in range(num_items(problem, tile)):
        row = (tiles - 1 - item % (section * tiles) // section) * tile.block_q
        steps = -(-min(row + tile.block_q, problem.num_keys) // tile.block_kv)
        time, sm = free[0]
        heapq.heapreplace(free, (time + steps + STEPS_AROUND, sm))
        dealt[sm].append(item)
    most = max(map(len, dealt))
    return np.array([[len(x), *x, *[0] * (most - len(x))] for x in dealt], np.int32)


def most_packed_tiles(tile: Tile, total: int, num_sequences: int) -> int:
    """The most query tiles that sequences of `total` tokens in all can have."""
    # A sequence starts up to ALIGNMENT - 1 rows after its first tile, and may fill its last little.
    return (total + num_sequences * (tile.block_q + ALIGNMENT - 2)) // tile.block_q


def pack(
    problem: Problem,
    tile: Tile,
    starts: Int[Array | np.ndarray, " B"],
    lengths: Int[Array | np.ndarray, " B"],
    keys: Int[Array | np.ndarray, " B"],
) -> Int[Array | np.ndarray, " X"]:
    """Lists the query tiles of packed sequences, those with most keys first.

    Args:
      problem: The call.
      tile: The tile.
      starts: First token of each sequence.
      lengths: Tokens of each sequence.
      keys: The number of these tokens that count as keys.

    Returns:
      The number of tiles, then for each tile four numbers: its first row, counted from the
      sequence's first token rounded down to what TMA can start from; that token; the end of the
      sequence's tokens; the end of its keys. Of numpy if the arguments are.
    """
    xp = jnp if any(isinstance(x, jax.Array) for x in (starts, lengths, keys)) else np
    starts, lengths, keys = (xp.asarray(x) for x in (starts, lengths, keys))
    origins = starts // ALIGNMENT * ALIGNMENT
    ends = starts + lengths
    tiles = xp.where(lengths > 0, -(-(ends - origins) // tile.block_q), 0)
    after = xp.cumsum(tiles)
    most = most_packed_tiles(tile, problem.num_queries, len(starts))
    index = xp.arange(most)
    sequence = xp.sum(index[:, None] >= after[None, :-1], axis=1)
    row = (index - (after - tiles)[sequence]) * tile.block_q
    seen = (starts - origins + keys)[sequence]
    if problem.causal:
        seen = xp.minimum(seen, row + tile.block_q)
    steps = xp.where(index < after[-1], -(-seen // tile.block_kv), -1)
    order = xp.argsort(-steps, stable=True)
    of, row = sequence[order], row[order]
    columns = xp.stack([row, starts[of], ends[of], (starts + keys)[of]], axis=1)
    return xp.concatenate([after[-1:], columns.reshape(-1)]).astype(np.int32)
