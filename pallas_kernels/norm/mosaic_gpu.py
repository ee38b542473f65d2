"""LayerNorm and RMSNorm, a residual added in and the sum out, on as many SMs as they are given.

Bandwidth-bound: each warpgroup streams its rows through a ring of its own in shared memory. A slot
receives rows of x, and of the residual, by TMA, is overwritten in place by the results, and is
stored by TMA, so that deep rings keep enough bytes under way on few SMs. Narrow rows go one to a
warp (a reduction is a few shuffles), wide ones one to a warpgroup. Statistics are in f32, the
variance about the mean. Not here: quantised results.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

SMEM_BYTES = 232_448
MAX_WIDTH = 16_384
WARP_ROW = 2_048  # The widest row that one warp can take: 64 values a thread.
WIDE_STEP = 256  # Wider rows are taken by a warpgroup, in vectors of two values or more.


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How a CTA streams rows.

    Attributes:
      width: Values of a row.
      arrays: Rings of each warpgroup: 1, or 2 with a residual.
      warpgroups: Warpgroups of a CTA, each with its own rows.
      pipeline_depth: Slots of each ring.
      chunk: Rows in a slot.
    """

    width: int
    arrays: int
    warpgroups: int
    pipeline_depth: int
    chunk: int

    def __post_init__(self):
        """Checks what the layouts, TMA, registers and shared memory allow."""
        step = 64 if self.width <= WARP_ROW else WIDE_STEP
        if self.width % step or not 64 <= self.width <= MAX_WIDTH:
            raise NotImplementedError(
                f"norm(width={self.width}): rows are read in vectors of a warp or a warpgroup; "
                f"widths are multiples of 64 up to {WARP_ROW} and of {WIDE_STEP} up to "
                f"{MAX_WIDTH}; use implementation='xla'"
            )
        if self.chunk % self.rows or not 1 <= self.chunk <= 256 or self.pipeline_depth < 2:
            raise ValueError(
                f"Tile(chunk={self.chunk}, pipeline_depth={self.pipeline_depth}): {self.rows} "
                "rows are normalised at a time, TMA takes 256, a ring has two slots; choose a "
                "multiple and at least 2"
            )
        if not 1 <= self.warpgroups <= (2 if self.width > MAX_WIDTH // 2 else 4):
            raise ValueError(
                f"Tile(width={self.width}, warpgroups={self.warpgroups}): the registers of an SM "
                f"hold 4 warpgroups, 2 for rows wider than {MAX_WIDTH // 2}; lower warpgroups"
            )
        if self.smem_bytes > SMEM_BYTES:
            raise ValueError(
                f"{self}: needs {self.smem_bytes} bytes of shared memory; an SM has {SMEM_BYTES}; "
                "lower pipeline_depth, chunk or warpgroups"
            )

    @property
    def rows(self) -> int:
        """Rows that a warpgroup normalises at a time."""
        return rows_at_a_time(self.width)

    @property
    def lanes(self) -> int:
        """Innermost axis under which TMA sees a row: a box has at most 256 values an axis."""
        return 128 if self.width % 128 == 0 else 64

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA for 16-bit rows: rings, scratch of reductions, barriers."""
        ring = self.arrays * self.warpgroups * self.pipeline_depth * self.chunk * self.width
        return 2 * ring + 4096

    @property
    def layout(self) -> Any:
        """How the values of `shape` lie in a warpgroup: in vectors of 16 bytes if the width can."""
        vector = next(v for v in (8, 4, 2) if self.shape[1] % (32 * v) == 0)
        return plgpu.Layout.TILED(
            plgpu.Tiling(((4, 32 * vector), (vector,))),
            warp_dims=(-3,),
            lane_dims=(-2,),
            vector_dim=-1,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """What a warpgroup normalises at a time, a line a warp: four rows, or quarters of one."""
        return (4, self.width * self.rows // 4)


def rows_at_a_time(width: int) -> int:
    """Rows that a warpgroup normalises at a time: four narrow ones, a warp each, or a wide one."""
    return 1 if width > WARP_ROW // 2 and width % WIDE_STEP == 0 else 4


def tile_for(width: int, *, residual: bool) -> Tile:
    """Chooses the rings: chunks of 4 KB or more, as many as shared memory holds, to 4 x 6."""
    arrays = 2 if residual else 1
    chunk = rows_at_a_time(width)
    while 2 * chunk * width * 2 <= 8192:
        chunk *= 2
    slots = (SMEM_BYTES - 4096) // (2 * arrays * chunk * width)
    warpgroups = min(2 if width > MAX_WIDTH // 2 else 4, max(1, slots // 3))
    return Tile(
        width=width,
        arrays=arrays,
        warpgroups=warpgroups,
        pipeline_depth=max(2, min(6, slots // warpgroups)),
        chunk=chunk,
    )


def normalise(
    x: Float[Array, "M D"],
    residual: Float[Array, "M D"] | None,
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None,
    *,
    eps: float,
    centred: bool,
    tile: Tile,
    ctas: int,
    name: str,
    emulated: bool = False,
) -> tuple[Float[Array, "M D"], ...]:
    """Runs the kernel on `ctas` SMs; returns (normed,) or, with a residual, (normed, total).

    `emulated` is for jax's interpreter, which knows no reshaped references: values are reshaped
    instead.
    """
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(
            f"{name}(x: {x.dtype}): rows of bfloat16 and float16 are streamed; cast, or use "
            "implementation='xla'"
        )
    job = Job(tile=tile, eps=eps, centred=centred, emulated=emulated)
    operands = job.operands(x, residual, scale, bias)

    def body(*refs):
        wg = lax.axis_index("wg")
        me = lax.axis_index("sm") * tile.warpgroups + wg
        run_warpgroup(job, job.name_refs(refs, len(operands)), wg, me, ctas * tile.warpgroups)

    outputs = plgpu.kernel(
        body,
        out_type=job.out_types(operands),
        scratch_types=job.scratch(operands),
        grid=(ctas,),
        grid_names=("sm",),
        num_threads=tile.warpgroups,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=name,
    )(*operands)
    return tuple(a.reshape(x.shape) for a in outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refs:
    """The references of a CTA: (x, residual) in and (normed, total) out, or the first of each."""

    inputs: tuple[Any, ...]
    parameters: tuple[Any, ...]
    outputs: tuple[Any, ...]
    rings: tuple[Any, ...]
    arrived: Any
    partial: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is static about a norm; a co-run kernel runs one in a single warpgroup."""

    tile: Tile
    eps: float
    centred: bool
    emulated: bool = False

    def operands(self, x, residual, scale, bias) -> list[Array]:
        """The arrays of the launch; rows are seen as (width / lanes, lanes)."""
        if x.dtype not in (jnp.bfloat16, jnp.float16):
            raise NotImplementedError(
                f"norm(x: {x.dtype}): rows of bfloat16 and float16 are streamed; cast, or use "
                "implementation='xla'"
            )
        seen = (x.shape[0], self.tile.width // self.tile.lanes, self.tile.lanes)
        rows = [a.reshape(seen) for a in (x, residual) if a is not None]
        return [*rows, *(a for a in (scale, bias) if a is not None)]

    def out_types(self, operands) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The results of the launch."""
        x = operands[0]
        return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for _ in range(self.tile.arrays))

    def scratch(self, operands) -> list[Any]:
        """Rings, their barriers, and where the warps of a warpgroup exchange sums."""
        tile, x = self.tile, operands[0]
        ring = plgpu.SMEM((tile.warpgroups, tile.pipeline_depth, tile.chunk, *x.shape[1:]), x.dtype)
        slots = tile.warpgroups * tile.pipeline_depth
        return [
            *[ring] * tile.arrays,
            plgpu.Barrier(num_arrivals=tile.arrays, num_barriers=slots),
            plgpu.SMEM((tile.warpgroups, 2, 4), jnp.float32),
        ]

    def name_refs(self, refs, operands: int) -> Refs:
        """Gives the references of a launch, operands, results and scratch, their names."""
        remaining, arrays = iter(refs), self.tile.arrays

        def take(count: int) -> tuple[Any, ...]:
            return tuple(next(remaining) for _ in range(count))

        return Refs(
            inputs=take(arrays),
            parameters=take(operands - arrays),
            outputs=take(arrays),
            rings=take(arrays),
            arrived=next(remaining),
            partial=next(remaining),
        )


def run_warpgroup(job: Job, refs: Refs, ring_of, me, workers: int) -> None:
    """Chunks me, me + workers, ... of the rows, through the rings of warpgroup `ring_of`."""
    tile, depth = job.tile, job.tile.pipeline_depth
    chunks = pl.cdiv(refs.inputs[0].shape[0], tile.chunk)
    count = lax.div(chunks - 1 - me + workers, jnp.int32(workers))

    def span(i):
        return pl.ds((me + i * workers) * tile.chunk, tile.chunk)

    def fetch(i):
        slot = lax.rem(i, jnp.int32(depth))

        @pl.when(i < count)
        def _():
            for source, ring in zip(refs.inputs, refs.rings, strict=True):
                plgpu.copy_gmem_to_smem(
                    source.at[span(i)],
                    ring.at[ring_of, slot],
                    refs.arrived.at[ring_of * depth + slot],
                )

    for i in range(depth):
        fetch(jnp.int32(i))

    @pl.loop(0, count)
    def _(i):
        slot = lax.rem(i, jnp.int32(depth))
        plgpu.barrier_wait(refs.arrived.at[ring_of * depth + slot])
        for first in range(0, tile.chunk, tile.rows):
            rings = [ring.at[ring_of, slot, pl.ds(first, tile.rows)] for ring in refs.rings]
            _normalise_rows(job, rings, refs.parameters, refs.partial.at[ring_of])
        plgpu.commit_smem()
        for ring, target in zip(refs.rings, refs.outputs, strict=True):
            plgpu.copy_smem_to_gmem(ring.at[ring_of, slot], target.at[span(i)])
        # The slot before is free once all stores but this step's have read theirs.
        plgpu.wait_smem_to_gmem(tile.arrays, wait_read_only=True)
        pl.when(i > 0)(lambda: fetch(i - 1 + depth))

    plgpu.wait_smem_to_gmem(0)


def _normalise_rows(job: Job, rings, parameters, partial) -> None:
    """Replaces rows of x by normed ones, and rows of the residual by the sum."""
    tile, shape, emulated = job.tile, job.tile.shape, job.emulated

    def load(ring):
        if emulated:
            return ring[...].reshape(shape).astype(jnp.float32)
        return plgpu.load(ring.reshape(*shape), layout=tile.layout).astype(jnp.float32)

    def store(ring, value):
        if emulated:
            ring[...] = value.astype(ring.dtype).reshape(ring.shape)
        else:
            ring.reshape(*shape)[...] = value.astype(ring.dtype)

    total = load(rings[0])
    if len(rings) == 2:
        total += load(rings[1])
        store(rings[1], total)
    if job.centred:
        total -= _spread(_mean(total, partial.at[0], tile), shape)
    variance = _mean(total * total, partial.at[1], tile)
    normed = total * _spread(lax.rsqrt(variance + job.eps), shape)
    for parameter, combine in zip(parameters, (jnp.multiply, jnp.add), strict=False):
        normed = combine(normed, _load_parameter(parameter, tile, emulated).astype(jnp.float32))
    store(rings[0], normed)


def _load_parameter(parameter, tile: Tile, emulated: bool):
    """Scale or bias, once a row or in quarters, from global memory: it stays in the L1 cache."""
    if tile.rows == 4:
        value = plgpu.load(parameter, layout=tile.layout.reduce(0), optimized=False)
        return lax.broadcast_in_dim(value, tile.shape, [1])
    if emulated:
        return parameter[...].reshape(tile.shape)
    return plgpu.load(parameter.reshape(*tile.shape), layout=tile.layout, optimized=False)


def _mean(values, partial, tile: Tile):
    """The mean of each row: one per warp, or one for the warpgroup.

    A warpgroup's sum goes through shared memory of its own: Mosaic's reduction across warps keeps
    one scratch for the whole CTA, where warpgroups that reduce at the same time overwrite one
    another's values.
    """
    sums = jnp.sum(values, axis=1)
    if tile.rows == 1:
        partial[...] = sums
        plgpu.commit_smem()
        sums = partial[0] + partial[1] + partial[2] + partial[3]
    return sums * (1 / tile.width)


def _spread(value, shape):
    return lax.broadcast_in_dim(value, shape, [0]) if value.ndim else value
