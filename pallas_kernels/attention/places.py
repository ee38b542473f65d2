"""The operands of the attention kernel, the items of a CTA, and the place of an item."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.attention import items
from pallas_kernels.attention.tile import ALIGNMENT, Problem, Tile


@dataclass(frozen=True, slots=True)
class Given[Operand]:
    """The operands: arrays outside the kernel, references inside; absent ones are None.

    Attributes:
      q: Queries.
      k: Keys.
      v: Values.
      lengths: Number of valid keys of each sequence.
      query_lengths: Number of valid queries of each sequence.
      starts: Position of the first query of each sequence among its keys.
      slopes: ALiBi's slope of each query head.
      bias: Added to the scaled scores.
      key_bias: Added to the scores of each key, by key tiles, in the units of the softmax.
      key_biased: Whether the key_bias of each key tile is not zero.
      rows: Rows of differences; query 0 and key 0 meet the last row of query tiles.
      shift: Added to queries in their products with `rows`.
      packed: The query tiles of packed sequences, as `items.pack` lists them.
      dealt: The items of each CTA, as `items.deal` deals them.
    """

    q: Operand
    k: Operand
    v: Operand
    lengths: Operand | None = None
    query_lengths: Operand | None = None
    starts: Operand | None = None
    slopes: Operand | None = None
    bias: Operand | None = None
    key_bias: Operand | None = None
    key_biased: Operand | None = None
    rows: Operand | None = None
    shift: Operand | None = None
    packed: Operand | None = None
    dealt: Operand | None = None


class Place(NamedTuple):
    """One work item: a query tile of one head, and its key tiles first .. last - 1."""

    batch: Array
    head: Array
    origin: Array  # where rows and keys count from, in units of what TMA aligns
    row: Array  # first query row
    start: Array  # position of query row 0 among the keys
    low: Array  # first valid row, and key
    keys: Array  # end of the valid keys
    queries: Array  # end of the valid rows
    first: Array
    last: Array
    clear_first: Array  # tiles clear_first .. clear_last - 1 need no mask
    clear_last: Array


def ceil_div(a: Array, b: int) -> Array:
    """Quotient of numbers that are not negative, rounded up."""
    return lax.div(a + (b - 1), jnp.int32(b))


def modulo(a: Array, b: int) -> Array:
    """Remainder of numbers that are not negative."""
    return lax.rem(a, jnp.int32(b))


def divide(a: Array, b: int) -> tuple[Array, Array]:
    """Quotient, rounded down, and remainder of numbers that are not negative."""
    return lax.div(a, jnp.int32(b)), modulo(a, b)


def place_of(problem: Problem, tile: Tile, given: Given[jax.Ref], item: Array) -> Place:
    """Returns the place of a work item; a section of heads starts with its last query tiles."""
    zero = jnp.int32(0)
    batch, origin, start, low = zero, zero, zero, zero
    keys, queries = jnp.int32(problem.num_keys), jnp.int32(problem.num_queries)
    if given.packed is not None:
        index, head = divide(item, problem.num_heads)
        row, begin, queries, keys = (given.packed[1 + 4 * index + i] for i in range(4))
        origin, low = divide(begin, ALIGNMENT)
        queries, keys = queries - (begin - low), keys - (begin - low)
    else:
        tiles, section_heads = items.num_tiles(problem, tile), problem.heads_per_section()
        section, within = divide(item, section_heads * tiles)
        behind, index = divide(within, section_heads)
        row = (tiles - 1 - behind) * tile.block_q
        batch, head = divide(section * section_heads + index, problem.num_heads)
    if given.lengths is not None:
        keys = jnp.clip(given.lengths[batch], 0, problem.num_keys)
    if given.starts is not None:
        start = jnp.clip(given.starts[batch], 0, problem.num_keys)
    if given.query_lengths is not None:
        queries = given.query_lengths[batch]
        keys = jnp.where(row < queries, keys, 0)
    seen_by_all, seen_by_any = keys, keys
    if problem.causal:
        seen_by_all = jnp.minimum(keys, row + start + 1)
        seen_by_any = jnp.minimum(keys, row + start + tile.block_q)
    # Without a key, one tile is taken and masked.
    last = jnp.maximum(ceil_div(seen_by_any, tile.block_kv), 1)
    first, masked = zero, low
    if problem.window is not None:
        oldest = jnp.maximum(row + start + 1 - problem.window, 0)
        first = jnp.minimum(lax.div(oldest, jnp.int32(tile.block_kv)), last - 1)
        masked = jnp.maximum(oldest + tile.block_q - 1, low)
    clear_first = ceil_div(masked, tile.block_kv)
    clear_last = lax.div(seen_by_all, jnp.int32(tile.block_kv))
    return Place(
        batch, head, origin, row, start, low, keys, queries, first, last, clear_first, clear_last
    )


def for_each_item(
    problem: Problem, tile: Tile, sms: int, given: Given[jax.Ref], run: Callable[..., Array]
) -> Array:
    """Calls run(item, number, step) for the items of this CTA, and returns their number.

    `number` counts the items of this CTA, `step` their steps; `run` returns the step after its own.
    """
    sm = lax.axis_index("sm")
    if given.dealt is not None:
        dealt, count = given.dealt, given.dealt[sm, 0]

        def item_of(i):
            return dealt[sm, i + 1]

    elif given.packed is not None:  # longest first, dealt forwards and backwards in turn
        total = given.packed[0] * problem.num_heads
        rounds, left = divide(total, sms)

        def item_of(i):
            return i * sms + lax.select(modulo(i, 2) == 0, sm, sms - 1 - sm)

        count = rounds + (item_of(rounds) - rounds * sms < left).astype(jnp.int32)
    else:
        count = lax.div(items.num_items(problem, tile) - 1 - sm + sms, jnp.int32(sms))

        def item_of(i):
            return sm + i * sms

    lax.fori_loop(0, count, lambda i, step: run(item_of(i), i, step), jnp.int32(0))
    return count
