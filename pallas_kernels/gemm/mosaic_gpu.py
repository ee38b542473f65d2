"""A persistent, warp-specialised GEMM with fused epilogues, on as many SMs as it is given.

One warpgroup copies operands (TMA), two multiply (WGMMA). Its loads run on from tile to tile as one
stream through a ring of shared-memory slots, so that neither the pipeline's fill nor the epilogue
of a tile stops them. The two multiplying warpgroups either take alternate tiles ("pingpong": one's
epilogue runs beside the other's products) or halves of the same tile ("cooperative": half the
operand traffic per product). CTAs may form clusters of two that share one operand by multicast.

Edges: TMA fills with zeros what lies beyond an operand and clips what lies beyond the result, so M,
N and K need not divide by the tile: M must be a multiple of 8, K and N of 64. Not here: batched or
grouped products, quantised types.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.gemm.activations import ACTIVATIONS, Activation

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
        return 2 * (ring + CONSUMERS * self.store_slots * PIECE * PIECE) + 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """What happens to x @ w before it is stored: residual + scale * activation(x @ w + bias)."""

    activation: Activation | None = None
    gated: bool = False
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything static about one launch."""

    m: int
    n: int
    k: int
    ctas: int
    tile: Tile
    epilogue: Epilogue

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
    def rows(self) -> int:
        """Tiles, or clusters of them, from top to bottom."""
        return pl.cdiv(self.m, self.tile.block_m * self.cluster_m)

    @property
    def cols(self) -> int:
        """Tiles, or clusters of them, from left to right."""
        return pl.cdiv(self.n, self.tile.tile_n * self.cluster_n)

    @property
    def steps(self) -> int:
        """Slots that one tile reads."""
        return pl.cdiv(self.k, self.tile.tile_k)

    @property
    def pingpong(self) -> bool:
        """Whether warpgroups take alternate tiles."""
        return self.tile.schedule == "pingpong"

    @property
    def slots(self) -> int:
        """Store buffers in use; they divide the pieces: a slot was last used `slots` stores ago."""
        return math.gcd(self.tile.store_slots, len(self.pieces))

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """First row and column of each piece of a warpgroup's part of the result."""
        return list(
            itertools.product(range(0, self.tile.tile_m, PIECE), range(0, self.tile.tile_n, PIECE))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Refs:
    """The references a CTA works on; absent operands are None."""

    x: Any
    weights: tuple[Any, ...]
    bias: Any
    residual: Any
    out: Any
    x_slots: Any
    w_slots: tuple[Any, ...]
    out_slots: Any
    full: Any
    empty: Any
    arrived: Any


def matmul(
    x: Float[Array, "M K"],
    weights: tuple[Float[Array, "K N"], ...],
    bias: Float[Array, " N"] | None,
    residual: Float[Array, "M N"] | None,
    *,
    epilogue: Epilogue,
    tile: Tile,
    ctas: int,
    name: str = "pbjax_gemm",
) -> Float[Array, "M N"]:
    """Runs the kernel on `ctas` SMs. `weights` is (w,), or (w_gate, w) for a gated product."""
    plan = make_plan(x, weights[0], epilogue, tile, ctas)
    operands = [a for a in (x, *weights, bias, residual) if a is not None]
    absent = (bias is None, residual is None)
    return launch(
        lambda *refs: run_cta(plan, name_refs(plan, refs, *absent)),
        plan,
        operands,
        jax.ShapeDtypeStruct((plan.m, plan.n), x.dtype),
        scratch(plan, x.dtype, residual is not None),
        name,
    )


def name_refs(plan: Plan, refs, no_bias: bool = True, no_residual: bool = True) -> Refs:
    """Gives the references of a launch, operands, result and scratch, their names."""
    remaining = iter(refs)
    return Refs(
        x=next(remaining),
        weights=tuple(next(remaining) for _ in range(plan.weights)),
        bias=None if no_bias else next(remaining),
        residual=None if no_residual else next(remaining),
        out=next(remaining),
        x_slots=next(remaining),
        w_slots=tuple(next(remaining) for _ in range(plan.weights)),
        out_slots=next(remaining),
        full=next(remaining),
        empty=next(remaining),
        arrived=None if no_residual else next(remaining),
    )


def launch(body, plan: Plan, operands, out_type, scratch_types, name: str, threads: int = 3):
    """Launches body on the plan's CTAs, in clusters where the tile asks for them."""
    clusters = plan.cluster_m * plan.cluster_n
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
        compiler_params=plgpu.CompilerParams(approx_math=True),
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
    slots = [
        plgpu.SMEM((depth, tile.block_m, tile.tile_k), dtype),
        *[plgpu.SMEM((depth, tile.tile_k, tile.tile_n), dtype)] * plan.weights,
        plgpu.SMEM((CONSUMERS, plan.slots, PIECE, PIECE), dtype),
        plgpu.Barrier(
            num_arrivals=1 + plan.weights,
            num_barriers=depth * (CONSUMERS if plan.pingpong else 1),
        ),
        empty,
    ]
    if with_residual:
        slots.append(plgpu.Barrier(num_barriers=CONSUMERS * plan.slots))
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
    tile, depth = plan.tile, plan.tile.pipeline_depth
    x_axes = "cluster" if tile.cluster == "n" else None
    w_axes = "cluster" if tile.cluster == "m" else None

    @pl.loop(0, share(plan.rows * plan.cols, worker, plan.workers))
    def _(i):
        row, col = origin(plan, worker, i)
        turn = lax.rem(i, jnp.int32(CONSUMERS)) * depth if plan.pingpong else 0

        @pl.loop(0, plan.steps)
        def _(step):
            slot = lax.rem(i * plan.steps + step, jnp.int32(depth))
            full = refs.full.at[turn + slot]
            k = pl.ds(step * tile.tile_k, tile.tile_k)
            plgpu.barrier_wait(refs.empty.at[slot])
            plgpu.copy_gmem_to_smem(
                refs.x.at[pl.ds(row, tile.block_m), k],
                refs.x_slots.at[slot],
                full,
                collective_axes=x_axes,
            )
            for weight, slots in zip(refs.weights, refs.w_slots, strict=True):
                plgpu.copy_gmem_to_smem(
                    weight.at[k, pl.ds(col, tile.tile_n)],
                    slots.at[slot],
                    full,
                    collective_axes=w_axes,
                )

    # No arrival may be left unobserved: in a cluster this also keeps the CTA alive until its
    # partner has sent all.
    for slot in range(depth):
        plgpu.barrier_wait(refs.empty.at[slot])


def multiply(plan: Plan, refs: Refs, wg, worker) -> None:
    """A multiplying warpgroup: alternate tiles of this CTA, or the wg-th half of each."""
    for slot in range(plan.tile.pipeline_depth):
        if plan.pingpong:  # Whoever used a slot releases it; at first warpgroup 0 releases all.
            pl.when(wg == 0)(lambda slot=slot: plgpu.barrier_arrive(refs.empty.at[slot]))
        else:
            plgpu.barrier_arrive(refs.empty.at[slot])
    tiles = share(plan.rows * plan.cols, worker, plan.workers)
    turns = lax.div(tiles + 1 - wg, jnp.int32(CONSUMERS)) if plan.pingpong else tiles

    @pl.loop(0, turns)
    def _(turn):
        i = turn * CONSUMERS + wg if plan.pingpong else turn
        row, col = origin(plan, worker, i)
        if not plan.pingpong:
            row += wg * plan.tile.tile_m
        if refs.residual is not None:
            for piece in range(plan.slots):
                fetch_residual(plan, refs, wg, row, col, piece)
        products = pl.run_scoped(
            lambda *accs: accumulate(plan, refs, accs, wg, i),
            *[plgpu.ACC((plan.tile.tile_m, plan.tile.tile_n))] * plan.weights,
        )
        store(plan, refs, products, wg, row, col)

    plgpu.wait_smem_to_gmem(0)


def accumulate(plan: Plan, refs: Refs, accs, wg, i):
    """The products of one tile; returns the value of each weight's accumulator."""
    tile, depth, steps = plan.tile, plan.tile.pipeline_depth, plan.steps
    first_row = 0 if plan.pingpong else wg * tile.tile_m
    turn = wg * depth if plan.pingpong else 0

    @pl.loop(0, steps)
    def _(step):
        slot = lax.rem(i * steps + step, jnp.int32(depth))
        plgpu.barrier_wait(refs.full.at[turn + slot])
        x = refs.x_slots.at[slot, pl.ds(first_row, tile.tile_m)]
        for acc, weight in zip(accs, refs.w_slots, strict=True):
            plgpu.wgmma(acc, x, weight.at[slot])
        plgpu.wgmma_wait(tile.in_flight * len(accs))  # The steps before have read their slots.
        done = step - tile.in_flight
        slot = lax.rem(i * steps + done, jnp.int32(depth))
        pl.when(done >= 0)(lambda: plgpu.barrier_arrive(refs.empty.at[slot]))

    products = tuple(acc[...] for acc in accs)  # Waits for the last step.
    for last in range(steps - tile.in_flight, steps):
        plgpu.barrier_arrive(refs.empty.at[lax.rem(i * steps + last, jnp.int32(depth))])
    return products


def store(plan: Plan, refs: Refs, products, wg, row, col) -> None:
    """Epilogue and store of one tile, piece by piece."""
    slots = plan.slots
    for piece, (r, c) in enumerate(plan.pieces):
        slot = piece % slots
        if refs.residual is not None:
            plgpu.barrier_wait(refs.arrived.at[wg * slots + slot])
        else:
            plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
        out_slot = refs.out_slots.at[wg, slot]
        out_slot[...] = finish(
            plan, refs, [y[r : r + PIECE, c : c + PIECE] for y in products], col + c, out_slot
        ).astype(refs.out.dtype)
        plgpu.commit_smem()
        target = refs.out.at[pl.ds(row + r, PIECE), pl.ds(col + c, PIECE)]
        plgpu.copy_smem_to_gmem(out_slot, target)
        # The store just issued is still reading its slot: fetch into the one before, where there
        # are two.
        upcoming = piece - min(1, slots - 1) + slots
        if refs.residual is not None and slots <= upcoming < len(plan.pieces):
            fetch_residual(plan, refs, wg, row, col, upcoming)


def finish(plan: Plan, refs: Refs, products, col, residual):
    """The value of one piece in f32: residual + scale * activation(products + bias)."""
    epilogue, value = plan.epilogue, products[-1]
    if refs.bias is not None:
        # A piece beyond the last column is clipped when stored: only its addresses matter.
        first = jnp.minimum(col, plan.n - PIECE)
        bias = plgpu.load(
            refs.bias.at[pl.ds(first, PIECE)], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False
        )
        value += lax.broadcast_in_dim(bias.astype(jnp.float32), value.shape, [1])
    if epilogue.gated:
        gate = products[0]
        value *= gate if epilogue.activation is None else ACTIVATIONS[epilogue.activation](gate)
    elif epilogue.activation is not None:
        value = ACTIVATIONS[epilogue.activation](value)
    if epilogue.scale != 1.0:
        value *= epilogue.scale
    if refs.residual is not None:
        value += plgpu.load(residual, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
    return value


def fetch_residual(plan: Plan, refs: Refs, wg, row, col, piece: int) -> None:
    """Copies a piece of the residual to where the result of that piece will be put."""
    slots = plan.slots
    r, c = plan.pieces[piece]
    plgpu.wait_smem_to_gmem(0 if piece < slots else min(1, slots - 1), wait_read_only=True)
    plgpu.copy_gmem_to_smem(
        refs.residual.at[pl.ds(row + r, PIECE), pl.ds(col + c, PIECE)],
        refs.out_slots.at[wg, piece % slots],
        refs.arrived.at[wg * slots + piece % slots],
    )


def origin(plan: Plan, worker, i):
    """First row and column, in the result, of a CTA's i-th tile."""
    im, jn = plgpu.planar_snake(
        worker + i * plan.workers, (plan.rows, plan.cols), 0, plan.tile.raster_width
    )
    if plan.tile.cluster == "m":
        im = im * 2 + lax.axis_index("cluster")
    if plan.tile.cluster == "n":
        jn = jn * 2 + lax.axis_index("cluster")
    return im * plan.tile.block_m, jn * plan.tile.tile_n


def share(total: int, me, workers: int):
    """How many of `total` items fall to worker `me`, who takes me, me + workers, and so on."""
    return lax.div(total - 1 - me + workers, jnp.int32(workers))


def make_plan(x, weight, epilogue: Epilogue, tile: Tile, ctas: int) -> Plan:
    """Gathers what is static about a launch; refuses operands that WGMMA or TMA cannot take."""
    (m, k), n = x.shape, weight.shape[1]
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(
            f"gemm(x: {x.dtype}): WGMMA multiplies bfloat16 and float16 here; cast, or use "
            "implementation='xla'"
        )
    if m % 8 or n % PIECE or k % PIECE:
        raise NotImplementedError(
            f"gemm(x: {x.shape}, w: {weight.shape}): a swizzled copy takes 8 rows of 64 elements "
            "at a time; M must be a multiple of 8, K and N of 64; pad them, or use "
            "implementation='xla'"
        )
    if tile.weights != (2 if epilogue.gated else 1):
        raise ValueError(
            f"gemm(tile={tile}): {tile.weights} weights; a gated product has 2, any other 1; "
            "choose a tile for as many"
        )
    if tile.cluster is not None and ctas < 2:
        raise NotImplementedError(
            f"gemm(sm_budget={ctas}): a tile with clusters needs two SMs; choose a tile without"
        )
    return Plan(m=m, n=n, k=k, ctas=ctas, tile=tile, epilogue=epilogue)
