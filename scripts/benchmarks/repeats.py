"""Calls on the same inputs, compared bit for bit on the device: where one differs, and how often.

Nothing is read back between calls, so that thousands follow one another without a gap.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

SHOWN = 6  # Ranges of an axis that are written out.
WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


class Tally(NamedTuple):
    """The differences so far, on the device.

    Attributes:
      compared: The number of calls that were compared.
      calls: The number of calls that differed.
      first: Number of the first call that did, -1 if none has.
      largest: For each result, the largest difference, in f32; NaN where a value was none.
      places: For each result, the elements that differed.
    """

    compared: Array
    calls: Array
    first: Array
    largest: tuple[Array, ...]
    places: tuple[Array, ...]


def none_differ(results: Sequence[Array | jax.ShapeDtypeStruct]) -> Tally:
    """The tally before the first comparison.

    Args:
      results: Results of the shapes that will be compared.
    """
    return Tally(
        compared=jnp.int32(0),
        calls=jnp.int32(0),
        first=jnp.int32(-1),
        largest=tuple(jnp.float32(0) for _ in results),
        places=tuple(jnp.zeros(x.shape, bool) for x in results),
    )


def add(tally: Tally, expected: Sequence[Array], results: Sequence[Array]) -> Tally:
    """The tally with one more call; to be compiled."""
    places = [bits(a) != bits(b) for a, b in zip(expected, results, strict=True)]
    differs = jnp.any(jnp.stack([jnp.any(x) for x in places]))
    return Tally(
        compared=tally.compared + 1,
        calls=tally.calls + differs,
        first=jnp.where(differs & (tally.first < 0), tally.compared + 1, tally.first),
        largest=tuple(
            # Not maximum of the values: NaNs of the same bits are no difference.
            jnp.maximum(old, jnp.max(jnp.where(x, _distance(a, b), 0.0), initial=0.0))
            for old, x, a, b in zip(tally.largest, places, expected, results, strict=True)
        ),
        places=tuple(old | x for old, x in zip(tally.places, places, strict=True)),
    )


def describe(tally: Tally) -> str:
    """How many of the compared calls differ and where; empty if none does."""
    compared, calls, first = map(int, (tally.compared, tally.calls, tally.first))
    if not calls:
        return ""
    parts = [f"{calls:,d} of {compared:,d} repeats differ, number {first} the first"]
    for i, (place, largest) in enumerate(zip(tally.places, tally.largest, strict=True)):
        where = np.asarray(place)
        if where.any():
            parts.append(
                f"result {i}{where.shape}: {where.sum():,d} elements, by {float(largest):.3g}, at "
                f"{ranges_of(where)}"
            )
    return "; ".join(parts)


def ranges_of(places: np.ndarray) -> str:
    """Along each axis, the ranges of indices at which anything is set: tiles show as such."""
    found = []
    for axis in range(places.ndim):
        others = tuple(i for i in range(places.ndim) if i != axis)
        indices = np.flatnonzero(places.any(axis=others))
        runs = np.split(indices, np.flatnonzero(np.diff(indices) > 1) + 1)
        shown = ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs[:SHOWN])
        found.append(shown + (f", ... ({len(indices)} indices)" if len(runs) > SHOWN else ""))
    return " x ".join(f"[{text}]" for text in found)


def digests(arrays: Sequence[Array]) -> Array:
    """The digest of each."""
    return jnp.stack([digest(x) for x in arrays])


@jax.jit
def digest(x: Array) -> Array:
    """A number in which every bit of an array counts, whatever the order of the sum.

    Each element's bits have an odd factor of their own, modulo 2^32: another value of one element
    always changes the sum.
    """
    words = bits(x).astype(jnp.uint32).reshape(-1)
    factors = lax.iota(jnp.uint32, words.size) * jnp.uint32(0x9E3779B2) | jnp.uint32(1)
    return jnp.sum(words * factors, dtype=jnp.uint32)


def bits(x: Array) -> Array:
    """The bits of an array's elements, as integers."""
    if x.dtype == jnp.bool:
        return x.astype(jnp.uint8)
    return lax.bitcast_convert_type(x, WORDS[x.dtype.itemsize])


def _distance(a: Array, b: Array) -> Array:
    return jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32))


add_call = jax.jit(add, donate_argnums=0)
