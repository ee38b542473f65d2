"""Rules for primitives that carry the rows of the batch from their inputs to their outputs.

A rule takes the step and where the rows of every input lie (None for inputs that are the same for
all rows; at least one has rows), and returns where those of every output lie, or refuses. Slices,
gathers and scatters are in `indexing`, loops and branches in `loops`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import SupportsInt

from pbjax.batch_axes.layout import Rows, Step, join, main_rows, reshaped

type Located = tuple[Rows | None, ...]
type Rule = Callable[[Step, Located], Located]

_ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil
    clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf
    erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow
    is_finite layout_constraint le le_to lgamma log log1p log2 logistic lt lt_to max min mul
    mulhi name ne neg nextafter not one_minus_square or polygamma population_count pow pvary
    random_clone random_fold_in random_gamma random_seed real reduce_precision
    regularized_incomplete_beta rem reshard round rsqrt select_n sharding_constraint shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan
    tanh threefry2x32 xor zeros_like zeta
"""

_REDUCTIONS = """
    reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor reduce
    argmax argmin
"""


def _elementwise(step: Step, rows: Located) -> Located:
    return step.same(join(step, rows))


def _passed_on(step: Step, rows: Located) -> Located:
    return rows


def _without(axis: int, removed: Sequence[SupportsInt]) -> int:
    return axis - sum(int(other) < axis for other in removed)


def _reduce(step: Step, rows: Located) -> Located:
    joined = join(step, rows)
    axes = step.params["axes"] if "axes" in step.params else step.params["dimensions"]
    if joined.axis in axes:
        step.refuse(f"reduces over axis {joined.axis}, the batch")
    return step.same(joined.moved(_without(joined.axis, axes)))


def _along(name: str, verb: str) -> Rule:
    """The rule of a primitive that works along one axis and keeps the shape of the others."""

    def rule(step: Step, rows: Located) -> Located:
        joined = join(step, rows)
        # Some primitives keep an axis that is counted from the end.
        if joined.axis == step.params[name] % len(step.shapes[0]):
            step.refuse(f"{verb} axis {joined.axis}, the batch")
        return step.same(joined)

    return rule


def _rev(step: Step, rows: Located) -> Located:
    found = main_rows(step, rows)
    if found.axis in step.params["dimensions"]:
        step.refuse(f"reverses axis {found.axis}, the batch")
    return rows


def _transpose(step: Step, rows: Located) -> Located:
    found = main_rows(step, rows)
    return (found.moved(list(step.params["permutation"]).index(found.axis)),)


def _squeeze(step: Step, rows: Located) -> Located:
    found = main_rows(step, rows)
    return (found.moved(_without(found.axis, step.params["dimensions"])),)


def _reshape(step: Step, rows: Located) -> Located:
    shape, new_shape = step.shapes[0], step.out_shapes[0]
    found = main_rows(step, rows)
    moved = reshaped(found, shape, new_shape, step.batch_size)
    if moved is None or step.params["dimensions"] is not None:
        step.refuse(f"from {shape} to {new_shape} merges the batch (axis {found.axis}) into others")
    return (moved,)


def _broadcast_in_dim(step: Step, rows: Located) -> Located:
    found = main_rows(step, rows)
    return (found.moved(int(step.params["broadcast_dimensions"][found.axis])),)


def _tile(step: Step, rows: Located) -> Located:
    found = main_rows(step, rows)
    outer = found.outer * int(step.params["reps"][found.axis])
    return (Rows(axis=found.axis, outer=outer, inner=found.inner),)


def _concatenate(step: Step, rows: Located) -> Located:
    axis = step.params["dimension"]
    found = [r for r in rows if r is not None]
    if found[0].axis != axis:
        return (join(step, rows),)
    shared = next((s for s, r in zip(step.shapes, rows, strict=True) if r is None), None)
    if shared is not None:
        step.refuse(
            f"joins rows with {shared[axis]} entries that belong to no row, along the batch"
        )
    if any(r.axis != axis or r.inner != found[0].inner for r in found):
        step.refuse("joins values whose rows lie differently, along the batch")
    return (Rows(axis=axis, outer=sum(r.outer for r in found), inner=found[0].inner),)


def _stack(step: Step, rows: Located) -> Located:
    joined = join(step, rows)
    return (joined.moved(joined.axis + (joined.axis >= step.params["axis"])),)


def _unstack(step: Step, rows: Located) -> Located:
    axis, found = step.params["axis"], main_rows(step, rows)
    if found.axis == axis:
        step.refuse(f"takes axis {axis}, the batch, apart")
    return step.same(found.moved(_without(found.axis, (axis,))))


def _pad(step: Step, rows: Located) -> Located:
    found = main_rows(step, rows)
    if tuple(step.params["padding_config"][found.axis]) != (0, 0, 0):
        step.refuse(f"pads axis {found.axis}, the batch")
    return (found,)


def _dot_general(step: Step, rows: Located) -> Located:
    contracting, batch = step.params["dimension_numbers"]
    sides = [
        _dot_side(step, r, contracting[side], batch[side], len(step.shapes[side]))
        for side, r in enumerate(rows[:2])
    ]
    num_left_free = len(step.shapes[0]) - len(contracting[0]) - len(batch[0])
    if sides[1] is not None and sides[1].axis >= len(batch[1]):
        sides[1] = sides[1].moved(sides[1].axis + num_left_free)
    if None not in sides and sides[0] != sides[1]:
        step.refuse("multiplies every row with every other row")
    return (sides[0] or sides[1],)


def _dot_side(
    step: Step,
    rows: Rows | None,
    contracting: Sequence[SupportsInt],
    batch: Sequence[SupportsInt],
    rank: int,
) -> Rows | None:
    """Finds one operand's rows among the batch axes and its own free axes of the result."""
    if rows is None:
        return None
    if rows.axis in contracting:
        step.refuse(f"sums over axis {rows.axis}, the batch")
    if rows.axis in batch:
        return rows.moved(list(batch).index(rows.axis))
    free = [axis for axis in range(rank) if axis not in contracting and axis not in batch]
    return rows.moved(len(batch) + free.index(rows.axis))


def _conv(step: Step, rows: Located) -> Located:
    numbers = step.params["dimension_numbers"]
    if rows[1] is not None:
        step.refuse("has another kernel for every row, which is not supported")
    found = main_rows(step, rows)
    if found.axis != numbers.lhs_spec[0] or step.params["batch_group_count"] != 1:
        step.refuse(f"convolves over axis {found.axis}, the batch")
    return (found.moved(numbers.out_spec[0]),)


def _window(step: Step, rows: Located) -> Located:
    joined = join(step, rows)
    axis, params = joined.axis, step.params
    plain = params["window_dimensions"][axis] == params["window_strides"][axis] == 1
    if not plain or tuple(params["padding"][axis]) != (0, 0) or params["base_dilation"][axis] != 1:
        step.refuse(f"slides a window over axis {axis}, the batch")
    return step.same(joined)


def _leading(num_inner: Callable[[Step], int], verb: str) -> Rule:
    """The rule of a primitive that works on the last axes and maps over all before them."""

    def rule(step: Step, rows: Located) -> Located:
        joined = join(step, rows)
        if any(joined.axis >= len(shape) - num_inner(step) for shape in step.shapes):
            step.refuse(f"{verb} axis {joined.axis}, the batch")
        return step.same(joined)

    return rule


def _random_bits(step: Step, rows: Located) -> Located:
    """The shape of the keys comes first in the result."""
    return rows


def _attention_call(step: Step, rows: Located) -> Located:
    """Attention of cuDNN: the batch leads in every operand, one of length 1 is shared."""
    found = main_rows(step, rows)
    if found != Rows(axis=0) or join(step, rows) != found:
        step.refuse("takes the batch as its first axis only, and finds it elsewhere")
    if step.params["dropout_rate"]:
        step.refuse("drops entries by one seed for all rows")
    return step.same(found)


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(("optimization_barrier", "device_put"), _passed_on),
    **dict.fromkeys(_REDUCTIONS.split(), _reduce),
    **dict.fromkeys(
        ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"),
        _along("axis", "accumulates along"),
    ),
    **dict.fromkeys(
        ("reduce_window_sum", "reduce_window_max", "reduce_window_min"),
        _window,
    ),
    "sort": _along("dimension", "sorts along"),
    "top_k": _along("axis", "selects along"),
    "approx_top_k": _along("reduction_dimension", "selects along"),
    "rev": _rev,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast_in_dim,
    "tile": _tile,
    "concatenate": _concatenate,
    "stack": _stack,
    "unstack": _unstack,
    "pad": _pad,
    "dot_general": _dot_general,
    "conv_general_dilated": _conv,
    "bitcast_convert_type": _elementwise,
    "fft": _leading(lambda step: len(step.params["fft_lengths"]), "transforms"),
    "random_bits": _random_bits,
    "random_split": _random_bits,
    "random_wrap": _leading(lambda step: 1, "makes keys of"),
    "random_unwrap": _elementwise,
    "dot_product_attention_fwd_wrapper": _attention_call,
}
