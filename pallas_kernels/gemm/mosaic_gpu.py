"""A persistent, warp-specialised GEMM with fused epilogues, on as many SMs as it is given.

One warpgroup copies operands (TMA), two multiply (WGMMA). Its loads run on from tile to tile as one
stream through a ring of shared-memory slots, so that neither the pipeline's fill nor the epilogue
of a tile stops them. The two multiplying warpgroups either take alternate tiles ("pingpong": one's
epilogue runs beside the other's products) or halves of the same tile ("cooperative": half the
operand traffic per product). CTAs may form clusters of two that share one operand by multicast.

Operands are of 16 bits, or of 8: FP8 (e4m3), summed in the tensor cores or by turns in f32, and
int8, summed exactly. With 8 bits the weight is (N, K), as WGMMA reads no other, and the epilogue
multiplies by a scale for each column and, if given, for each row.

Edges: TMA fills with zeros what lies beyond an operand and clips what lies beyond the result, so M,
N and K need not divide by the tile: M must be a multiple of 8, K and N of 64. Not here: products
with a weight for each input.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

from pallas_kernels.gemm import rows
from pallas_kernels.gemm.activations import ACTIVATIONS
from pallas_kernels.gemm.plan import CONSUMERS, PIECE, SMEM_BYTES, Epilogue, Plan, Segment, Tile
from pallas_kernels.mosaic import plgpu
from pallas_kernels.quantization import rounded

REGISTERS = (232, 40)  # Of each thread that multiplies and that copies; 64.5 k of an SM's 65.5 k.


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
    col_scales: tuple[Any, ...]
    result_scale: Any
    outs: tuple[Any, ...]
    moments: Any
    x_slots: Any
    w_slots: tuple[Any, ...]
    narrow_slots: tuple[Any, ...]
    out_slots: Any
    bias_slots: Any
    scale_slots: Any
    moment_slots: Any
    full: Any
    empty: Any
    columns_arrived: Any
    arrived: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A tile of a warpgroup, or its half of one: the CTA's i-th.

    `begin` is called once the products of its first slot are under way.
    """

    segment: Segment
    wg: Any
    i: Any
    begin: Callable[[], None]


def matmul(
    xs: tuple[Num[Array, "_ K"], ...],
    weights: tuple[Num[Array, "..."], ...],
    bias: Float[Array, " N"] | None,
    residuals: tuple[Float[Array, "_ N"], ...] | None,
    row_scales: tuple[Float[Array, " _"], ...] | None = None,
    col_scales: tuple[Float[Array, " N"], ...] = (),
    result_scale: Float[Array, " 1"] | None = None,
    *,
    epilogue: Epilogue,
    tile: Tile,
    ctas: int,
    name: str = "pbjax_gemm",
    emulated: bool = False,
) -> tuple[Array, ...]:
    """Runs the kernel on `ctas` SMs; returns the results, then their moments if asked for.

    `weights` is (w,), or (w_gate, w) for a gated product: (K, N) of 16 bits, (N, K) of 8.
    `row_scales` multiply the rows of each product, before the bias, and so do `col_scales` the
    columns, an array for each weight of 8 bits. A result of 8 bits is divided by `result_scale`.
    """
    plan = make_plan(xs, weights[0], epilogue, tile, ctas)
    plan = dataclasses.replace(plan, emulated=emulated)
    operands = [*xs, *weights, *([] if bias is None else [bias]), *(residuals or ())]
    for scales in row_scales or ():  # Read without TMA, which would clip them.
        operands.append(jnp.pad(scales, (0, plan.covered_rows(scales.size) - scales.size)))
    operands += [*col_scales, *([] if result_scale is None else [result_scale])]
    absent = (bias is None, residuals is None, row_scales is None)
    dtype = xs[0].dtype if epilogue.dtype is None else jnp.dtype(epilogue.dtype)
    results = tuple(jax.ShapeDtypeStruct((m, plan.n), dtype) for m in plan.ms)
    return launch(
        lambda *refs: run_cta(plan, name_refs(plan, refs, *absent)),
        plan,
        operands,
        (*results, *plan.moment_types),
        scratch(plan, xs[0].dtype, residuals is not None, None if bias is None else bias.dtype),
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
    col_scales = take(plan.weights) if plan.eight_bit else ()
    result_scale = next(remaining) if plan.epilogue.quantized else None
    outs, moments = take(groups), take(groups) if plan.epilogue.moments else None
    x_slots, w_slots = next(remaining), take(plan.weights)
    narrow_slots = ()
    if plan.shared_slots and plan.emulated:
        narrow_slots = take(plan.weights)
    elif plan.shared_slots:
        w_slots, narrow_slots = zip(*w_slots, strict=True)
    return Refs(
        xs=xs,
        weights=weights,
        bias=bias,
        residuals=residuals,
        row_scales=row_scales,
        col_scales=col_scales,
        result_scale=result_scale,
        outs=outs,
        moments=moments,
        x_slots=x_slots,
        w_slots=w_slots,
        narrow_slots=narrow_slots,
        out_slots=next(remaining),
        bias_slots=next(remaining) if plan.has_bias_slots else None,
        scale_slots=next(remaining) if plan.eight_bit else None,
        moment_slots=next(remaining) if plan.epilogue.moments else None,
        full=next(remaining),
        empty=next(remaining),
        columns_arrived=next(remaining),
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


def scratch(plan: Plan, dtype, with_residual: bool, bias_dtype=None) -> list:
    """Shared memory and barriers of one CTA, in the order of Refs."""
    tile, depth = plan.tile, plan.tile.pipeline_depth
    releases = {"num_arrivals": 1 if plan.pingpong else CONSUMERS, "num_barriers": depth}
    if tile.cluster is None:
        empty = plgpu.Barrier(**releases)
    else:
        empty = plgpu.ClusterBarrier(collective_axes=("cluster",), **releases)
    result = dtype if plan.epilogue.dtype is None else jnp.dtype(plan.epilogue.dtype)
    moments = plgpu.SMEM((CONSUMERS, 2 * tile.tile_n // PIECE, tile.tile_m), jnp.float32)
    scales = plgpu.SMEM((CONSUMERS, plan.weights, tile.tile_n), jnp.float32)
    columns = (bias_dtype is not None) + plan.weights * plan.eight_bit  # Arrays of a value each.
    bias = plgpu.SMEM((CONSUMERS, tile.tile_n), dtype if bias_dtype is None else bias_dtype)
    slots = [
        plgpu.SMEM((depth, tile.block_m, tile.tile_k), dtype),
        *weight_rings(plan, dtype),
        plgpu.SMEM((CONSUMERS, tile.store_slots, PIECE, PIECE), result),
        *[bias] * plan.has_bias_slots,
        *[scales] * plan.eight_bit,
        *[moments] * plan.epilogue.moments,
        plgpu.Barrier(
            num_arrivals=1 + plan.weights,
            num_barriers=depth * (CONSUMERS if plan.pingpong else 1),
        ),
        empty,
        plgpu.Barrier(num_arrivals=max(1, columns), num_barriers=CONSUMERS),
    ]
    if with_residual:
        slots.append(plgpu.Barrier(num_barriers=CONSUMERS * tile.store_slots))
    return slots


def weight_rings(plan: Plan, dtype) -> list:
    """A ring for each weight; narrow tiles of 8 bits use the first rows of a slot."""
    tile, depth = plan.tile, plan.tile.pipeline_depth
    if plan.eight_bit:
        return [plgpu.SMEM((depth, tile.tile_n, tile.tile_k), dtype)] * plan.weights
    rings = [plgpu.SMEM((depth, tile.tile_k, tile.tile_n), dtype)] * plan.weights
    if not plan.shared_slots:
        return rings
    # As many bytes a slot, so that slots begin at the same places; the first rows are used.
    rows = tile.tile_k * tile.tile_n // tile.narrow_n
    narrow = [plgpu.SMEM((depth, rows, tile.narrow_n), dtype)] * plan.weights
    both = zip(rings, narrow, strict=True)
    return rings + narrow if plan.emulated else [plgpu.RefUnion(*pair) for pair in both]


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
            cols = pl.ds(col, segment.width)
            source = weight.at[cols, k] if plan.eight_bit else weight.at[k, cols]
            plgpu.copy_gmem_to_smem(source, target, full, collective_axes=w_axes)


def weight_slots(plan: Plan, refs: Refs, segment: Segment, slot) -> list[Any]:
    """Where the weights of one step lie, for tiles as wide as the segment's."""
    if plan.eight_bit:
        return [ring.at[slot, pl.ds(0, segment.width)] for ring in refs.w_slots]
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
    row_scales = []
    if refs.row_scales is not None:
        row_scales = rows.load_scales(refs.row_scales[segment.group], row, tile.tile_m, PIECE)
    part = Part(segment=segment, wg=wg, i=i, begin=lambda: fetch(plan, refs, segment, wg, row, col))
    products = (promoted_sums if tile.promotion else one_sum)(plan, refs, part)
    store(plan, refs, segment, products, row_scales, wg, row, col)


def fetch(plan: Plan, refs: Refs, segment: Segment, wg, row, col) -> None:
    """Copies what the epilogue of a tile reads first, once the last one's stores are done."""
    fetch_columns(refs, segment, wg, col)
    if refs.residuals is None:
        return
    # Into the L2 cache at once: not all pieces find room in buffers before their turn.
    block = pl.ds(row, plan.tile.tile_m), pl.ds(col, segment.width)
    plgpu.async_prefetch(refs.residuals[segment.group].at[block])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # All buffers of stores are free.
    for piece in range(min(plan.tile.store_slots, len(plan.pieces(segment.width)))):
        fetch_residual(plan, refs, segment, wg, row, col, piece)


def one_sum(plan: Plan, refs: Refs, part: Part):
    """The products of a part, of each weight, summed in the tensor cores' accumulator."""
    whole, rest = divmod(plan.k, plan.tile.tile_k)

    def run(accs):
        pl.loop(0, whole)(lambda step: multiply_step(plan, refs, part, accs, 0, step))
        if rest:
            multiply_step(plan, refs, part, accs, 0, jnp.int32(whole), rest)
        return values(plan, refs, part, accs, plan.steps)

    return with_accumulators(plan, refs, part, run)


def promoted_sums(plan: Plan, refs: Refs, part: Part):
    """The products of a part, summed a few steps at a time, and those sums in f32.

    The second warpgroup adds half a turn later than the first, which multiplies meanwhile.
    """
    every = plan.tile.promotion
    early = part.wg * (every // 2)

    def add(turn, totals):
        start = jnp.maximum(turn * every - early, 0)
        stop = jnp.minimum((turn + 1) * every - early, plan.steps)

        def run(accs):
            pl.loop(start, stop)(lambda step: multiply_step(plan, refs, part, accs, start, step))
            return values(plan, refs, part, accs, stop)

        sums = with_accumulators(plan, refs, part, run)
        return tuple(total + y for total, y in zip(totals, sums, strict=True))

    nothing = jnp.zeros((plan.tile.tile_m, part.segment.width), jnp.float32)
    nothing = plgpu.layout_cast(nothing, plgpu.Layout.WGMMA)
    turns = lax.div(plan.steps + early + every - 1, jnp.int32(every))
    return lax.fori_loop(0, turns, add, (nothing,) * plan.weights)


def with_accumulators(plan: Plan, refs: Refs, part: Part, run):
    """What run returns, given accumulators of zeros, one for each weight."""
    kind = jnp.int32 if refs.x_slots.dtype == jnp.int8 else jnp.float32
    accs = [plgpu.ACC((plan.tile.tile_m, part.segment.width), kind)] * plan.weights
    return pl.run_scoped(lambda *accs: run(accs), *accs)


def multiply_step(plan: Plan, refs: Refs, part: Part, accs, start, step, depth=None) -> None:
    """Adds the products of one slot, or of its first `depth` columns; start is the sum's first."""
    tile = plan.tile
    depth = tile.tile_k if depth is None else depth
    slot = slot_of(plan, part, step)
    turn = part.wg * tile.pipeline_depth if plan.pingpong else 0
    plgpu.barrier_wait(refs.full.at[turn + slot])
    first_row = 0 if plan.pingpong else part.wg * tile.tile_m
    x = refs.x_slots.at[slot, pl.ds(first_row, tile.tile_m)]
    weights = weight_slots(plan, refs, part.segment, slot)
    for acc, weight in zip(accs, weights, strict=True):
        multiply_slots(plan, acc, x, weight, depth)
    pl.when(step == 0)(part.begin)
    pending = len(accs) * (depth // plan.swizzled_k)
    plgpu.wgmma_wait(tile.in_flight * pending)  # The steps before have read their slots.
    done = step - tile.in_flight
    pl.when(done >= start)(lambda: plgpu.barrier_arrive(refs.empty.at[slot_of(plan, part, done)]))


def multiply_slots(plan: Plan, acc, x, weight, depth: int) -> None:
    """Adds the products of the first columns of slots, a swizzled row at a time."""
    if not plan.eight_bit:
        plgpu.wgmma(acc, x, weight)
        return
    for k in range(0, depth, plan.swizzled_k):
        cols = (slice(None), pl.ds(k, plan.swizzled_k))
        plgpu.wgmma(acc, x.at[cols], weight.at[cols].transpose((1, 0)))


def values(plan: Plan, refs: Refs, part: Part, accs, stop):
    """The value of each accumulator after the step before `stop`; releases the last slots."""
    found = tuple(acc[...] for acc in accs)  # Waits for the last step.
    for back in range(plan.tile.in_flight, 0, -1):
        plgpu.barrier_arrive(refs.empty.at[slot_of(plan, part, stop - back)])
    return found


def slot_of(plan: Plan, part: Part, step):
    """The slot of a part's step."""
    return lax.rem(part.i * plan.steps + step, jnp.int32(plan.tile.pipeline_depth))


def store(plan: Plan, refs: Refs, segment: Segment, products, row_scales, wg, row, col) -> None:
    """Epilogue and store of one tile, piece by piece."""
    slots, pieces = plan.tile.store_slots, plan.pieces(segment.width)
    if refs.bias is not None or plan.eight_bit:
        plgpu.barrier_wait(refs.columns_arrived.at[wg])
    for piece, (r, c) in enumerate(pieces):
        slot = piece % slots
        if refs.residuals is not None:
            plgpu.barrier_wait(refs.arrived.at[wg * slots + slot])
        elif piece == 0 or piece >= slots:  # No store still reads the slot.
            plgpu.wait_smem_to_gmem(slots - 1 if piece else 0, wait_read_only=True)
        out_slot = refs.out_slots.at[wg, slot]
        parts = [y[r : r + PIECE, c : c + PIECE].astype(jnp.float32) for y in products]
        if row_scales:
            parts = rows.scale_rows(parts, row_scales[r // PIECE])
        if plan.eight_bit:
            parts = scale_columns(refs, parts, wg, c)
        value = finish(plan, refs, parts, (wg, c), out_slot)
        out_slot[...] = rounded(value, out_slot.dtype)
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
        value += load_columns(refs.bias_slots.at[wg, pl.ds(col, PIECE)], value.shape)
    if epilogue.gated:
        gate = products[0]
        value *= gate if epilogue.activation is None else ACTIVATIONS[epilogue.activation](gate)
    elif epilogue.activation is not None:
        value = ACTIVATIONS[epilogue.activation](value)
    if epilogue.scale != 1.0:
        value *= epilogue.scale
    if refs.residuals is not None:
        value += plgpu.load(residual, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
    if refs.result_scale is not None:
        value *= 1.0 / refs.result_scale[0]
    return value


def load_columns(values, shape):
    """A value for each column, from shared memory, in f32 and spread over the rows."""
    loaded = plgpu.load(values, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
    return lax.broadcast_in_dim(loaded.astype(jnp.float32), shape, [1])


def scale_columns(refs: Refs, products, wg, col):
    """Pieces times the scales of their columns."""
    return [
        y * load_columns(refs.scale_slots.at[wg, weight, pl.ds(col, PIECE)], y.shape)
        for weight, y in enumerate(products)
    ]


def fetch_columns(refs: Refs, segment: Segment, wg, col) -> None:
    """Copies what a tile needs of the bias, and of 8 bits' scales."""
    pairs = [(scales, refs.scale_slots.at[wg, i]) for i, scales in enumerate(refs.col_scales)]
    if refs.bias is not None:
        pairs.append((refs.bias, refs.bias_slots.at[wg]))
    for source, target in pairs:
        plgpu.copy_gmem_to_smem(
            source.at[pl.ds(col, segment.width)],
            target.at[pl.ds(0, segment.width)],
            refs.columns_arrived.at[wg],
        )


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
    x, eight_bit = xs[0], xs[0].dtype.itemsize == 1
    k, n = weight.shape[:: -1 if eight_bit else 1]
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.int8, jnp.float8_e4m3fn):
        raise NotImplementedError(
            f"gemm(x: {x.dtype}): WGMMA multiplies bfloat16 and float16 here; cast, or use "
            "implementation='xla'"
        )
    if tile.operand_bytes != x.dtype.itemsize or (tile.promotion and x.dtype == jnp.int8):
        raise ValueError(
            f"gemm(x: {x.dtype}, tile={tile}): operand_bytes is that of x, and sums of int8 are "
            "exact and need no promotion; choose a tile for this type"
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
