"""Turns the masks and biases of attention's scores into options of the kernel.

Masks and biases that depend on no input are computed and compared, however they were written:
causal, windowed, ALiBi. A comparison of key positions with one number for each sequence gives key
lengths. The rest becomes a bias, exact but read from memory: one number for each key where it
depends on neither queries nor heads, as for padding, else of full size.
"""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pbjax.fusion.axes import Axes, Axis, Layout, labels_of
from pbjax.fusion.constants import Known, known
from pbjax.fusion.reading import Reading
from pbjax.graph.trace import Atom

# A number in a mask up to this one hides a key; exp of it is 0 in f32 by a wide margin.
NEVER = -1e4
# The number that hides a key in a bias: a score added to it is lost to rounding, as with the lowest
# finite number, and it is finite in bfloat16.
HIDDEN = -1e30
# The lowest number for a key that the kernel does not take as hidden.
LOWEST = -1e29
_FLIPPED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}
_NEGATED = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A mask, or a bias that hides keys.

    Attributes:
      value: The mask or bias.
      layout: Its layout.
      visible: Value of a mask where a key counts.
      factor: Factor of a bias, which hides a key where the product is at most NEVER. None for a
        mask.
    """

    value: Atom
    layout: Layout
    visible: bool = True
    factor: float | None = None

    def counts(self, array):
        """Whether keys count, from the value's array."""
        if self.factor is None:
            return (array != 0) == self.visible
        return array * self.factor > NEVER


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """factor * value, or cap * tanh(factor / cap * value), added to the scores."""

    value: Atom
    layout: Layout
    factor: float
    cap: float | None = None


@dataclass(slots=True, kw_only=True)
class VisibleKeys:
    """The keys that count, as options of the kernel.

    Attributes:
      queries: The label of the queries in constant masks; None if they have none.
      causal: Whether a query sees keys up to its own position.
      start: Position of the first query.
      window: How many keys a query sees up to its own; None = all.
      lengths: The number of keys for each sequence, its layout, and a number to add to it.
      parts: The remaining masks.
      terms: The remaining biases.
    """

    queries: int | None = None
    causal: bool = False
    start: int = 0
    window: int | None = None
    lengths: tuple[Atom, Layout, int] | None = None
    parts: list[Part] = field(default_factory=list)
    terms: list[Term] = field(default_factory=list)

    @property
    def remaining(self) -> tuple[Term | Part, ...]:
        """The remaining biases and masks."""
        return (*self.terms, *self.parts)


def read_keys(
    axes: Axes, parts: Sequence[Part], terms: Sequence[Term], keys: Axis, shared: Axis
) -> VisibleKeys:
    """Sorts masks and biases into those with an option of the kernel, and the others.

    Args:
      axes: The labels of the match.
      parts: Masks.
      terms: Biases.
      keys: The labels of the keys.
      shared: All labels of keys and values, such as a batch: none of them is a position of a query.
    """
    found = VisibleKeys()
    alone = [a for part in parts for a in _conjuncts(axes, part)]
    for term in terms:
        hides, biases = _roles(axes, term)
        if hides:
            alone.append(Part(value=term.value, layout=term.layout, factor=term.factor))
        if biases:
            found.terms.append(term)
    tables = []
    for part in alone:
        table = _table(axes, part, keys)
        if table is not None:
            tables.append((part, *table))
        elif not _read_lengths(axes, part, keys, found):
            found.parts.append(part)
    tables = [(part, label, table) for part, label, table in tables if not table.all()]
    others = [x for x in tables if x[1] in axes.cut(shared)]
    found.parts += [part for part, _, _ in others]
    tables = [x for x in tables if x[1] not in axes.cut(shared)]
    # If they are no band together, one of them may be, and the others become a bias.
    for chosen in (tables, *([one] for one in tables)):
        if chosen and _read_band(axes, chosen, keys, found):
            tables = [x for x in tables if x not in chosen]
            break
    found.parts += [part for part, _, _ in tables]
    return found


def _conjuncts(axes: Axes, part: Part) -> list[Part]:
    value, layout = axes.pull(part.value, part.layout)
    reading = axes.reading
    name = reading.primitive(value)
    if part.factor is not None:
        return [part]
    if name == "convert_element_type" or (name == "ne" and _is_zero(reading, value)):
        inner = reading.operation(value).inputs[0]
        return _conjuncts(axes, Part(value=inner, layout=layout, visible=part.visible))
    if name == "not":
        (inner,) = reading.operation(value).inputs
        return _conjuncts(axes, Part(value=inner, layout=layout, visible=not part.visible))
    if name != ("and" if part.visible else "or"):
        return [Part(value=value, layout=layout, visible=part.visible)]
    return [
        conjunct
        for inner in reading.operation(value).inputs
        for conjunct in _conjuncts(
            axes, Part(value=inner, layout=axes.aligned(layout, inner), visible=part.visible)
        )
    ]


def _is_zero(reading: Reading, value: Atom) -> bool:
    """Whether a comparison is with zero and has the shape of its first operand."""
    first, second = reading.operation(value).inputs
    return reading.scalar(second) == 0.0 and reading.shape(first) == reading.shape(value)


def _roles(axes: Axes, term: Term) -> tuple[bool, bool]:
    """Whether a term is known to hide keys, and whether it does anything else."""
    value = known(axes, term.value, term.layout)
    if value is None:
        return False, True
    numbers = value.array.astype(np.float32) * term.factor
    hidden = numbers <= NEVER
    return bool(hidden.any()), not np.all(hidden | (numbers == 0))


def _table(axes: Axes, part: Part, keys: Axis) -> tuple[int | None, np.ndarray] | None:
    """A constant mask as (label of the queries, table of queries and the keys they see)."""
    value = known(axes, part.value, part.layout)
    if value is None:
        return None
    value = Known(np.asarray(part.counts(value.array)), value.labels).varying()
    queries = [label for label in value.labels if label not in axes.cut(keys)]
    if len(queries) > 1:
        return None
    table = value.over((*queries, *axes.cut(keys)))
    if table is None:
        return None
    return (queries[0], table) if queries else (None, table[None])


def _read_band(axes: Axes, tables: Sequence, keys: Axis, found: VisibleKeys) -> bool:
    """Whether constant masks together are causal or windowed; if so, sets these options."""
    labels = {label for _, label, _ in tables}
    if len(labels) != 1 or None in labels:
        return False
    (label,) = labels
    table = np.logical_and.reduce(np.broadcast_arrays(*(table for _, _, table in tables)))
    if table.shape != (axes.size((label,)), axes.size(axes.cut(keys))):
        return False
    band = _band(table)
    if band is not None:
        found.queries, found.causal = label, True
        found.start, found.window = band
    return band is not None


def _band(table: np.ndarray) -> tuple[int, int | None] | None:
    """(Position of query 0, window) of a table of queries and the keys they see; None if none."""
    row, column = np.indices(table.shape)
    start = int(table[0].sum()) - 1
    if start < 0:
        return None
    behind = start + row - column
    if np.array_equal(table, behind >= 0):
        return start, None
    window = int(table[-1].sum())
    if start == 0 and window and np.array_equal(table, (behind >= 0) & (behind < window)):
        return 0, window
    return None


def _read_lengths(axes: Axes, part: Part, keys: Axis, found: VisibleKeys) -> bool:
    """Whether a mask compares the positions of keys with a number for each sequence; sets it."""
    reading = axes.reading
    operation = reading.maker(part.value)
    if operation is None or operation.primitive not in _FLIPPED or found.lengths is not None:
        return False
    name = operation.primitive if part.visible else _NEGATED[operation.primitive]
    sides = [axes.pull(a, axes.aligned(part.layout, a)) for a in operation.inputs]
    if _is_position(axes, *sides[1], keys):
        name, sides = _FLIPPED[name], sides[::-1]
    (position, at), (length, layout) = sides
    if name not in ("lt", "le") or not _is_position(axes, position, at, keys):
        return False
    labels = set(axes.cut(labels_of(layout)))
    integer = jnp.issubdtype(reading.dtype(length), jnp.integer)
    if labels & set(axes.cut(keys)) or not integer or reading.is_weight(length):
        return False
    found.lengths = (length, layout, int(name == "le"))
    return True


def _is_position(axes: Axes, atom: Atom, layout: Layout, keys: Axis) -> bool:
    value = known(axes, atom, layout)
    if value is None or value.labels != axes.cut(keys):
        return False
    return np.array_equal(value.array.reshape(-1), np.arange(axes.size(value.labels)))


def read_slopes(axes: Axes, term: Term, order: Layout, *, causal: bool) -> np.ndarray | None:
    """The slope of each head, if a constant bias is ALiBi's up to a number for each query.

    A number that all keys of a query share does not change a softmax: slope * (j - i) and slope * j
    are equal to it.

    Args:
      axes: The labels of the match.
      term: The bias.
      order: Labels of heads, of queries, of keys.
      causal: Whether only keys up to the query count.

    Source: Press et al. 2022, section 3.
    """
    value = known(axes, term.value, term.layout)
    heads, queries, keys = map(axes.size, order)
    table = None if value is None else value.over(labels_of(order))
    if table is None or queries != keys or keys < 2:
        return None
    full = [axes.size((label,)) for label in labels_of(order)]
    table = np.broadcast_to(table.astype(np.float32), full).reshape(heads, queries, keys)
    table = term.factor * table
    row, column = np.indices((queries, keys))
    visible = np.broadcast_to((column <= row) | (not causal), table.shape)
    if np.any(table[visible] <= NEVER):
        return None
    table = np.where(visible, table, 0.0) - np.diagonal(table, axis1=1, axis2=2)[:, :, None]
    slopes = -table[:, -1, 0] / (keys - 1)
    expected = -slopes[:, None, None] * np.abs(row - column)
    same = np.abs(table - expected) <= 1e-5 * np.abs(table[visible]).max(initial=0.0)
    return slopes if np.all(slopes >= 0) and np.all(same | ~visible) else None


def by_key(axes: Axes, keys: VisibleKeys, batch: Axis, positions: Axis) -> tuple[bool, ...]:
    """Whether each of the remaining biases and masks goes into a number for each key.

    It does if it depends on neither queries nor heads, unless a bias of full size is needed for
    each sequence in any case, which then includes it.

    Args:
      axes: The labels of the match.
      keys: The keys with the remaining biases and masks.
      batch: The labels of the sequences.
      positions: The labels of the keys.
    """
    labels = [set(axes.cut(labels_of(x.layout))) for x in keys.remaining]
    alone = tuple(found <= {*batch, *positions} for found in labels)
    full = set().union(*(x for x, of_key in zip(labels, alone, strict=True) if not of_key))
    return tuple(of_key and not full & set(batch) for of_key in alone)


def key_bias(axes: Axes, given: Sequence[tuple[Term | Part, Array]], wanted: Layout) -> Array:
    """Masks and biases as one number for each key of each sequence; -inf hides a key.

    A key is hidden if its number lies far below that of another key of its sequence. So if a model
    hides all keys of a sequence, they count alike, as they do in the model.

    Args:
      axes: The labels of the match.
      given: Masks and biases with their arrays.
      wanted: The layout (B, S).
    """
    total = jnp.maximum(_added(axes, given, wanted), LOWEST)
    highest = jnp.max(total, axis=1, keepdims=True)
    return jnp.where(total >= highest + NEVER, total, -jnp.inf)


def full_bias(
    axes: Axes, given: Sequence[tuple[Term | Part, Array]], wanted: Layout, dtype
) -> Array:
    """Masks and biases as one bias in the layout of the kernel.

    Args:
      axes: The labels of the match.
      given: Masks and biases with their arrays.
      wanted: The layout (B, N, T, S).
      dtype: Dtype of the queries.
    """
    labels = {i for x, _ in given for i in labels_of(axes.current(x.layout))}
    if not labels & set(wanted[0]):
        wanted = ((), *wanted[1:])
    lowest = max(HIDDEN, float(jnp.finfo(dtype).min) / 2)
    return jnp.maximum(_added(axes, given, wanted), lowest).astype(dtype)


def _added(axes: Axes, given: Sequence[tuple[Term | Part, Array]], wanted: Layout) -> Array:
    """The sum of masks and biases in f32."""

    def one(x: Term | Part, array: Array) -> Array:
        array = axes.arrange(array, x.layout, wanted)
        if isinstance(x, Term):
            return array.astype(jnp.float32) * x.factor
        return jnp.where(x.counts(array), jnp.float32(0.0), HIDDEN)

    return functools.reduce(operator.add, (one(x, array) for x, array in given))
