"""Depthwise convolution over time on Hopper: CUDA cores, frames streamed by TMA.

A warpgroup holds two features a thread, their weights in registers, and walks over time: 16 frames
of output are summed at once from the frames that they see, so that a frame is read from shared
memory once for all of them. A ring of chunks of 16 frames runs ahead, over the ends of segments. A
product and a sum are one instruction an element and weight, which is what bounds the kernel.
"""

import functools
from dataclasses import dataclass

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.gemm.activations import ACTIVATIONS, Activation
from pallas_kernels.mosaic import plgpu

CHUNK = 16  # frames that move, and are summed, at a time
FEATURES = 256  # of a warpgroup: two a thread
WARPGROUPS = 4
SEGMENT = 64  # frames of output between two starts, each of which loads what lies before again
MAX_WIDTH = 33  # the largest whose weights and sums fit into registers


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The static part of a call."""

    batch_size: int
    length: int
    features: int
    width: int
    has_offset: bool
    activation: Activation | None

    @property
    def lead(self) -> int:
        """Frames that a chunk of output sees before its own, up to whole chunks."""
        return pl.cdiv((self.width - 1) // 2, CHUNK) * CHUNK

    @property
    def unseen(self) -> int:
        """Frames of `lead` that a chunk does not need."""
        return self.lead - (self.width - 1) // 2

    @property
    def seen(self) -> int:
        """Chunks that a chunk of output sees."""
        return pl.cdiv(self.unseen + CHUNK + self.width - 1, CHUNK)

    @property
    def segments(self) -> int:
        """Segments of a sequence."""
        return pl.cdiv(self.length, SEGMENT)

    @property
    def items(self) -> int:
        """Segments of all sequences, for each group of features."""
        return self.batch_size * self.segments * (self.features // FEATURES)

    @property
    def chunks(self) -> int:
        """Chunks that a segment loads."""
        return SEGMENT // CHUNK - 1 + self.seen

    @property
    def depth(self) -> int:
        """Chunks in a ring: three on their way beside those in use."""
        return self.seen + 3


def _divmod(a: Array, b: int) -> tuple[Array, Array]:
    return lax.div(a, jnp.int32(b)), lax.rem(a, jnp.int32(b))


def _kernel_body(problem: Problem, sms: int, *refs) -> None:
    refs = list(refs)
    x_g, w_g = refs[:2]
    del refs[:2]
    offset_g = refs.pop(0) if problem.has_offset else None
    y_g, x_s, y_s, arrived = refs
    wg = lax.axis_index("wg")
    me, workers = lax.axis_index("sm") * WARPGROUPS + wg, sms * WARPGROUPS
    depth, seen, chunks = problem.depth, problem.seen, problem.chunks
    count = lax.div(problem.items - 1 - me + workers, jnp.int32(workers))

    def place(number):
        item = me + number * workers
        item, segment = _divmod(item, problem.segments)
        batch, group = _divmod(item, problem.features // FEATURES)
        return batch, segment * SEGMENT, group * FEATURES

    def fetch(index):
        """Starts the copy of the chunk that is the index-th of all that this warpgroup needs."""
        number, chunk = _divmod(index, chunks)
        slot = lax.rem(index, jnp.int32(depth))

        @pl.when(number < count)
        def _():
            batch, start, feature = place(number)
            frame = start + chunk * CHUNK - problem.lead
            # Beyond the last frame TMA reads zeros, and so before the first.
            frames = pl.ds(lax.select(frame < 0, jnp.int32(problem.length), frame), CHUNK)
            plgpu.copy_gmem_to_smem(
                x_g.at[batch, frames, pl.ds(feature, FEATURES)],
                x_s.at[wg, slot],
                arrived.at[wg * depth + slot],
            )

    def wait(index):
        plgpu.barrier_wait(arrived.at[wg * depth + lax.rem(index, jnp.int32(depth))])

    def sums(index, weights):
        """Convolves: the chunk at `index` is the first that is seen."""
        slots = [lax.rem(index + i, jnp.int32(depth)) for i in range(seen)]
        totals: dict[int, Array] = {}
        for row in range(CHUNK + problem.width - 1):
            chunk, place_in_it = divmod(row + problem.unseen, CHUNK)
            frame = x_s[wg, slots[chunk], place_in_it].astype(jnp.float32)
            for i in range(max(0, row - problem.width + 1), min(CHUNK, row + 1)):
                product = frame * weights[row - i]
                totals[i] = totals[i] + product if i in totals else product
        return totals

    def run(number, _):
        batch, start, feature = place(number)
        span = pl.ds(feature, FEATURES)
        weights = [w_g[k, span] for k in range(problem.width)]
        offset = None if offset_g is None else offset_g[span]
        first = number * chunks
        for i in range(seen - 1):
            wait(first + i)

        def advance(step, _):
            wait(first + step + seen - 1)
            totals = sums(first + step, weights)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last chunk of output has left
            for i, total in totals.items():
                total = total if offset is None else total + offset
                if problem.activation is not None:
                    total = ACTIVATIONS[problem.activation](total)
                y_s[wg, i] = total.astype(y_g.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                y_s.at[wg], y_g.at[batch, pl.ds(start + step * CHUNK, CHUNK), span]
            )
            fetch(first + step + depth)

        lax.fori_loop(0, SEGMENT // CHUNK, advance, None)
        for i in range(seen - 1):
            fetch(first + SEGMENT // CHUNK + i + depth)

    for i in range(depth):
        fetch(jnp.int32(i))
    lax.fori_loop(0, count, run, None)
    plgpu.wait_smem_to_gmem(0)


def depthwise_convolution(
    x: Float[Array, "B T D"],
    kernel: Float[Array, "width D"],
    offset: Float[Array, " D"] | None,
    *,
    activation: Activation | None,
    sms: int,
) -> Float[Array, "B T D"]:
    """Runs the kernel; arguments as in api.depthwise_convolution, checked there."""
    batch_size, length, features = x.shape
    problem = Problem(
        batch_size=batch_size,
        length=length,
        features=features,
        width=kernel.shape[0],
        has_offset=offset is not None,
        activation=activation,
    )
    sms = min(sms, pl.cdiv(problem.items, WARPGROUPS))
    operands = [x, kernel.astype(jnp.float32)]
    if offset is not None:
        operands.append(offset.astype(jnp.float32))
    return plgpu.kernel(
        functools.partial(_kernel_body, problem, sms),
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[
            plgpu.SMEM((WARPGROUPS, problem.depth, CHUNK, FEATURES), x.dtype),
            plgpu.SMEM((WARPGROUPS, CHUNK, FEATURES), x.dtype),
            plgpu.Barrier(num_barriers=WARPGROUPS * problem.depth),
        ],
        grid=(sms,),
        grid_names=("sm",),
        num_threads=WARPGROUPS,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="pbjax_depthwise",
    )(*operands)
