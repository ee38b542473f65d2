"""What is static about a GEMM's launch: tiles, epilogue, and the list of tiles that CTAs share.

The result is a list of segments, rectangles of equal tiles: one per input that shares the weight,
and where the last columns are narrower tiles, one more for each. A CTA's share of the list runs on
from segment to segment.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_kernels.gemm.activations import Activation

CONSUMERS = 2
PIECE = 64  # Rows and columns that the epilogue stores at a time.
ROW_BYTES = 128  # Of an operand in a slot, the widest that TMA swizzles.
SMEM_BYTES = 232_448


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What one multiplying warpgroup computes at a time, and how operands reach it.

    Attributes:
      tile_m: Rows of its accumulator.
      tile_n: Columns of its accumulator, or of each of two for a gated product.
      tile_k: Depth of one slot of the ring: 128 bytes.
      pipeline_depth: Slots of the ring.
      schedule: Whether the two warpgroups take alternate tiles or halves (in rows) of each.
      cluster: The dimension along which two CTAs form a cluster: those along "m" share the weight's
        slot, those along "n" the input's. None: no clusters.
      weights: Accumulators: 2 for a gated product.
      store_slots: Buffers of one piece each between accumulator and result, per warpgroup.
      raster_width: Height, in (cluster) tiles, of the bands of rows in which tiles are visited.
      in_flight: Steps whose products may still run when the next are issued: with 0 a slot is free
        one step earlier.
      narrow_cols: How many columns of tiles are 64 narrower. They come last in every CTA's share,
        fill the columns that the others leave, and even out the last wave.
      operand_bytes: Of an element of the operands, 1 or 2.
      promotion: After how many steps sums leave the tensor cores' accumulator, which keeps some 14
        bits of FP8 products, to be added in f32. 0: never.
    """

    tile_m: int = 128
    tile_n: int = 128
    tile_k: int = 64
    pipeline_depth: int = 6
    schedule: Literal["pingpong", "cooperative"] = "pingpong"
    cluster: Literal["m", "n"] | None = None
    weights: int = 1
    store_slots: int = 2
    raster_width: int = 8
    in_flight: int = 1
    narrow_cols: int = 0
    operand_bytes: Literal[1, 2] = 2
    promotion: int = 0

    def __post_init__(self):
        """Checks what WGMMA, TMA and the register file allow."""
        depth = ROW_BYTES // self.operand_bytes
        if self.tile_m % 64 or self.tile_n % 64 or self.tile_k != depth:
            raise ValueError(
                f"Tile({self.tile_m}, {self.tile_n}, {self.tile_k}): WGMMA takes 64 rows at a "
                f"time, a swizzled row is {depth} elements; tile_m and tile_n are multiples of 64, "
                f"tile_k is {depth}; choose such a tile"
            )
        if self.tile_n > 256 or self.block_m > 256:
            raise ValueError(
                f"Tile(tile_m={self.tile_m}, tile_n={self.tile_n}): a TMA box has at most 256 "
                "rows, a WGMMA 256 columns; lower them"
            )
        sums = 2 if self.promotion else 1
        registers = sums * self.weights * self.tile_m * self.tile_n // 128
        if registers > 192:
            raise ValueError(
                f"Tile(tile_m={self.tile_m}, tile_n={self.tile_n}, weights={self.weights}): "
                f"accumulators need {registers} registers a thread; 192 leave room for the rest; "
                "lower the tile"
            )
        if self.promotion < 0 or (self.promotion and self.operand_bytes == 2):
            raise ValueError(
                f"Tile(promotion={self.promotion}, operand_bytes={self.operand_bytes}): sums of "
                "16-bit types are kept in f32; 0 is allowed, or a number of steps with 1 byte; "
                "choose one"
            )
        if self.in_flight not in (0, 1):
            raise ValueError(
                f"Tile(in_flight={self.in_flight}): 0 or 1 step can be left; choose one"
            )
        if self.pipeline_depth < 2 or self.store_slots < 1 or self.raster_width < 1:
            raise ValueError(
                f"Tile(pipeline_depth={self.pipeline_depth}, store_slots={self.store_slots}, "
                f"raster_width={self.raster_width}): at least 2, 1 and 1 are needed; raise them"
            )
        if self.narrow_cols < 0 or (self.narrow_cols and self.tile_n not in (128, 192)):
            raise ValueError(
                f"Tile(tile_n={self.tile_n}, narrow_cols={self.narrow_cols}): tiles of 128 or 192 "
                "columns have narrower ones of 64 or 128; choose such a tile, or 0"
            )
        if self.smem_bytes > SMEM_BYTES:
            raise ValueError(
                f"{self}: needs {self.smem_bytes} bytes of shared memory; an SM has {SMEM_BYTES}; "
                "lower pipeline_depth or store_slots"
            )

    @property
    def block_m(self) -> int:
        """Rows of the input in one slot."""
        return self.tile_m * (CONSUMERS if self.schedule == "cooperative" else 1)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of one CTA with results of 16 bits, barriers included."""
        ring = self.pipeline_depth * (self.block_m + self.weights * self.tile_n) * ROW_BYTES
        pieces = CONSUMERS * self.store_slots * PIECE * PIECE
        bias = CONSUMERS * self.tile_n
        if self.operand_bytes == 2:
            return ring + 2 * (pieces + bias) + 1024
        bias *= self.weights == 1
        scales = CONSUMERS * self.weights * self.tile_n
        return ring + 2 * (pieces + bias) + 4 * scales + 1024

    @property
    def moment_bytes(self) -> int:
        """Shared memory that moments of a tile of each warpgroup take beside that."""
        return CONSUMERS * 2 * 4 * self.tile_m * self.tile_n // PIECE

    @property
    def narrow_n(self) -> int:
        """Columns of a narrow tile."""
        return self.tile_n - PIECE


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """What happens to x @ w before it is stored: residual + scale * activation(x @ w + bias).

    With `moments` mean and squared deviations of each piece of a row are stored beside it. `dtype`
    is that of the result; None: that of the inputs.
    """

    activation: Activation | None = None
    gated: bool = False
    scale: float = 1.0
    moments: bool = False
    dtype: str | None = None

    @property
    def quantized(self) -> bool:
        """Whether the result is of 8 bits, over a scale of all its elements."""
        return self.dtype is not None and jnp.dtype(self.dtype).itemsize == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Equal tiles side by side and one below the other: a part of one input's result.

    Attributes:
      group: Which input.
      first: Tiles, or clusters of them, that come before in the list of all.
      rows: Tiles, or clusters of them, from top to bottom.
      cols: The same from left to right.
      first_col: Column of the result where it begins.
      width: Columns of a tile.
      narrow: Whether that is the narrow width.
    """

    group: int
    first: int
    rows: int
    cols: int
    first_col: int
    width: int
    narrow: bool

    @property
    def end(self) -> int:
        """Tiles that come before the next segment."""
        return self.first + self.rows * self.cols


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything static about one launch; `ms` are the rows of each input.

    `emulated` is for jax's interpreter, whose race detector takes two rings in the same memory for
    one buffer, whatever the slots: there they lie apart.
    """

    ms: tuple[int, ...]
    n: int
    k: int
    ctas: int
    tile: Tile
    epilogue: Epilogue
    emulated: bool = False

    @property
    def m(self) -> int:
        """Rows of all inputs."""
        return sum(self.ms)

    @property
    def cluster_m(self) -> int:
        """CTAs of a cluster one below the other."""
        return 2 if self.tile.cluster == "m" else 1

    @property
    def cluster_n(self) -> int:
        """CTAs of a cluster side by side."""
        return 2 if self.tile.cluster == "n" else 1

    @property
    def workers(self) -> int:
        """Clusters, or CTAs where there are none; each takes every workers-th tile."""
        return self.ctas // (self.cluster_m * self.cluster_n)

    @property
    def weights(self) -> int:
        """Weights multiplied in one pass."""
        return 2 if self.epilogue.gated else 1

    @property
    def segments(self) -> list[Segment]:
        """The parts of the result in the order in which they are computed, wide tiles first."""
        tile, found, first = self.tile, [], 0
        rest = self.n - tile.narrow_cols * tile.narrow_n
        wide_cols = pl.cdiv(rest, tile.tile_n * self.cluster_n)
        parts = [(False, wide_cols, 0, tile.tile_n)]
        if tile.narrow_cols:
            cols = pl.cdiv(tile.narrow_cols, self.cluster_n)
            start = wide_cols * tile.tile_n * self.cluster_n
            parts.append((True, cols, start, tile.narrow_n))
        for narrow, cols, start, width in parts:
            for group, m in enumerate(self.ms):
                segment = Segment(
                    group=group,
                    first=first,
                    rows=pl.cdiv(m, tile.block_m * self.cluster_m),
                    cols=cols,
                    first_col=start,
                    width=width,
                    narrow=narrow,
                )
                found.append(segment)
                first = segment.end
        return found

    @property
    def moment_types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """For each input, by turns mean and squared deviations of each piece of its rows."""
        ms = self.ms if self.epilogue.moments else ()
        return tuple(jax.ShapeDtypeStruct((2 * self.n // PIECE, m), jnp.float32) for m in ms)

    def covered_rows(self, m: int) -> int:
        """Rows of the tiles that m rows fall into."""
        step = self.tile.block_m * self.cluster_m
        return pl.cdiv(m, step) * step

    @property
    def total(self) -> int:
        """Tiles, or clusters of them, of all segments."""
        return self.segments[-1].end

    @property
    def steps(self) -> int:
        """Slots that one tile reads."""
        return pl.cdiv(self.k, self.tile.tile_k)

    @property
    def swizzled_k(self) -> int:
        """Columns of a slot in a swizzled row: TMA takes only rows that divide k."""
        return math.gcd(self.k, self.tile.tile_k)

    @property
    def has_bias_slots(self) -> bool:
        """Whether there is room for a bias: a gated product of 8 bits has none."""
        return not (self.eight_bit and self.epilogue.gated)

    @property
    def shared_slots(self) -> bool:
        """Whether narrow tiles see the weight's slots in a shape of their own."""
        return self.tile.narrow_cols > 0 and not self.eight_bit

    @property
    def eight_bit(self) -> bool:
        """Whether operands are of one byte: weights are (N, K) then, and columns have scales."""
        return self.tile.operand_bytes == 1

    @property
    def pingpong(self) -> bool:
        """Whether warpgroups take alternate tiles."""
        return self.tile.schedule == "pingpong"

    def pieces(self, width: int) -> list[tuple[int, int]]:
        """First row and column of each piece of a warpgroup's part of a tile.

        A result of 64 columns has none beyond them: TMA drops its axis of one block of columns, and
        a store that lies wholly beyond would land on the first block instead of being clipped.
        """
        cols = range(0, min(width, self.n), PIECE)
        return list(itertools.product(range(0, self.tile.tile_m, PIECE), cols))
