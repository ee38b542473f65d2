"""A persistent, warp-specialised GEMM with fused epilogues, on as many SMs as it is given.

One warpgroup copies operands (TMA), two multiply (WGMMA). Its loads run on from tile to tile as one
stream through a ring of shared-memory slots, so that neither the pipeline's fill nor the epilogue
of a tile stops them. The two multiplying warpgroups either take alternate tiles ("pingpong": one's
epilogue runs beside the other's products) or halves of the same tile ("cooperative": half the
operand traffic per product). CTAs may form clusters of two that share one operand by multicast.

The result is a list of segments, rectangles of equal tiles: one per input that shares the weight,
and where the last columns are narrower tiles, one more for each. A CTA's share of the list runs on
from segment to segment.

Edges: TMA fills with zeros what lies beyond an operand and clips what lies beyond the result, so M,
N and K need not divide by the tile: M must be a multiple of 8, K and N of 64. Not here: products
with a weight for each input, quantised types.
"""

import dataclasses
import functools
import itertools
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.gemm import rows
from pallas_kernels.gemm.activations import ACTIVATIONS, Activation
from pallas_kernels.mosaic import plgpu

CONSUMERS = 2
PIECE = 64  # Rows and columns that the epilogue stores at a time: one swizzled row is 128 bytes.
SMEM_BYTES = 232_448
REGISTERS = (232, 40)  # Of each thread that multiplies and that copies; 64.5 k of an SM's 65.5 k.


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What one multiplying warpgroup computes at a time, and how operands reach it.

    Attributes:
      tile_m: Rows of its accumulator.
      tile_n: Columns of its accumulator, or of each of two for a gated product.
      tile_k: Depth of one slot of the ring.
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

    def __post_init__(self):
        """Checks what WGMMA, TMA and the register file allow."""
        if self.tile_m % 64 or self.tile_n % 64 or self.tile_k != 64:
            raise ValueError(
                f"Tile({self.tile_m}, {self.tile_n}, {self.tile_k}): WGMMA takes 64 rows at a "
                "time, a swizzled row is 64 elements; tile_m and tile_n are multiples of 64, "
                "tile_k is 64; choose such a tile"
            )
        if self.tile_n > 256 or self.block_m > 256:
            raise ValueError(
                f"Tile(tile_m={self.tile_m}, tile_n={self.tile_n}): a TMA box has at most 256 "
                "rows, a WGMMA 256 columns; lower them"
            )
        registers = self.weights * self.tile_m * self.tile_n // 128
        if registers > 192:
            raise ValueError(
                f"Tile(tile_m={self.tile_m}, tile_n={self.tile_n}, weights={self.weights}): "
                f"accumulators need {registers} registers a thread; 192 leave room for the rest; "
                "lower the tile"
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
        """Shared memory of one CTA for 16-bit types, barriers included."""
        ring = self.pipeline_depth * (self.block_m + self.weights * self.tile_n) * self.tile_k
        pieces = CONSUMERS * self.store_slots * PIECE * PIECE
        return 2 * (ring + pieces + CONSUMERS * self.tile_n) + 1024

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

    With `moments` mean and squared deviations of each piece of a row are stored beside it.
    """

    activation: Activation | None = None
    gated: bool = False
    scale: float = 1.0
    moments: bool = False


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Refs:
    """The references a CTA works on; absent operands are None.

    The narrow tiles' weight slots lie where the wide ones' do.
    """

    xs: tuple[Any, ...]
    weights: tuple[Any, ...]
    bias: Any
    residuals: Any
    row_scales: Any
    outs: tuple[Any, ...]
    moments: Any
    x_slots: Any
    w_slots: tuple[Any, ...]
    narrow_slots: tuple[Any, ...]
    out_slots: Any
    bias_slots: Any
    moment_slots: Any
    full: Any
    empty: Any
    bias_arrived: Any
    arrived: Any


def matmul(
    xs: tuple[Float[Array, "_ K"], ...],
    weights: tuple[Float[Array, "K N"], ...],
    bias: Float[Array, " N"] | None,
    residuals: tuple[Float[Array, "_ N"], ...] | None,
    row_scales: tuple[Float[Array, " _"], ...] | None = None,
    *,
    epilogue: Epilogue,
    tile: Tile,
    ctas: int,
    name: str = "pbjax_gemm",
    emulated: bool = False,
) -> tuple[Array, ...]:
    """Runs the kernel on `ctas` SMs; returns the results, then their moments if asked for.

    `weights` is (w,), or (w_gate, w) for a gated product. `row_scales` multiply the rows of each
    product, before the bias.
    """
    plan = make_plan(xs, weights[0], epilogue, tile, ctas)
    plan = dataclasses.replace(plan, emulated=emulated)
    operands = [*xs, *weights, *([] if bias is None else [bias]), *(residuals or ())]
    for scales in row_scales or ():  # Read without TMA, which would clip them.
        operands.append(jnp.pad(scales, (0, plan.covered_rows(scales.size) - scales.size)))
    absent = (bias is None, residuals is None, row_scales is None)
    results = tuple(jax.ShapeDtypeStruct((m, plan.n), xs[0].dtype) for m in plan.ms)
    return launch(
        lambda *refs: run_cta(plan, name_refs(plan, refs, *absent)),
        plan,
        operands,
        (*results, *plan.moment_types),
        scratch(plan, xs[0].dtype, residuals is not None),
        name,
    )


def name_refs(plan: Plan, refs, no_bias=True, no_residual=True, no_row_scale=True) -> Refs:
    """Gives the references of a launch, operands, results and scratch, their names."""
    remaining, groups = iter(refs), len(plan.ms)

    def take(count: int) -> tuple[Any, ...]:
        return tuple(next(remaining) for _ in range(count))

    xs, weights = take(groups), take(plan.weights)
    bias = None if no_bias else next(remaining)
    residuals = None if no_residual else take(groups)
    row_scales = None if no_row_scale else take(groups)
    outs, moments = take(groups), take(groups) if plan.epilogue.moments else None
    x_slots, w_slots = next(remaining), take(plan.weights)
    narrow_slots = ()
    if plan.tile.narrow_cols and plan.emulated:
        narrow_slots = take(plan.weights)
    elif plan.tile.narrow_cols:
        w_slots, narrow_slots = zip(*w_slots, strict=True)
    return Refs(
        xs=xs,
        weights=weights,
        bias=bias,
        residuals=residuals,
        row_scales=row_scales,
        outs=outs,
        moments=moments,
        x_slots=x_slots,
        w_slots=w_slots,
        narrow_slots=narrow_slots,
        out_slots=next(remaining),
        bias_slots=next(remaining),
        moment_slots=next(remaining) if plan.epilogue.moments else None,
        full=next(remaining),
        empty=next(remaining),
        bias_arrived=next(remaining),
        arrived=None if no_residual else next(remaining),
    )


def launch(body, plan: Plan, operands, out_type, scratch_types, name: str, threads: int = 3):
    """Launches body on the plan's CTAs, in clusters where the tile asks for them."""
    clusters = plan.cluster_m * plan.cluster_n
    params = plgpu.CompilerParams(approx_math=True)
    if plan.epilogue.moments:  # Sums of a row stay in a warp: no room is left for others.
        params = dataclasses.replace(params, reduction_scratch_bytes=0)
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch_types,
        grid=(plan.workers,),
        grid_names=("sm",),
        cluster=(clusters,) if clusters > 1 else (),
        cluster_names=("cluster",) if clusters > 1 else (),
        num_threads=threads,
        thread_name="wg",
        compiler_params=params,
        kernel_name=name,
    )(*operands)


def scratch(plan: Plan, dtype, with_residual: bool) -> list:
    """Shared memory and barriers of one CTA, in the order of Refs."""
    tile, depth = plan.tile, plan.tile.pipeline_depth
    releases = {"num_arrivals": 1 if plan.pingpong else CONSUMERS, "num_barriers": depth}
    if tile.cluster is None:
        empty = plgpu.Barrier(**releases)
    else:
        empty = plgpu.ClusterBarrier(collective_axes=("cluster",), **releases)
    w_slots = [plgpu.SMEM((depth, tile.tile_k, tile.tile_n), dtype)] * plan.weights
    if tile.narrow_cols:
        # As many bytes a slot, so that slots begin at the same places; the first rows are used.
        rows = tile.tile_k * tile.tile_n // tile.narrow_n
        narrow = [plgpu.SMEM((depth, rows, tile.narrow_n), dtype)] * plan.weights
        both = zip(w_slots, narrow, strict=True)
        w_slots = w_slots + narrow if plan.emulated else [plgpu.RefUnion(*pair) for pair in both]
    moments = plgpu.SMEM((CONSUMERS, 2 * tile.tile_n // PIECE, tile.tile_m), jnp.float32)
    slots = [
        plgpu.SMEM((depth, tile.block_m, tile.tile_k), dtype),
        *w_slots,
        plgpu.SMEM((CONSUMERS, tile.store_slots, PIECE, PIECE), dtype),
        plgpu.SMEM((CONSUMERS, tile.tile_n), dtype),
        *[moments] * plan.epilogue.moments,
        plgpu.Barrier(
            num_arrivals=1 + plan.weights,
            num_barriers=depth * (CONSUMERS if plan.pingpong else 1),
        ),
        empty,
        plgpu.Barrier(num_barriers=CONSUMERS),
    ]
    if with_residual:
        slots.append(plgpu.Barrier(num_barriers=CONSUMERS * tile.store_slots))
    return slots


def run_cta(plan: Plan, refs: Refs, registers: tuple[int, int] = REGISTERS) -> None:
    """One CTA's part: two warpgroups multiply, the next one copies, further ones are free."""
    wg, worker = lax.axis_index("wg"), lax.axis_index("sm")

    @pl.when(wg < CONSUMERS)
    def _():
        plgpu.set_max_registers(registers[0], action="increase")
        multiply(plan, refs, wg, worker)

    @pl.when(wg == CONSUMERS)
    def _():
        plgpu.set_max_registers(registers[1], action="decrease")
        load(plan, refs, worker)


def load(plan: Plan, refs: Refs, worker) -> None:
    """The copying warpgroup: all steps of all tiles of this CTA, as one stream through the ring."""
    for segment in plan.segments:
        pl.loop(*span(plan, segment, worker))(
            functools.partial(load_tile, plan, refs, segment, worker)
        )

    # No arrival may be left unobserved: in a cluster this also keeps the CTA alive until its
    # partner has sent all.
    for slot in range(plan.tile.pipeline_depth):
        plgpu.barrier_wait(refs.empty.at[slot])


def load_tile(plan: Plan, refs: Refs, segment: Segment, worker, i) -> None:
    """Copies the operands of a CTA's i-th tile, step by step."""
    tile, depth = plan.tile, plan.tile.pipeline_depth
    x_axes = "cluster" if tile.cluster == "n" else None
    w_axes = "cluster" if tile.cluster == "m" else None
    row, col = origin(plan, segment, worker, i)
    turn = lax.rem(i, jnp.int32(CONSUMERS)) * depth if plan.pingpong else 0

    @pl.loop(0, plan.steps)
    def _(step):
        slot = lax.rem(i * plan.steps + step, jnp.int32(depth))
        full = refs.full.at[turn + slot]
        k = pl.ds(step * tile.tile_k, tile.tile_k)
        plgpu.barrier_wait(refs.empty.at[slot])
        plgpu.copy_gmem_to_smem(
            refs.xs[segment.group].at[pl.ds(row, tile.block_m), k],
            refs.x_slots.at[slot],
            full,
            collective_axes=x_axes,
        )
        for weight, target in zip(
            refs.weights, weight_slots(plan, refs, segment, slot), strict=True
        ):
            plgpu.copy_gmem_to_smem(
                weight.at[k, pl.ds(col, segment.width)], target, full, collective_axes=w_axes
            )


def weight_slots(plan: Plan, refs: Refs, segment: Segment, slot) -> list[Any]:
    """Where the weights of one step lie, for tiles as wide as the segment's."""
    if segment.narrow:
        return [ring.at[slot, pl.ds(0, plan.tile.tile_k)] for ring in refs.narrow_slots]
    return [ring.at[slot] for ring in refs.w_slots]


def multiply(plan: Plan, refs: Refs, wg, worker) -> None:
    """A multiplying warpgroup: alternate tiles of this CTA, or the wg-th half of each."""
    for slot in range(plan.tile.pipeline_depth):
        if plan.pingpong:  # Whoever used a slot releases it; at first warpgroup 0 releases all.
            pl.when(wg == 0)(lambda slot=slot: plgpu.barrier_arrive(refs.empty.at[slot]))
        else:
            plgpu.barrier_arrive(refs.empty.at[slot])
    for segment in plan.segments:
        start, stop = span(plan, segment, worker)
        if plan.pingpong:  # Tile i is warpgroup i % 2's.
            start, stop = (lax.div(i + 1 - wg, jnp.int32(CONSUMERS)) for i in (start, stop))
        pl.loop(start, stop)(functools.partial(multiply_tile, plan, refs, segment, wg, worker))

    plgpu.wait_smem_to_gmem(0)


def multiply_tile(plan: Plan, refs: Refs, segment: Segment, wg, worker, turn) -> None:
    """One tile, or a warpgroup's half of it: products, epilogue, store."""
    tile = plan.tile
    i = turn * CONSUMERS + wg if plan.pingpong else turn
    row, col = origin(plan, segment, worker, i)
    if not plan.pingpong:
        row += wg * tile.tile_m
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # All buffers of stores are free.
    if refs.bias is not None:
        plgpu.copy_gmem_to_smem(
            refs.bias.at[pl.ds(col, segment.width)],
            refs.bias_slots.at[wg, pl.ds(0, segment.width)],
            refs.bias_arrived.at[wg],
        )
    if refs.residuals is not None:
        for piece in range(min(tile.store_slots, len(plan.pieces(segment.width)))):
            fetch_residual(plan, refs, segment, wg, row, col, piece)
    row_scales = []
    if refs.row_scales is not None:
        row_scales = rows.load_scales(refs.row_scales[segment.group], row, tile.tile_m, PIECE)
    products = pl.run_scoped(
        lambda *accs: accumulate(plan, refs, segment, accs, wg, i),
        *[plgpu.ACC((tile.tile_m, segment.width))] * plan.weights,
    )
    store(plan, refs, segment, products, row_scales, wg, row, col)


def accumulate(plan: Plan, refs: Refs, segment: Segment, accs, wg, i):
    """The products of one tile; returns the value of each weight's accumulator."""
    tile, depth, steps = plan.tile, plan.tile.pipeline_depth, plan.steps
    first_row = 0 if plan.pingpong else wg * tile.tile_m
    turn = wg * depth if plan.pingpong else 0

    @pl.loop(0, steps)
    def _(step):
        slot = lax.rem(i * steps + step, jnp.int32(depth))
        plgpu.barrier_wait(refs.full.at[turn + slot])
        x = refs.x_slots.at[slot, pl.ds(first_row, tile.tile_m)]
        for acc, weight in zip(accs, weight_slots(plan, refs, segment, slot), strict=True):
            plgpu.wgmma(acc, x, weight)
        plgpu.wgmma_wait(tile.in_flight * len(accs))  # The steps before have read their slots.
        done = step - tile.in_flight
        slot = lax.rem(i * steps + done, jnp.int32(depth))
        pl.when(done >= 0)(lambda: plgpu.barrier_arrive(refs.empty.at[slot]))

    products = tuple(acc[...] for acc in accs)  # Waits for the last step.
    for last in range(steps - tile.in_flight, steps):
        plgpu.barrier_arrive(refs.empty.at[lax.rem(i * steps + last, jnp.int32(depth))])
    return products


def store(plan: Plan, refs: Refs, segment: Segment, products, row_scales, wg, row, col) -> None:
    """Epilogue and store of one tile, piece by piece."""
    slots, pieces = plan.tile.store_slots, plan.pieces(segment.width)
    if refs.bias is not None:
        plgpu.barrier_wait(refs.bias_arrived.at[wg])
    for piece, (r, c) in enumerate(pieces):
        slot = piece % slots
        if refs.residuals is not None:
            plgpu.barrier_wait(refs.arrived.at[wg * slots + slot])
        elif piece >= slots:
            plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
        out_slot = refs.out_slots.at[wg, slot]
        parts = [y[r : r + PIECE, c : c + PIECE] for y in products]
        if row_scales:
            parts = rows.scale_rows(parts, row_scales[r // PIECE])
        out_slot[...] = finish(plan, refs, parts, (wg, c), out_slot).astype(out_slot.dtype)
        if refs.moments is not None:
            kept = refs.moment_slots.at[wg, pl.ds(2 * c // PIECE, 2), pl.ds(r, PIECE)]
            rows.keep_moments(out_slot, kept)
        plgpu.commit_smem()
        target = refs.outs[segment.group].at[pl.ds(row + r, PIECE), pl.ds(col + c, PIECE)]
        plgpu.copy_smem_to_gmem(out_slot, target)
        # The store just issued is still reading its slot: fetch into the one before, where there
        # are two.
        upcoming = piece - min(1, slots - 1) + slots
        if refs.residuals is not None and slots <= upcoming < len(pieces):
            plgpu.wait_smem_to_gmem(min(1, slots - 1), wait_read_only=True)
            fetch_residual(plan, refs, segment, wg, row, col, upcoming)
    if refs.moments is not None:
        kept = refs.moment_slots.at[wg, pl.ds(0, 2 * min(segment.width, plan.n) // PIECE)]
        rows.store_moments(kept, refs.moments[segment.group], row, col, PIECE)


def finish(plan: Plan, refs: Refs, products, place, residual):
    """The value of one piece in f32: residual + scale * activation(products + bias)."""
    epilogue, value = plan.epilogue, products[-1]
    if refs.bias is not None:
        wg, col = place
        bias = plgpu.load(
            refs.bias_slots.at[wg, pl.ds(col, PIECE)],
            layout=plgpu.Layout.WGMMA.reduce(0),
            optimized=False,
        )
        value += lax.broadcast_in_dim(bias.astype(jnp.float32), value.shape, [1])
    if epilogue.gated:
        gate = products[0]
        value *= gate if epilogue.activation is None else ACTIVATIONS[epilogue.activation](gate)
    elif epilogue.activation is not None:
        value = ACTIVATIONS[epilogue.activation](value)
    if epilogue.scale != 1.0:
        value *= epilogue.scale
    if refs.residuals is not None:
        value += plgpu.load(residual, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
    return value


def fetch_residual(plan: Plan, refs: Refs, segment: Segment, wg, row, col, piece: int) -> None:
    """Copies a piece of the residual to where the result of that piece will be put."""
    slots = plan.tile.store_slots
    r, c = plan.pieces(segment.width)[piece]
    plgpu.copy_gmem_to_smem(
        refs.residuals[segment.group].at[pl.ds(row + r, PIECE), pl.ds(col + c, PIECE)],
        refs.out_slots.at[wg, piece % slots],
        refs.arrived.at[wg * slots + piece % slots],
    )


def origin(plan: Plan, segment: Segment, worker, i):
    """First row and column, in the result, of a CTA's i-th tile, which is of the segment."""
    tile = worker + i * plan.workers
    if plan.tile.narrow_cols:  # The last wave begins with the workers that had narrow tiles.
        last = i * plan.workers + plan.workers - 1 - worker
        tile = jnp.where(i < plan.total // plan.workers, tile, last)
    im, jn = plgpu.planar_snake(
        tile - segment.first, (segment.rows, segment.cols), 0, plan.tile.raster_width
    )
    if plan.tile.cluster == "m":
        im = im * 2 + lax.axis_index("cluster")
    if plan.tile.cluster == "n":
        jn = jn * 2 + lax.axis_index("cluster")
    return im * plan.tile.block_m, segment.first_col + jn * segment.width


def span(plan: Plan, segment: Segment, worker):
    """The first of a worker's tiles that is of the segment, and the first that is beyond it."""
    return tuple(taken(plan, total, worker) for total in (segment.first, segment.end))


def taken(plan: Plan, total: int, worker):
    """How many of the first `total` tiles fall to a worker."""
    waves, rest = divmod(total, plan.workers)
    if plan.tile.narrow_cols and waves == plan.total // plan.workers:
        return waves + (plan.workers - 1 - worker < rest).astype(jnp.int32)
    return share(total, worker, plan.workers)


def share(total: int, me, workers: int):
    """How many of `total` items fall to worker `me`, who takes me, me + workers, and so on."""
    return lax.div(total - 1 - me + workers, jnp.int32(workers))


def make_plan(xs, weight, epilogue: Epilogue, tile: Tile, ctas: int) -> Plan:
    """Gathers what is static about a launch; refuses operands that WGMMA or TMA cannot take."""
    xs = xs if isinstance(xs, tuple) else (xs,)
    x, (k, n) = xs[0], weight.shape
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(
            f"gemm(x: {x.dtype}): WGMMA multiplies bfloat16 and float16 here; cast, or use "
            "implementation='xla'"
        )
    if any(x.shape[0] % 8 for x in xs) or n % PIECE or k % PIECE:
        raise NotImplementedError(
            f"gemm(x: {', '.join(str(x.shape) for x in xs)}, w: {weight.shape}): a swizzled copy "
            "takes 8 rows of 64 elements at a time; M must be a multiple of 8, K and N of 64; pad "
            "them, or use implementation='xla'"
        )
    if tile.weights != (2 if epilogue.gated else 1):
        raise ValueError(
            f"gemm(tile={tile}): {tile.weights} weights; a gated product has 2, any other 1; "
            "choose a tile for as many"
        )
    if epilogue.moments and tile.smem_bytes + tile.moment_bytes > SMEM_BYTES:
        raise ValueError(
            f"gemm(tile={tile}): with moments it needs {tile.smem_bytes + tile.moment_bytes} bytes "
            f"of shared memory; an SM has {SMEM_BYTES}; lower store_slots or pipeline_depth"
        )
    if tile.cluster is not None and ctas < 2:
        raise NotImplementedError(
            f"gemm(sm_budget={ctas}): a tile with clusters needs two SMs; choose a tile without"
        )
    if tile.narrow_cols * tile.narrow_n >= n:
        raise ValueError(
            f"gemm(n={n}, tile={tile}): the narrow tiles leave no column; lower narrow_cols"
        )
    ms = tuple(x.shape[0] for x in xs)
    return Plan(ms=ms, n=n, k=k, ctas=ctas, tile=tile, epilogue=epilogue)
