"""Rules for slices, gathers and scatters, and for the numbers of rows that index them.

Reading or writing at positions along the batch is allowed in one form: each row at its own number,
as in x[jnp.arange(B), pos]. So the numbers are followed from iota through the steps by which
jax.numpy makes index vectors of them, and any other use of a row number, or of the batch size as a
number, is refused. The rules have the form of those in `rules`.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeGuard

import numpy as np

from pbjax.batch_axes.layout import (
    Constant,
    Content,
    Fact,
    Layout,
    Rows,
    Step,
    join,
    main_rows,
    scaling_axis,
)
from pbjax.batch_axes.rules import RULES, Located, Rule


def generate(step: Step) -> tuple[Fact, ...]:
    """Finds the facts of the outputs of an operation none of whose inputs has rows.

    Outputs whose shape does not change with the batch size are the same for all rows; only
    constants and row numbers may be made in the size of the batch.
    """
    pairs = zip(step.out_shapes, step.twin_out_shapes, strict=True)
    if all(shape == twin_shape for shape, twin_shape in pairs):
        return (None,) * len(step.operation.outputs)
    shape, twin_shape = step.out_shapes[0], step.twin_out_shapes[0]
    axis = scaling_axis(shape, twin_shape)
    primitive = step.operation.primitive
    if axis is None or primitive not in ("broadcast_in_dim", "tile", "iota", "empty", "empty2"):
        step.refuse(
            f"makes shape {shape} from values that no row owns, at batch size {step.batch_size}"
        )
    total = shape[axis] // step.batch_size
    if primitive == "iota" and step.params["dimension"] == axis:
        if total != 1 or shape[axis] != step.batch_size:
            step.refuse(f"numbers {shape[axis]} entries through all rows, as data")
        return (Layout(rows=Rows(axis=axis), content=Content.ROW_NUMBER),)
    content = Content.UNIFORM if total > 1 and primitive != "tile" else Content.DATA
    return (Layout(rows=Rows(axis=axis, inner=total), content=content),)


def fold(step: Step) -> tuple[Fact, ...] | None:
    """Computes an operation on known scalars; None where that is not possible."""
    compute = _FOLDED.get(step.operation.primitive)
    known = [fact for fact in step.facts if isinstance(fact, Constant)]
    if compute is None or len(known) < len(step.facts):
        return None
    dtype = getattr(step.operation.equation.outvars[0].aval, "dtype", None)
    value = np.asarray(compute(*(fact.value for fact in known)))
    probe_value = np.asarray(compute(*(fact.probe_value for fact in known)))
    return (Constant(value=value.astype(dtype), probe_value=probe_value.astype(dtype)),)


_FOLDED: Mapping[str, Callable] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "lt": np.less,
    "ge": np.greater_equal,
    "select_n": lambda which, *cases: cases[int(which)],
    "convert_element_type": lambda x: x,
    "squeeze": lambda x: x,
}


def plain(step: Step, fact: Fact) -> Layout | None:
    """Returns a fact as it may enter a loop or branch, or refuses."""
    if isinstance(fact, Constant):
        if fact.varies:
            step.refuse("takes the batch size as a number")
        return None
    if special(fact):
        step.refuse("takes the numbers of the rows as data")
    return fact


def special(fact: Fact) -> bool:
    """Whether a fact is of a row number, or of a number that varies with the batch size."""
    if isinstance(fact, Constant):
        return fact.varies
    return isinstance(fact, Layout) and fact.content not in (Content.DATA, Content.UNIFORM)


def index_step(step: Step) -> tuple[Fact, ...] | None:
    """Finds the facts of outputs made of row numbers, by all index arithmetic that is allowed.

    Returns:
      None for gathers and scatters, which are left to their rules.
    """
    primitive = step.operation.primitive
    if primitive in _INDEXED:
        data = (0, 2) if len(step.facts) == 3 else (0,)
        usable = _number(step.facts[1]) or _number(step.facts[1], Content.INDICES)
        if usable and not any(special(step.facts[i]) for i in data):
            return None
    fact = _NUMBER_RULES.get(primitive, _refused)(step)
    if fact is None:
        varies = any(isinstance(f, Constant) and f.varies for f in step.facts)
        used = (
            "the batch size as a number, or an index along the batch"
            if varies
            else "the numbers of the rows as data"
        )
        step.refuse(f"uses {used}")
    return (fact,)


def _refused(step: Step) -> Fact:
    return None


def _number(fact: Fact, content: Content = Content.ROW_NUMBER) -> TypeGuard[Layout]:
    return isinstance(fact, Layout) and fact.content == content


def _is_negative(step: Step) -> Fact:
    left, right = step.facts
    zero = isinstance(right, Constant) and not right.varies and right.value == 0
    if _number(left) and zero:
        return Layout(rows=left.rows, content=Content.FALSE)
    return None


def _shift(step: Step) -> Fact:
    left, right = step.facts
    if _number(left) and isinstance(right, Constant):
        if not right.varies:
            return left if right.value == 0 else None
        if right.value == step.batch_size and right.probe_value == step.probe_size:
            return Layout(rows=left.rows, content=Content.SHIFTED_ROW_NUMBER)
    return None


def _select(step: Step) -> Fact:
    """A select by a test that is known to fail takes its first case."""
    which, first = step.facts[:2]
    return first if _number(which, Content.FALSE) and _number(first) else None


def _keep(step: Step) -> Fact:
    return step.facts[0]


def _move(rule: str) -> Callable[[Step], Fact]:
    def number_rule(step: Step) -> Fact:
        fact = step.facts[0]
        if not isinstance(fact, Layout) or fact.content == Content.INDICES:
            return None
        (rows,) = RULES[rule](step, (fact.rows,))
        return Layout(rows=rows, content=fact.content) if rows is not None else None

    return number_rule


def _index_vectors(step: Step) -> Fact:
    """A concatenation along the last axis that puts row numbers beside other indices."""
    axis = step.params["dimension"]
    rows = join(step, tuple(f.rows if isinstance(f, Layout) else None for f in step.facts))
    unusable = (Content.SHIFTED_ROW_NUMBER, Content.FALSE)
    if any(isinstance(f, Layout) and f.content in unusable for f in step.facts):
        return None
    if axis != len(step.shapes[0]) - 1 or rows.axis == axis:
        return None
    columns, offset = set(), 0
    for fact, shape in zip(step.facts, step.shapes, strict=True):
        columns |= {offset + column for column in _columns(fact, shape)}
        offset += shape[axis]
    return Layout(rows=rows, content=Content.INDICES, columns=frozenset(columns))


def _columns(fact: Fact, shape: tuple[int, ...]) -> frozenset[int]:
    """The places along the last axis that hold row numbers."""
    if _number(fact):
        return frozenset(range(shape[-1]))
    return fact.columns if _number(fact, Content.INDICES) else frozenset()


_NUMBER_RULES: Mapping[str, Callable[[Step], Fact]] = {
    "lt": _is_negative,
    "add": _shift,
    "select_n": _select,
    "convert_element_type": _keep,
    "stop_gradient": _keep,
    "copy": _keep,
    "broadcast_in_dim": _move("broadcast_in_dim"),
    "reshape": _move("reshape"),
    "squeeze": _move("squeeze"),
    "transpose": _move("transpose"),
    "concatenate": _index_vectors,
}


def _slice(step: Step, rows: Located) -> Located:
    found, params = main_rows(step, rows), step.params
    rank = len(step.shapes[0])
    starts, limits = params["start_indices"], params["limit_indices"]
    twin_starts = step.twin_params["start_indices"]
    strides = params["strides"] or (1,) * rank
    if any(starts[i] != twin_starts[i] for i in range(rank) if i != found.axis):
        step.refuse("starts at a position that changes with the batch size")
    axis = found.axis
    start, limit, stride = starts[axis], limits[axis], strides[axis]
    if stride == 1:
        segment = _segment(step, found, start, limit)
        if twin_starts[axis] * step.batch_size != start * step.probe_size:
            step.refuse("starts at a position that changes with the batch size")
        return (segment,)
    whole = start < stride and limit > found.size(step.batch_size) - stride
    if stride == found.inner and whole and start == twin_starts[axis]:
        return (Rows(axis=axis, outer=found.outer, inner=1),)
    step.refuse(f"reads one of {stride} entries along axis {axis}, the batch")


def _segment(step: Step, found: Rows, start: int, limit: int) -> Rows:
    """A part of the axis that holds whole batches."""
    batch = step.batch_size * found.inner
    if start % batch or limit % batch:
        step.refuse(f"reads only entries {start} to {limit} of axis {found.axis}, the batch")
    return Rows(axis=found.axis, outer=(limit - start) // batch, inner=found.inner)


def _split(step: Step, rows: Located) -> Located:
    found = main_rows(step, rows)
    if step.params["axis"] != found.axis:
        return step.same(found)
    stops = np.cumsum([0, *step.params["sizes"]]).tolist()
    return tuple(_segment(step, found, *ends) for ends in itertools.pairwise(stops))


def _dynamic_slice(step: Step, rows: Located) -> Located:
    found = main_rows(step, rows)
    if step.params["slice_sizes"][found.axis] != step.shapes[0][found.axis]:
        step.refuse("reads some rows of the batch only")
    return (found,)


def _dynamic_update_slice(step: Step, rows: Located) -> Located:
    if rows[0] is None or rows[1] is None:
        step.refuse("writes rows into an array that they share, or shared entries into rows")
    return (join(step, rows[:2]),)


def _gather(step: Step, rows: Located) -> Located:
    operand, indices = rows
    numbers = step.params["dimension_numbers"]
    offset = [int(axis) for axis in numbers.offset_dims]
    batch = [axis for axis in range(len(step.out_shapes[0])) if axis not in offset]
    if indices is not None:
        if indices.axis >= len(batch):
            step.refuse("takes the rows of its indices as one index vector")
        own = ("operand_batching_dims", "start_indices_batching_dims")
        if operand is None and _row_columns(step):
            step.refuse("looks up the numbers of the rows in an array that all rows share")
        if operand is None or _pairs(step, operand, indices, own, numbers.start_index_map):
            return (indices.moved(batch[indices.axis]),)
        step.refuse(f"looks up entries along axis {operand.axis}, the batch")
    found = main_rows(step, rows)
    removed = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    full = step.params["slice_sizes"][found.axis] == step.shapes[0][found.axis]
    if found.axis in (*numbers.start_index_map, *removed) or not full:
        step.refuse(f"looks up entries along axis {found.axis}, the batch")
    window = [axis for axis in range(len(step.shapes[0])) if axis not in removed]
    return (found.moved(offset[window.index(found.axis)]),)


def _row_columns(step: Step) -> frozenset[int]:
    return _columns(step.facts[1], step.shapes[1])


def _pairs(
    step: Step, operand: Rows, indices: Rows, own: tuple[str, str], index_map: Sequence
) -> bool:
    """Whether a gather or scatter takes each row of the operand by that row of the indices.

    Either the two axes are batching dimensions of each other, or the indices hold, for the
    operand's batch axis and no other, the number of the row.
    """
    numbers, columns = step.params["dimension_numbers"], _row_columns(step)
    batching, partners = (list(getattr(numbers, name)) for name in own)
    if operand.axis in batching and not columns:
        return indices == operand.moved(int(partners[batching.index(operand.axis)]))
    by_number = {int(index_map[column]) for column in columns} == {operand.axis}
    return by_number and (operand.outer, operand.inner) == (1, 1)


def _scatter(step: Step, rows: Located) -> Located:
    operand, indices, updates = main_rows(step, rows), rows[1], rows[2]
    numbers = step.params["dimension_numbers"]
    index_map = numbers.scatter_dims_to_operand_dims
    window = [int(axis) for axis in numbers.update_window_dims]
    if indices is not None:
        own = ("operand_batching_dims", "scatter_indices_batching_dims")
        places = [axis for axis in range(len(step.shapes[2])) if axis not in window]
        if not _pairs(step, operand, indices, own, index_map):
            step.refuse(f"writes to positions along axis {operand.axis}, the batch")
        expected = indices.moved(places[indices.axis])
    else:
        removed = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        if operand.axis in (*removed, *index_map):
            step.refuse(f"writes to positions along axis {operand.axis}, the batch")
        kept = [axis for axis in range(len(step.shapes[0])) if axis not in removed]
        expected = operand.moved(window[kept.index(operand.axis)])
    if updates != expected:
        step.refuse("writes updates whose rows lie elsewhere than those it writes to")
    return (operand,)


_INDEXED = frozenset(
    ("gather", "scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "scatter-sub")
)

INDEXING_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_INDEXED - {"gather"}, _scatter),
    "gather": _gather,
    "slice": _slice,
    "split": _split,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
}
