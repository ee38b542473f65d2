"""Which tile a GEMM runs with: a count of waves, and rates measured on an H200."""

import dataclasses
import functools
from dataclasses import dataclass

import jax.experimental.pallas as pl
import numpy as np

from pallas_kernels.gemm.plan import Epilogue, Plan, Tile

MAX_NARROW_COLS = 12
RATED_SMS = 132
# Up to these rows in all XLA's products run: ours read 34 MB of weights in 32 us at 1 and 8 rows,
# 1.0 TB/s, and LLaMA3-8B's MLP at half of the bandwidth at 32 rows (docs/design/roofline.md).
FEW_ROWS = 32
# Rates of XLA's products, which split the sum over K where tiles are few, and what else one takes.
XLA_FLOPS_PER_S, XLA_BYTES_PER_S, XLA_S = 700e12, 4.2e12, 4e-6
# What tiles of 8 bits take above the prediction at 64 to 256 rows, where little follows the first
# slots.
FIRST_SLOTS_S = 4e-6
# By so much ours must be slower: its epilogue saves a kernel or two.
SLOWER = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A tile, the rate it reaches where tiles fill the SMs, and what a tile costs beside its steps.

    Rates are TFLOP/s on 132 SMs, of the tile and of its narrow ones. Overheads are in steps of
    tile_k: of every tile, and what a residual or an activation adds. They were fitted to 23 shapes,
    docs/design/kernels.md. A loop of fewer than least_steps is unrolled in the copying warpgroup,
    whose 40 registers do not hold the slots of eight steps unless their number is a power of two.
    """

    tile: Tile
    rate: float
    overhead: float
    heavy_overhead: float = 0.0
    narrow_rate: float = 750.0
    least_steps: int = 1


_PLAIN = (
    _Candidate(
        tile=Tile(pipeline_depth=5, cluster="m", store_slots=4),
        rate=785.0,
        overhead=0.8,
        heavy_overhead=1.0,
        least_steps=9,
    ),
    _Candidate(
        tile=Tile(tile_n=192, pipeline_depth=4, cluster="m", store_slots=4),
        rate=810.0,
        overhead=0.4,
        heavy_overhead=0.8,
    ),
    _Candidate(
        tile=Tile(tile_m=64, tile_n=256, pipeline_depth=4, schedule="cooperative", cluster="m"),
        rate=838.0,
        overhead=2.8,
        heavy_overhead=4.0,
    ),
)
_GATED = (
    _Candidate(
        tile=Tile(tile_m=64, pipeline_depth=5, weights=2, cluster="m", store_slots=1),
        rate=760.0,
        overhead=1.0,
        least_steps=9,
    ),
    _Candidate(
        tile=Tile(
            tile_m=64,
            pipeline_depth=4,
            weights=2,
            schedule="cooperative",
            cluster="m",
            in_flight=0,
        ),
        rate=815.0,
        overhead=1.0,
    ),
)
# Of 8 bits: a slot holds twice the columns in the same bytes and the same time. Rates are between
# those of a burst and of a long run, docs/design/kernels_8bit.md.
_eight_bit = functools.partial(Tile, operand_bytes=1, tile_k=128, cluster="m")
_PLAIN_EIGHT_BIT = (
    _Candidate(
        tile=_eight_bit(pipeline_depth=5, store_slots=3),
        rate=1_550.0,
        overhead=2.0,
        heavy_overhead=2.5,
    ),
    _Candidate(
        tile=_eight_bit(tile_n=192, pipeline_depth=4, store_slots=3),
        rate=1_600.0,
        narrow_rate=1_350.0,
        overhead=1.5,
        heavy_overhead=3.0,
    ),
    # One buffer: a residual has no room to come early, and a long run gains nothing by it.
    _Candidate(
        tile=_eight_bit(
            tile_m=64, tile_n=256, pipeline_depth=4, schedule="cooperative", store_slots=1
        ),
        rate=1_670.0,
        overhead=4.7,
        heavy_overhead=12.0,
    ),
)
_GATED_EIGHT_BIT = (
    _Candidate(
        tile=_eight_bit(tile_m=64, pipeline_depth=5, weights=2, store_slots=1),
        rate=1_500.0,
        overhead=1.0,
    ),
)
# With sums that leave the tensor cores: registers hold two sums, so that warpgroups share a tile.
_promoted = functools.partial(_eight_bit, tile_m=64, schedule="cooperative", promotion=4)
_PLAIN_PROMOTED = (
    _Candidate(
        tile=_promoted(tile_n=192, pipeline_depth=4, store_slots=3),
        rate=1_550.0,
        narrow_rate=1_350.0,
        overhead=4.0,
        heavy_overhead=4.0,
    ),
    _Candidate(
        tile=_promoted(tile_n=128, pipeline_depth=5, store_slots=3),
        rate=1_350.0,
        overhead=4.0,
        heavy_overhead=4.0,
    ),
)
_GATED_PROMOTED = (
    _Candidate(
        tile=_promoted(tile_n=64, weights=2, pipeline_depth=5, store_slots=1),
        rate=1_200.0,
        overhead=4.0,
    ),
)
# Narrow tiles come after all wide ones: inputs that the L2 cache cannot hold are then read again.
KEPT_BYTES, READ_BYTES_PER_S = 20e6, 3.5e12


def tile_for(
    ms: tuple[int, ...],
    n: int,
    k: int,
    *,
    gated: bool,
    heavy: bool,
    ctas: int,
    num_sms: int,
    moments: bool = False,
    operand_bytes: int = 2,
    promoted: bool = False,
) -> Tile:
    """Chooses the tile with the shortest predicted time.

    Clusters are used only with every SM: beside another kernel, whose CTAs stand on single SMs,
    pairs of free neighbours are rare, and a second wave costs more than multicast saves.

    Args:
      ms: Rows of each input.
      n: Columns of the result.
      k: Columns of the inputs.
      gated: Whether two weights are multiplied.
      heavy: Whether the epilogue adds a residual or applies an activation.
      ctas: SMs to fill.
      num_sms: SMs of the device.
      moments: Whether those of the result are kept, in the room of some of its buffers.
      operand_bytes: Of an element of inputs and weights: 2, or 1.
      promoted: Whether sums of FP8 leave the tensor cores to be added in f32.

    Returns:
      The tile.
    """
    candidates = _candidates(gated, operand_bytes, promoted=promoted)
    if moments:
        candidates = tuple(c for c in _PLAIN if c.tile.schedule == "pingpong")
    tile = _best(candidates, ms, n, k, heavy=heavy, ctas=ctas, num_sms=num_sms)[0].tile
    if not moments:
        return tile
    # By ptxas: beside narrow tiles three buffers spill registers where there is no bias.
    buffers = 2 if tile.narrow_cols else 3
    return dataclasses.replace(tile, store_slots=min(tile.store_slots, buffers))


def is_left_to_xla(
    ms: tuple[int, ...], n: int, k: int, *, gated: bool, num_sms: int, operand_bytes: int = 2
) -> bool:
    """Whether XLA's product is faster: rows are few, or tiles leave most SMs idle for long.

    LLaMA3-8B's down projection of 128 rows has 32 tiles: 73 us on an H200, where XLA takes 35.

    Args:
      ms: Rows of each input.
      n: Columns of the result.
      k: Columns of the inputs.
      gated: Whether two weights are multiplied.
      num_sms: SMs of the device.
      operand_bytes: Of an element of inputs and weights: 2, or 1.
    """
    if sum(ms) <= FEW_ROWS:
        return True
    given = {"gated": gated, "num_sms": num_sms, "operand_bytes": operand_bytes}
    ours_s = predicted_s(ms, n, k, heavy=False, ctas=num_sms, **given)
    if operand_bytes == 1:
        ours_s += FIRST_SLOTS_S
    return ours_s > SLOWER * by_xla_s(sum(ms), n, k, **given)


def by_xla_s(m: int, n: int, k: int, *, gated: bool, num_sms: int, operand_bytes: int = 2) -> float:
    """Seconds of a product as XLA runs it, with what follows; fewer SMs multiply more slowly.

    Scales of 8 bits are applied after the product, which writes 4 bytes, and another kernel reads.
    """
    weights, scaled = 1 + gated, operand_bytes == 1
    moved = operand_bytes * (weights * n * k + m * k) + m * n * (2 + 8 * weights * scaled)
    flops_per_s = (2 / operand_bytes) * XLA_FLOPS_PER_S * num_sms / RATED_SMS
    flops_s = 2 * m * n * k * weights / flops_per_s
    return XLA_S + max(moved / XLA_BYTES_PER_S, flops_s)


def predicted_s(
    ms: tuple[int, ...],
    n: int,
    k: int,
    *,
    gated: bool,
    heavy: bool,
    ctas: int,
    num_sms: int,
    operand_bytes: int = 2,
) -> float:
    """Seconds of the GEMM with the tile that `tile_for` chooses, from the same arguments."""
    candidates = _candidates(gated, operand_bytes)
    return 1e-6 * _best(candidates, ms, n, k, heavy=heavy, ctas=ctas, num_sms=num_sms)[1]


def _candidates(
    gated: bool, operand_bytes: int, *, promoted: bool = False
) -> tuple[_Candidate, ...]:
    """The tiles that a kind of product may run with."""
    if promoted:
        return _GATED_PROMOTED if gated else _PLAIN_PROMOTED
    if operand_bytes == 1:
        return _GATED_EIGHT_BIT if gated else _PLAIN_EIGHT_BIT
    return _GATED if gated else _PLAIN


def _best(
    candidates: tuple[_Candidate, ...],
    ms: tuple[int, ...],
    n: int,
    k: int,
    *,
    heavy: bool,
    ctas: int,
    num_sms: int,
) -> tuple[_Candidate, float]:
    """The candidate with the shortest predicted time, and that time in microseconds."""
    clusters = ctas == num_sms and ctas % 2 == 0
    times = [
        (candidate, predicted_time(candidate, ms, n, k, heavy=heavy, ctas=ctas))
        for base in candidates
        if pl.cdiv(k, base.tile.tile_k) >= base.least_steps
        for tile in _variants(base.tile, n, clusters)
        for candidate in [dataclasses.replace(base, tile=tile)]
    ]
    return min(times, key=lambda timed: timed[1])


def _variants(tile: Tile, n: int, clusters: bool) -> list[Tile]:
    """The tile, and with the numbers of narrow columns that fill the rest of n exactly."""
    if not clusters:
        tile = dataclasses.replace(tile, cluster=None)
    found = [tile]
    if tile.tile_n == 192 and tile.weights == 1:
        for narrow_cols in range(1, MAX_NARROW_COLS + 1):
            wide = n - narrow_cols * tile.narrow_n
            if wide > 0 and wide % tile.tile_n == 0:
                found.append(dataclasses.replace(tile, narrow_cols=narrow_cols))
    return found


def predicted_time(
    candidate: _Candidate, ms: tuple[int, ...], n: int, k: int, *, heavy: bool, ctas: int
) -> float:
    """When the last CTA ends: the work of its tiles over their rate, in microseconds."""
    tile = candidate.tile
    plan = Plan(ms=ms, n=n, k=k, ctas=ctas, tile=tile, epilogue=Epilogue())
    steps = plan.steps + candidate.overhead + heavy * candidate.heavy_overhead
    flops = 2 * tile.block_m * tile.weights * steps * tile.tile_k  # Of a column of a tile.
    costs = np.zeros(pl.cdiv(plan.total, plan.workers) * plan.workers)
    for segment in plan.segments:
        rate = candidate.narrow_rate if segment.narrow else candidate.rate
        rate *= 1e6 / RATED_SMS  # FLOP/us of one SM.
        costs[segment.first : segment.end] = flops * segment.width / rate
    again = tile.operand_bytes * sum(ms) * k
    if tile.narrow_cols and again > KEPT_BYTES:
        start = next(segment.first for segment in plan.segments if segment.narrow)
        share = 1e6 * again / READ_BYTES_PER_S / (costs[start:].sum() / plan.workers)
        costs[start:] *= max(1 + share / 6, share)
    waves = costs.reshape(-1, plan.workers)
    if tile.narrow_cols and plan.total % plan.workers:  # As mosaic_gpu.origin has it.
        waves[-1] = waves[-1, ::-1]
    return float(waves.sum(axis=0).max())
