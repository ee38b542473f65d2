"""The operations on a tile of scores in registers: cap, masks, ALiBi, the online softmax."""

import functools
import math
import operator

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.attention.places import Place
from pallas_kernels.attention.tile import ROWS, Problem, Tile
from pallas_kernels.mosaic import plgpu

LOG2_E = math.log2(math.e)
# Start of the running maximum; finite, since exp2(-inf - LOWEST) is 0 and exp2(-inf + inf) is NaN.
LOWEST = -1e30

MATRIX = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)
COLUMN = plgpu.Layout.WGMMA.reduce(0)


def capped(problem: Problem, products: Array) -> Array:
    """Returns the input of the softmax, in its units: products of queries and keys, maybe capped.

    The GPU's tanh.approx.f32 has a relative error of 2^-11, a quarter of bfloat16's rounding.
    """
    if problem.softcap is None:
        return products
    return jnp.tanh(products * (problem.scale / problem.softcap))


def allowed(
    problem: Problem, tile: Tile, place: Place, row: Array, key: Array, *, last: bool
) -> Array:
    """Returns the mask of valid scores for rows row .. and keys key ..

    `last` says whether the tile may reach beyond the keys that a row sees, not only before them.
    """
    shape = (ROWS, tile.block_kv)
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=MATRIX)
    position = None
    window = problem.window
    if problem.causal and (last or window is not None):
        position = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=MATRIX)
        position += row + place.start - key
    conditions = []
    if last:
        end = place.keys - key
        conditions.append(column < (end if position is None else jnp.minimum(position + 1, end)))
    if window is not None and position is not None:
        conditions.append(column > position - window)
    if problem.packed:
        conditions.append(column >= place.low - key)
    return functools.reduce(operator.and_, conditions)


def alibi(problem: Problem, tile: Tile, place: Place, row: Array, key: Array, slope: Array):
    """Returns ALiBi in units of log2 for rows row .. and keys key .., as a matrix and a scalar.

    A causal row may shift by a constant; then only the scalar depends on the place of the tile.
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


def over_rows(v: Array, shape: tuple[int, ...]) -> Array:
    """Broadcasts a number for each row over its columns."""
    return lax.broadcast_in_dim(v, shape, [0])


def softmax_step(scores, terms, shift, m, total, factor: float):
    """Online softmax by log2: weights, new maximum and sum, and the factor of earlier results."""
    if terms is None:
        m_new = jnp.maximum(m, scores.max(axis=1) * factor)
        p = jnp.exp2(scores * factor - over_rows(m_new, scores.shape))
    else:
        scores = scores * factor + terms
        m_new = jnp.maximum(m, scores.max(axis=1) + shift)
        p = jnp.exp2(scores - over_rows(m_new - shift, scores.shape))
    shrink = jnp.exp2(m - m_new)
    return p, m_new, total * shrink + p.sum(axis=1), shrink
