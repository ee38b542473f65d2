"""Scores by difference of positions, brought to their keys in the registers of a warpgroup.

A tile's queries t and keys s meet the row of their difference in one matrix, which holds for query
t the scores of all its differences: out[t, s] = scores[t, 63 - t + s]. In WGMMA's layout a row lies
in four neighbouring lanes, so a shift by a multiple of 8 renames registers, which is a select where
the multiple depends on the warp, and the rest of the shift is an exchange between the four lanes.
Two rows that lie 8 apart are in the same lanes: they move together, rounded, in one word.
"""

import itertools
from collections.abc import Callable

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, nvvm, vector
from jax.experimental.mosaic.gpu import utils
from jaxtyping import Array, DTypeLike

from pallas_kernels.attention.tile import ROWS
from pallas_kernels.mosaic import plgpu

MATRIX = plgpu.Layout.WGMMA

type Index = mgpu.FragmentedArray | np.ndarray


def shift_words[Word](
    words: list[tuple[Word, ...]],
    thread: Index,
    select: Callable[..., Word],
    shuffle: Callable[..., Word],
) -> list[tuple[Word, ...]]:
    """Shifts the words of a thread's rows by each row's shift; MLIR values, or numpy in tests.

    Args:
      words: For each octet of columns, the thread's words of its two columns: the upper row's from
        one octet further on, and the lower row's.
      thread: Index in the warpgroup, as unsigned integers.
      select: select(condition, if_true, if_false).
      shuffle: shuffle(word, lane): the word of another lane of the warp.

    Returns:
      The words of the output, with seven octets fewer.
    """
    lane, warp = thread % 32, thread // 32
    # Octets: 2 (3 - warp), in two binary digits.
    for octets, digit in ((4, warp // 2), (2, warp % 2)):
        words = [
            tuple(map(lambda x, y, digit=digit: select(digit == 0, x, y), further, here))
            for here, further in zip(words, words[octets:], strict=False)
        ]
    # Columns: 7 - row. The pair of columns 2 l + e comes from columns 2 l + e + shift.
    shift, place = 7 - lane // 4, lane % 4
    odd = shift % 2 == 1
    swapped = [(select(odd, b, a), select(odd, a, b)) for a, b in words]
    columns = []
    for e in (0, 1):
        pairs = (shift + e) // 2
        source = lane - place + (place + pairs) % 4
        # A lane gives to the one `pairs` lanes below it, or around the corner, of the octet before.
        gives = [
            select(place >= pairs, here[e], further[e])
            for here, further in itertools.pairwise(swapped)
        ]
        columns.append([shuffle(word, source) for word in gives])
    return list(zip(*columns, strict=True))


def _shift_registers(registers: np.ndarray, dtype: ir.Type) -> np.ndarray:
    """Registers (octets, upper or lower row) of pairs of f32, rounded to dtype and shifted."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    both, pair = ir.VectorType.get((2,), f32), ir.VectorType.get((2,), dtype)

    def element(register, e):
        return vector.extract(
            register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([e])
        )

    def word(upper, lower, e):
        rows = vector.from_elements(both, [element(upper, e), element(lower, e)])
        return utils.bitcast(arith.truncf(pair, rows), i32)

    def select(condition, if_true, if_false):
        return arith.select(condition.registers.item(), if_true, if_false)

    def shuffle(word, lane):
        operands = (utils.c(0xFFFFFFFF, i32), word, lane.registers.item(), utils.c(0x1F, i32))
        return nvvm.shfl_sync(*operands, nvvm.ShflKind.idx)  # pyrefly: ignore[bad-argument-type]

    words = [
        tuple(word(further[0], here[1], e) for e in (0, 1))
        for here, further in itertools.pairwise(registers)
    ]
    index = utils.thread_idx()
    in_warpgroup = arith.remui(index, utils.c(utils.WARPGROUP_SIZE, i32))
    thread = mgpu.FragmentedArray.splat(in_warpgroup, (), is_signed=False)
    shifted = shift_words(words, thread, select, shuffle)
    out = np.empty((len(shifted), 2), dtype=object)
    for octet, columns in enumerate(shifted):
        rows = [arith.extf(both, utils.bitcast(column, pair)) for column in columns]
        for row in (0, 1):
            out[octet, row] = vector.from_elements(both, [element(x, row) for x in rows])
    return out


def by_key(parts: list[Array], dtype: DTypeLike, *, interpret: bool) -> Array:
    """Brings scores by difference to their keys, rounded to dtype on the way.

    Args:
      parts: Scores of 64 queries in f32, cut into 64 columns each.
      dtype: A dtype of two bytes.
      interpret: Whether jax's interpreter runs this; it has no registers to move.

    Returns:
      out[t, s] = scores[t, 63 - t + s], with 64 columns fewer, in f32.
    """
    num_keys = ROWS * (len(parts) - 1)
    if interpret:
        column = ROWS - 1 - jnp.arange(ROWS)[:, None] + jnp.arange(num_keys)[None]
        scores = jnp.concatenate(parts, axis=1).astype(dtype).astype(jnp.float32)
        return jnp.take_along_axis(scores, column, axis=1)
    out = plgpu.ShapeDtypeStruct((ROWS, num_keys), jnp.float32, layout=MATRIX)

    @plgpu.inline_mgpu(arg_types=(MATRIX,) * len(parts), return_type=out)
    def shift(_, *parts):
        registers = np.concatenate([x.registers.reshape(-1, 2) for x in parts])
        shifted = _shift_registers(registers, utils.dtype_to_ir_type(jnp.dtype(dtype)))
        layout = parts[0].layout
        shifted = shifted.reshape(layout.registers_shape((ROWS, num_keys)))
        return mgpu.FragmentedArray(_registers=shifted, _layout=layout, _is_signed=None)

    return shift(*parts)
