"""A GEMM and bandwidth-bound work in one launch: the second in a fourth warpgroup of every CTA.

Warpgroups 0 and 1 multiply, 2 copies operands for them, 3 streams its own data through its own
ring. So each SM has both kinds of work from start to end whatever their shares, and neither waits
for the other. The other design, some SMs for one and some for the other, is slower: see
docs/design/corun.md.

Partners: decode attention (corun.decode_attention), a norm with a residual sum
(pallas_kernels.norm), and column sums of a large array, the plainest reader.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.corun import decode_attention
from pallas_kernels.corun.tiles import WIDE_TILE
from pallas_kernels.decode_attention.mosaic_gpu import Problem
from pallas_kernels.gemm import mosaic_gpu as gemm
from pallas_kernels.mosaic import plgpu
from pallas_kernels.norm import mosaic_gpu as norm

# Registers of a thread that multiplies, of one that copies, and of the partner's: twice the first
# plus the others are 512.
READER_REGISTERS, NORM_REGISTERS = (192, 40, 88), (176, 40, 120)
DECODE_REGISTERS = (192, 40, 88)
PARTNER_BYTES = gemm.SMEM_BYTES - WIDE_TILE.smem_bytes - 3072

# The reader sums blocks of (BLOCK, LANES) values, one TMA copy of 16 KB each, in (PART, LANES)
# registers.
BLOCK, LANES, PART = 64, 128, 32
READER_DEPTH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Partner:
    """Bandwidth-bound work for one warpgroup of each CTA.

    Attributes:
      operands: The arrays of the work.
      out_types: The types of the results.
      scratch: The types of shared memory and barriers.
      registers: Registers of a thread that multiplies, of one that copies, and of the partner's.
      run: Does a worker's share, given the references in that order, the worker's number and the
        number of workers.
    """

    operands: list[Array]
    out_types: tuple[jax.ShapeDtypeStruct, ...]
    scratch: list[Any]
    registers: tuple[int, int, int]
    run: Callable[[tuple[Any, ...], Any, int], None]


def gemm_beside(
    x: Float[Array, "M K"],
    weights: tuple[Float[Array, "K N"], ...],
    bias: Float[Array, " N"] | None,
    residual: Float[Array, "M N"] | None,
    partner: Partner,
    *,
    epilogue: gemm.Epilogue,
    ctas: int,
    tile: gemm.Tile = WIDE_TILE,
    name: str = "pbjax_gemm_beside",
) -> tuple[Array, ...]:
    """Runs both on `ctas` SMs; returns the product and the partner's results.

    `weights` is (w,), or (w_gate, w) for a gated product.
    """
    if tile.cluster is not None:
        raise ValueError(f"{name}({tile}): clusters tie CTAs to each other; co-run tiles have none")
    plan = gemm.make_plan((x,), weights[0], epilogue, tile, ctas)
    operands = [a for a in (x, *weights, bias, residual) if a is not None]
    first = gemm.scratch(plan, x.dtype, residual is not None)
    counts = [len(operands), len(partner.operands), 1, len(partner.out_types), len(first)]

    def body(*refs):
        sections, start = [], 0
        for count in [*counts, len(partner.scratch)]:
            sections.append(refs[start : start + count])
            start += count
        mine, theirs, out, their_outs, scratch, their_scratch = sections
        named = gemm.name_refs(plan, (*mine, *out, *scratch), bias is None, residual is None)
        gemm.run_cta(plan, named, partner.registers[:2])

        @pl.when(lax.axis_index("wg") == gemm.CONSUMERS + 1)
        def _():
            plgpu.set_max_registers(partner.registers[2], action="decrease")
            partner.run((*theirs, *their_outs, *their_scratch), lax.axis_index("sm"), ctas)

    product = jax.ShapeDtypeStruct((plan.m, plan.n), x.dtype)
    return gemm.launch(
        body,
        plan,
        [*operands, *partner.operands],
        (product, *partner.out_types),
        [*first, *partner.scratch],
        name,
        threads=gemm.CONSUMERS + 2,
    )


def norm_partner(
    x: Float[Array, "R D"],
    residual: Float[Array, "R D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None,
    *,
    eps: float,
    centred: bool,
    emulated: bool = False,
) -> Partner:
    """The norm of x + residual, and the sum: results are seen as the rows of norm.Job are."""
    job = norm.Job(tile=norm_tile(x.shape[1]), eps=eps, centred=centred, emulated=emulated)
    operands = job.operands(x, residual, scale, bias)

    def run(refs, me, workers):
        norm.run_warpgroup(job, job.name_refs(refs, len(operands)), 0, me, workers)

    return Partner(
        operands=operands,
        out_types=job.out_types(operands),
        scratch=job.scratch(operands),
        registers=NORM_REGISTERS,
        run=run,
    )


def norm_tile(width: int) -> norm.Tile:
    """The rings of one warpgroup in the shared memory that the GEMM leaves."""
    chunk = norm.rows_at_a_time(width)
    depth = min(6, PARTNER_BYTES // (4 * chunk * width))
    if depth < 2 or width * chunk > 4 * 1024:
        raise NotImplementedError(
            f"gemm_beside_norm(width={width}): beside a GEMM a warpgroup has {NORM_REGISTERS[2]} "
            f"registers a thread and {PARTNER_BYTES} bytes; widths are up to 1024, or multiples "
            f"of {norm.WIDE_STEP} up to 4096; run the norm as a kernel of its own"
        )
    return norm.Tile(width=width, arrays=2, warpgroups=1, pipeline_depth=depth, chunk=chunk)


def decode_partner(
    q: Float[Array, "B T N H"],
    k: Float[Array, "_ S K H"],
    v: Float[Array, "_ S K H"],
    lengths: Int[Array, " B"],
    alibi_slopes: Float[Array, " N"] | None,
    *,
    first_sequence: int,
    scale: float,
    tile: gemm.Tile,
    depth: int | None = None,
    emulated: bool = False,
) -> Partner:
    """Decode attention, as of `decode_attention`; its result has the shape of q as `fold` makes it.

    Args:
      q: Queries.
      k: Keys of these and other sequences.
      v: Values, in the layout of the keys.
      lengths: Number of valid keys.
      alibi_slopes: Slope of each query head.
      first_sequence: The sequence of the cache that is the first of q.
      scale: Factor of the scores.
      tile: The tile of the GEMM, which determines the room.
      depth: Slots of the ring; as many as there is room for if None.
      emulated: Replaces what jax's interpreter lacks.

    Raises:
      NotImplementedError: More query rows than columns, other head sizes, keys not in eights.
    """
    _check_attention(q, k, tile)
    b, t, n, h = q.shape
    num_kv_heads = k.shape[2]
    # Clipped here, not in the kernel: XLA hands a slice of the lengths on where it lies, which may
    # be no multiple of 256 bytes, as the launch wants it; the result of an operation is one.
    lengths = jnp.clip(lengths.astype(jnp.int32), 0, k.shape[1])
    operands = [fold(q, num_kv_heads), k, v, lengths]
    if alibi_slopes is not None:
        slopes = alibi_slopes.astype(jnp.float32).reshape(num_kv_heads, n // num_kv_heads)
        slopes = jnp.tile(slopes, (1, t))
        missing = decode_attention.COLUMNS - slopes.shape[1]
        operands.append(jnp.pad(slopes, ((0, 0), (0, missing))))
    problem = Problem(
        batch_size=b,
        num_tokens=t,
        num_keys=k.shape[1],
        num_kv_heads=num_kv_heads,
        rows=t * n // num_kv_heads,
        head_dim=h,
        scale=scale,
        has_alibi=alibi_slopes is not None,
        first_sequence=first_sequence,
    )
    depth = decode_depth(tile, h) if depth is None else depth
    job = decode_attention.Job(problem=problem, depth=depth, emulated=emulated)

    def run(refs, me, workers):
        # The fewest CTAs that need no more rounds, from the last on: those have the fewest tiles.
        rounds = -(-problem.items // workers)
        busy, me = -(-problem.items // rounds), workers - 1 - me

        @pl.when(me < busy)
        def _():
            decode_attention.attend(job, decode_attention.name_refs(job, refs), me, busy)

    return Partner(
        operands=operands,
        out_types=(jax.ShapeDtypeStruct(operands[0].shape, q.dtype),),
        scratch=job.scratch(q.dtype),
        registers=DECODE_REGISTERS,
        run=run,
    )


def fold(q: Float[Array, "B T N H"], num_kv_heads: int) -> Float[Array, "B K R H"]:
    """The queries of each key-value head as rows: tokens times grouped heads."""
    b, t, n, h = q.shape
    grouped = q.reshape(b, t, num_kv_heads, n // num_kv_heads, h)
    return jnp.swapaxes(grouped, 1, 2).reshape(b, num_kv_heads, -1, h)


def unfold(folded: Float[Array, "B K R H"], num_tokens: int) -> Float[Array, "B T N H"]:
    """Undoes `fold`."""
    b, num_kv_heads, _, h = folded.shape
    grouped = folded.reshape(b, num_kv_heads, num_tokens, -1, h)
    return jnp.swapaxes(grouped, 1, 2).reshape(b, num_tokens, -1, h)


def decode_depth(tile: gemm.Tile, head_dim: int) -> int:
    """Slots of the attention's ring in the shared memory that the GEMM leaves."""
    room = gemm.SMEM_BYTES - tile.smem_bytes - 1024 - decode_attention.fixed_bytes(head_dim)
    return room // decode_attention.slot_bytes(head_dim)


def _check_attention(q, k, tile: gemm.Tile) -> None:
    ours, (_, t, n, h) = "gemm_beside_decode_attention()", q.shape
    rows = t * n // k.shape[2]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(
            f"{ours}: dtype of q is {q.dtype}; WGMMA takes bfloat16 and float16; cast, or use "
            "implementation='xla'"
        )
    if rows > decode_attention.COLUMNS:
        raise NotImplementedError(
            f"{ours}: {rows} query rows a key-value head; at most {decode_attention.COLUMNS}, "
            "tokens times grouped heads; run decode_attention as a kernel of its own"
        )
    if h % 64 or decode_depth(tile, h) < 2:
        raise NotImplementedError(
            f"{ours}: head size is {h}; a multiple of 64, of which two tiles fit beside the GEMM; "
            "run decode_attention as a kernel of its own"
        )
    if k.shape[1] % 8:
        raise NotImplementedError(
            f"{ours}: a cache of {k.shape[1]} keys; TMA wants a multiple of 8; allocate it so"
        )


def reader_partner(data: Float[Array, "R 128"], *, ctas: int) -> Partner:
    """Column sums: one (PART, LANES) of partial sums per CTA, rows taken modulo PART."""
    _check_data(data)
    return Partner(
        operands=[data],
        out_types=(jax.ShapeDtypeStruct((ctas, PART, LANES), jnp.float32),),
        scratch=[
            plgpu.SMEM((READER_DEPTH, BLOCK, LANES), data.dtype),
            plgpu.Barrier(num_barriers=READER_DEPTH),
        ],
        registers=READER_REGISTERS,
        run=lambda refs, me, workers: read(refs, me, workers),
    )


def gemm_beside_sums(
    x: Float[Array, "M K"],
    w: Float[Array, "K N"],
    bias: Float[Array, " N"] | None,
    residual: Float[Array, "M N"] | None,
    data: Float[Array, "R 128"],
    *,
    epilogue: gemm.Epilogue,
    ctas: int,
) -> tuple[Array, Array]:
    """The product, and partial column sums of data, one (PART, LANES) per CTA."""
    product, sums = gemm_beside(
        x,
        (w,),
        bias,
        residual,
        reader_partner(data, ctas=ctas),
        epilogue=epilogue,
        ctas=ctas,
        name="pbjax_gemm_beside_sums",
    )
    return product, sums


def column_sums(data: Float[Array, "R 128"], *, ctas: int) -> Float[Array, "W 32 128"]:
    """Partial column sums of data on `ctas` SMs, three warpgroups each with a ring of its own."""
    _check_data(data)
    readers = 3

    def column_sums_kernel(data_g, sums_g, ring, arrived):
        wg = lax.axis_index("wg")
        me = lax.axis_index("sm") * readers + wg
        read((data_g, sums_g, ring.at[wg], arrived), me, ctas * readers, wg * READER_DEPTH)

    return plgpu.kernel(
        column_sums_kernel,
        out_type=jax.ShapeDtypeStruct((ctas * readers, PART, LANES), jnp.float32),
        scratch_types=[
            plgpu.SMEM((readers, READER_DEPTH, BLOCK, LANES), data.dtype),
            plgpu.Barrier(num_barriers=readers * READER_DEPTH),
        ],
        grid=(ctas,),
        grid_names=("sm",),
        num_threads=readers,
        thread_name="wg",
        kernel_name="pbjax_column_sums",
    )(data)


def read(refs, me, workers: int, first=0) -> None:
    """Sums blocks me, me + workers, ... of data; the ring's barriers are arrived[first:]."""
    data_g, sums_g, ring, arrived = refs
    layout = plgpu.Layout.WG_STRIDED((PART, LANES), 8)
    count = gemm.share(data_g.shape[0] // BLOCK, me, workers)

    def fetch(i):
        slot = lax.rem(i, jnp.int32(READER_DEPTH))
        source = data_g.at[pl.ds((me + i * workers) * BLOCK, BLOCK)]

        @pl.when(i < count)
        def _():
            plgpu.copy_gmem_to_smem(source, ring.at[slot], arrived.at[first + slot])

    def add(i, total):
        slot = lax.rem(i, jnp.int32(READER_DEPTH))
        plgpu.barrier_wait(arrived.at[first + slot])
        values = [
            plgpu.load(ring.at[slot, pl.ds(part, PART)], layout=layout)
            for part in range(0, BLOCK, PART)
        ]
        plgpu.commit_smem()  # The slot has been read before TMA writes it again.
        fetch(i + READER_DEPTH)
        for value in values:  # Only now: the next block is on its way.
            total += value.astype(jnp.float32)
        return total

    for i in range(READER_DEPTH):
        fetch(jnp.int32(i))
    zero = plgpu.layout_cast(jnp.zeros((PART, LANES), jnp.float32), layout)
    sums_g[me] = lax.fori_loop(0, count, add, zero)


def _check_data(data) -> None:
    if data.shape[0] % BLOCK or data.shape[1] != LANES:
        raise NotImplementedError(
            f"column_sums(data: {data.shape}): blocks of {BLOCK} rows of {LANES} values are "
            "streamed; reshape the data, or use implementation='xla'"
        )
    if data.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(
            f"column_sums(data: {data.dtype}): bfloat16 and float16 are streamed; cast, or use "
            "implementation='xla'"
        )
