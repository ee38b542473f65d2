"""LayerNorm and RMSNorm, a residual added in, the sum out, quantised or not, on a share of the SMs.

Bandwidth-bound: each warpgroup streams its rows through a ring of its own in shared memory. A slot
receives rows of x, and of the residual, by TMA, is overwritten in place by the results, and is
stored by TMA, so that deep rings keep enough bytes under way on few SMs. Narrow rows go one to a
warp (a reduction is a few shuffles), wide ones one to a warpgroup. Statistics are in f32, the
variance about the mean. Quantised results have a ring of their own, of two slots, and a scale per
row, its largest absolute value over the largest of the type.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.mosaic import plgpu
from pallas_kernels.quantization import LARGEST

SMEM_BYTES = 232_448
MAX_WIDTH = 16_384
WARP_ROW = 2_048  # The widest row that one warp can take: 64 values a thread.
WIDE_STEP = 256  # Wider rows are taken by a warpgroup, in vectors of two values or more.
RING_BYTES = 24 << 10  # Bytes of x in flight in each warpgroup; more do not help.
# Registers for a thread's values of a row, of scale and of bias, by the number of warpgroups that
# share an SM. If they do not suffice, scale and bias are loaded for every row.
KEPT_REGISTERS = {1: 120, 2: 120, 3: 96, 4: 72}
CODE_SLOTS = 2  # Slots of the ring of quantised results.
TINY = 1e-30  # Stands for the largest absolute value of a row of zeros, which it quantises to 0.


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The sizes by which a CTA streams rows.

    Attributes:
      width: Values of a row.
      arrays: Rings of each warpgroup: 1, or 2 with a residual.
      warpgroups: Warpgroups of a CTA, each with its own rows.
      pipeline_depth: Slots of each ring.
      chunk: Rows in a slot.
      quantized: Whether results are of one byte, in a ring of their own.
    """

    width: int
    arrays: int
    warpgroups: int
    pipeline_depth: int
    chunk: int
    quantized: bool = False

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
        slot = self.warpgroups * self.chunk * self.width
        codes = CODE_SLOTS * slot if self.quantized else 0
        return 2 * self.arrays * self.pipeline_depth * slot + codes + 4096

    @property
    def layout(self) -> Any:
        """The layout of `shape` in a warpgroup: in vectors of 16 bytes if the width allows it."""
        vector = next(v for v in (8, 4, 2) if self.shape[1] % (32 * v) == 0)
        return plgpu.Layout.TILED(
            plgpu.Tiling(((4, 32 * vector), (vector,))),
            warp_dims=(-3,),
            lane_dims=(-2,),
            vector_dim=-1,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """The values that a warpgroup normalises at a time, a line a warp: four rows, or one."""
        return (4, self.width * self.rows // 4)


def rows_at_a_time(width: int) -> int:
    """Rows that a warpgroup normalises at a time: four narrow ones, a warp each, or a wide one."""
    return 1 if width > WARP_ROW // 2 and width % WIDE_STEP == 0 else 4


def tile_for(width: int, *, residual: bool, quantized: bool = False) -> Tile:
    """Chooses the rings: chunks of 4 to 8 KB, as many as shared memory holds, to 4 x 6."""
    arrays = 2 if residual else 1
    chunk = rows_at_a_time(width)
    while 2 * chunk * width * 2 * arrays <= 8192:
        chunk *= 2
    slots = (SMEM_BYTES - 4096) // (2 * arrays * chunk * width)
    warpgroups = min(2 if width > MAX_WIDTH // 2 else 4, max(1, slots // 3))
    codes = CODE_SLOTS * chunk * width if quantized else 0
    depth = ((SMEM_BYTES - 4096) // warpgroups - codes) // (2 * arrays * chunk * width)
    enough = max(3, RING_BYTES // (2 * chunk * width))
    return Tile(
        width=width,
        arrays=arrays,
        warpgroups=warpgroups,
        pipeline_depth=max(2, min(6, depth, enough)),
        chunk=chunk,
        quantized=quantized,
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
    dtype: jnp.dtype | None = None,
    emulated: bool = False,
) -> tuple[Array, ...]:
    """Runs the kernel on `ctas` SMs; returns (normed,) or, with a residual, (normed, total).

    With a dtype to quantise to, normed is of that and a scale per row comes last. `emulated` is for
    jax's interpreter, which knows no reshaped references: values are reshaped instead.
    """
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(
            f"{name}(x: {x.dtype}): rows of bfloat16 and float16 are streamed; cast, or use "
            "implementation='xla'"
        )
    job = Job(
        tile=tile,
        eps=eps,
        centred=centred,
        dtype=dtype,
        kept_registers=KEPT_REGISTERS[tile.warpgroups],
        emulated=emulated,
    )
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
    return tuple(a.reshape(x.shape[: min(a.ndim, 2)]) for a in outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refs:
    """The references of a CTA: (x, residual) in and (normed, total) out, or the first of each."""

    inputs: tuple[Any, ...]
    parameters: tuple[Any, ...]
    outputs: tuple[Any, ...]
    scales: Any
    rings: tuple[Any, ...]
    codes: Any
    arrived: Any
    partial: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The static part of a norm; a co-run kernel runs one in a single warpgroup.

    `dtype` is the dtype of quantised results; for `kept_registers` see KEPT_REGISTERS.
    """

    tile: Tile
    eps: float
    centred: bool
    dtype: jnp.dtype | None = None
    kept_registers: int = KEPT_REGISTERS[4]
    emulated: bool = False

    def __post_init__(self):
        """Checks that the tile is one for this kind of result."""
        if self.tile.quantized != (self.dtype is not None):
            raise ValueError(
                f"norm(tile={self.tile}, quantised to {self.dtype}): quantised results have a ring "
                "of their own, others none; choose a tile of that kind"
            )

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
        normed = jax.ShapeDtypeStruct(x.shape, x.dtype if self.dtype is None else self.dtype)
        total = [jax.ShapeDtypeStruct(x.shape, x.dtype)] * (self.tile.arrays - 1)
        scales = [] if self.dtype is None else [jax.ShapeDtypeStruct(x.shape[:1], jnp.float32)]
        return (normed, *total, *scales)

    def scratch(self, operands) -> list[Any]:
        """Rings, their barriers, and where the warps of a warpgroup exchange sums."""
        tile, x = self.tile, operands[0]
        slot = (tile.chunk, *x.shape[1:])
        ring = plgpu.SMEM((tile.warpgroups, tile.pipeline_depth, *slot), x.dtype)
        codes = []
        if self.dtype is not None:
            codes = [plgpu.SMEM((tile.warpgroups, CODE_SLOTS, *slot), self.dtype)]
        barriers = tile.warpgroups * tile.pipeline_depth
        return [
            *[ring] * tile.arrays,
            *codes,
            plgpu.Barrier(num_arrivals=tile.arrays, num_barriers=barriers),
            plgpu.SMEM((tile.warpgroups, 2 + tile.chunk // tile.rows, 4), jnp.float32),
        ]

    def name_refs(self, refs, operands: int) -> Refs:
        """Gives the references of a launch, operands, results and scratch, their names."""
        remaining, arrays = iter(refs), self.tile.arrays

        def take(count: int) -> tuple[Any, ...]:
            return tuple(next(remaining) for _ in range(count))

        quantized = self.dtype is not None
        return Refs(
            inputs=take(arrays),
            parameters=take(operands - arrays),
            outputs=take(arrays),
            scales=next(remaining) if quantized else None,
            rings=take(arrays),
            codes=next(remaining) if quantized else None,
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
    parameters = _keep(job, refs.parameters)

    @pl.loop(0, count)
    def _(i):
        slot = lax.rem(i, jnp.int32(depth))
        plgpu.barrier_wait(refs.arrived.at[ring_of * depth + slot])
        results = [ring.at[ring_of, slot] for ring in refs.rings]
        if refs.codes is not None:
            results[0] = refs.codes.at[ring_of, lax.rem(i, jnp.int32(CODE_SLOTS))]
        for first in range(0, tile.chunk, tile.rows):
            part = pl.ds(first, tile.rows)
            total = _add(job, [ring.at[ring_of, slot, part] for ring in refs.rings])
            normed = _normalise_rows(job, total, parameters, refs.partial.at[ring_of])
            if job.dtype is not None:
                row = (me + i * workers) * tile.chunk + first
                peaks = refs.partial.at[ring_of, 2 + first // tile.rows]
                normed = _quantise(job, job.dtype, normed, refs.scales, row, peaks)
            _store(job, results[0].at[part], normed)
        plgpu.commit_smem()
        for ring, target in zip(results, refs.outputs, strict=True):
            plgpu.copy_smem_to_gmem(ring, target.at[span(i)])
        # The slot before is free once all stores but this step's have read theirs.
        plgpu.wait_smem_to_gmem(tile.arrays, wait_read_only=True)
        pl.when(i > 0)(lambda: fetch(i - 1 + depth))

    plgpu.wait_smem_to_gmem(0)


def _keep(job: Job, parameters) -> list[Any]:
    """Functions that give scale and bias: from registers, in f32 or as they are, or from memory."""
    values = job.tile.width // (32 if job.tile.rows == 4 else 128)  # Values of a row in one thread.
    loads = [functools.partial(_load_parameter, p, job) for p in parameters]
    if values * (1 + len(parameters)) <= job.kept_registers:
        kept = [load().astype(jnp.float32) for load in loads]
    elif values + sum(values * p.dtype.itemsize for p in parameters) // 4 <= job.kept_registers:
        kept = [load() for load in loads]
    else:
        return loads
    return [lambda value=value: value for value in kept]


def _add(job: Job, rings):
    """Rows of x in f32; with a residual the sum, which replaces it."""
    total = _load(job, rings[0])
    if len(rings) == 2:
        total += _load(job, rings[1])
        _store(job, rings[1], total)
    return total


def _load(job: Job, ring):
    if job.emulated:
        return ring[...].reshape(job.tile.shape).astype(jnp.float32)
    return plgpu.load(ring.reshape(*job.tile.shape), layout=job.tile.layout).astype(jnp.float32)


def _store(job: Job, ring, value) -> None:
    if job.emulated:
        ring[...] = value.astype(ring.dtype).reshape(ring.shape)
    else:
        ring.reshape(*job.tile.shape)[...] = value.astype(ring.dtype)


def _normalise_rows(job: Job, total, parameters, partial):
    """The norm of each row, in f32."""
    tile, shape = job.tile, job.tile.shape
    if job.centred:
        total -= _spread(_mean(total, partial.at[0], tile), shape)
    variance = _mean(total * total, partial.at[1], tile)
    normed = total * _spread(lax.rsqrt(variance + job.eps), shape)
    for parameter, combine in zip(parameters, (jnp.multiply, jnp.add), strict=False):
        value = parameter().astype(jnp.float32)
        if tile.rows == 4:
            value = lax.broadcast_in_dim(value, shape, [1])
        normed = combine(normed, value)
    return normed


def _load_parameter(parameter, job: Job):
    """Scale or bias, once a row or in quarters, from global memory: it stays in the L1 cache."""
    tile = job.tile
    if tile.rows == 4:
        return plgpu.load(parameter, layout=tile.layout.reduce(0), optimized=False)
    if job.emulated:
        return parameter[...].reshape(tile.shape)
    return plgpu.load(parameter.reshape(*tile.shape), layout=tile.layout, optimized=False)


def _quantise(job: Job, dtype: jnp.dtype, normed, scales, row, partial):
    """Rows over their scales, rounded where the type is an integer; the scales go to memory."""
    tile, largest = job.tile, LARGEST[dtype]
    peak = jnp.max(jnp.abs(normed), axis=1)
    partial[...] = peak
    plgpu.commit_smem()  # The chunk is stored before its slot is written again.
    peaks = [partial[j] for j in range(4)]
    if tile.rows == 1:
        peak = functools.reduce(jnp.maximum, peaks)
        peaks = [peak]
    for j, value in enumerate(peaks):

        @pl.when(row + j < scales.shape[0])
        def _(j=j, value=value):
            scales[row + j] = value * (1 / largest)

    normed *= _spread(largest / jnp.maximum(peak, TINY), tile.shape)
    return jnp.round(normed) if jnp.issubdtype(dtype, jnp.integer) else normed


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
