"""What a GEMM's epilogue does row by row: factors that come in, moments that go out.

Moments are kept for each piece of a row by itself: mean and sum of squared deviations from it. They
depend on no tile, and joining them loses nothing where the mean is large (`folded.joined_scale`).
"""

from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic import plgpu


def load_scales(scales, row, rows: int, piece: int) -> list[Any]:
    """The factors of a tile's rows for each piece of them: under way while products are summed."""
    layout = plgpu.Layout.WGMMA.reduce(1)
    return [
        plgpu.load(scales.at[pl.ds(row + r, piece)], layout=layout, optimized=False)
        for r in range(0, rows, piece)
    ]


def scale_rows(values: list[Any], scale) -> list[Any]:
    """Pieces with each row multiplied by its factor."""
    spread = lax.broadcast_in_dim(scale, values[0].shape, [0])
    return [value * spread for value in values]


def keep_moments(piece, moments) -> None:
    """Keeps the moments of a piece's rows, as they are stored, in shared memory.

    The piece is read back: beside the accumulators the registers do not hold it for a second use.
    """
    value = plgpu.load(piece, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
    mean = jnp.sum(value, axis=1) * (1 / value.shape[1])
    value -= lax.broadcast_in_dim(mean, value.shape, [0])
    moments[0] = mean
    moments[1] = jnp.sum(value * value, axis=1)


def store_moments(slots, moments, row, col, piece: int) -> None:
    """Copies what was kept of a tile to where its row and column say, clipped as the result is."""
    first = lax.div(col, jnp.int32(piece // 2))
    target = moments.at[pl.ds(first, slots.shape[0]), pl.ds(row, slots.shape[1])]
    plgpu.copy_smem_to_gmem(slots, target)
