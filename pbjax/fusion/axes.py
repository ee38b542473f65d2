"""Labelled axes: follows each axis of a value through transpositions, reshapes and broadcasts.

An axis is a tuple of labels, major first; one of size one has none. A reshape that cuts an axis in
two cuts its label, for every value that has it. So the operands of a kernel can be followed back
through all operations on their axes, and arranged in the kernel's order.
"""

import math
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp

from pbjax.fusion.reading import Reading
from pbjax.graph.trace import Atom, Operation

type Axis = tuple[int, ...]
type Layout = tuple[Axis, ...]


def labels_of(layout: Iterable[Axis]) -> Axis:
    """All labels of a layout, in the order of its axes."""
    return tuple(label for axis in layout for label in axis)


class Axes:
    """The labels of one match, their sizes, and the parts of those that were cut."""

    def __init__(self, reading: Reading):
        """Starts without labels."""
        self.reading = reading
        self._sizes: dict[int, int] = {}
        self._parts: dict[int, tuple[int, ...]] = {}

    def new(self, size: int) -> Axis:
        """An axis of one new label."""
        if size == 1:
            return ()
        self._sizes[len(self._sizes)] = size
        return (len(self._sizes) - 1,)

    def label(self, shape: Sequence[int]) -> Layout:
        """A new label for each axis."""
        return tuple(map(self.new, shape))

    def size(self, labels: Axis) -> int:
        """The product of the labels' sizes."""
        return math.prod(self._sizes[i] for i in labels)

    def cut(self, labels: Axis) -> Axis:
        """The labels with those that were cut replaced by their parts."""
        return tuple(
            part
            for i in labels
            for part in (self.cut(self._parts[i]) if i in self._parts else (i,))
        )

    def current(self, layout: Layout) -> Layout:
        """`cut` for every axis."""
        return tuple(map(self.cut, layout))

    def siblings(self, a: int, b: int) -> bool:
        """Whether two labels are parts of a label that a reshape has cut."""
        return any({a, b} <= set(self.cut(parts)) for parts in self._parts.values())

    def regroup(self, layout: Layout, shape: Sequence[int]) -> Layout | None:
        """The layout after a reshape; None where new axes do not nest in old ones."""
        labels = list(self.cut(labels_of(layout)))[::-1]
        axes: list[Axis] = []
        for size in shape:
            axis: list[int] = []
            while (missing := size // self.size(tuple(axis))) > 1:
                if not labels or not self._fits(labels, missing):
                    return None
                axis.append(labels.pop())
            axes.append(tuple(axis))
        return None if labels else tuple(axes)

    def _fits(self, labels: list[int], missing: int) -> bool:
        """Whether the last label, cut if need be, divides the missing size of an axis."""
        size = self._sizes[labels[-1]]
        if missing % size == 0:
            return True
        if size % missing:
            return False
        label = labels.pop()
        parts = (*self.new(missing), *self.new(size // missing))
        self._parts[label] = parts
        labels.extend(parts[::-1])
        return True

    def aligned(self, layout: Layout, atom: Atom) -> Layout:
        """The layout of an operand of an elementwise operation, from that of its result."""
        shape = self.reading.shape(atom)
        if not shape:
            return ()
        return tuple(() if n == 1 else axis for axis, n in zip(layout, shape, strict=True))

    def pull(self, atom: Atom, layout: Layout, *, narrowing: bool = False) -> tuple[Atom, Layout]:
        """Follows a value back through casts and views to the first operation that computes.

        Args:
          atom: The value.
          layout: Its layout.
          narrowing: Whether to follow it through casts to a narrower float, too.

        Returns:
          The value and its layout, without the axes that were broadcast.
        """
        reading = self.reading
        while True:
            atom = reading.uncast(atom, widened=not narrowing)
            operation = reading.maker(atom)
            if operation is None or len(operation.inputs) != 1:
                return atom, self.current(layout)
            before = operation.inputs[0]
            found = self._before(operation, layout, reading.shape(before))
            if found is None:
                return atom, self.current(layout)
            atom, layout = before, found

    def _before(self, operation, layout: Layout, shape: tuple[int, ...]) -> Layout | None:
        params = operation.params
        match operation.primitive:
            case "transpose":
                places = [int(i) for i in params["permutation"]]
                return tuple(layout[places.index(i)] for i in range(len(shape)))
            case "broadcast_in_dim":
                places = [int(i) for i in params["broadcast_dimensions"]]
                return tuple(
                    () if n == 1 else layout[i] for n, i in zip(shape, places, strict=True)
                )
            case "squeeze":
                axes = iter(layout)
                gone = {int(i) for i in params["dimensions"]}
                return tuple(() if i in gone else next(axes) for i in range(len(shape)))
            case "reshape":
                return self.regroup(layout, shape)
            case _:
                return None

    def arrange(self, x: jax.Array, layout: Layout, wanted: Layout) -> jax.Array:
        """Brings an array from one layout to another; missing labels are broadcast."""
        layout, wanted = self.current(layout), self.current(wanted)
        if layout == wanted:
            return x
        have, want = labels_of(layout), labels_of(wanted)
        order = [i for i in want if i in have]
        x = _reshaped(x, [self.size((i,)) for i in have])
        if order != list(have):
            x = jnp.transpose(x, [have.index(i) for i in order])
        if order != list(want):
            places = [want.index(i) for i in order]
            x = jax.lax.broadcast_in_dim(x, [self.size((i,)) for i in want], places)
        return _reshaped(x, [self.size(axis) for axis in wanted])


def _reshaped(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    return x if x.shape == tuple(shape) else jnp.reshape(x, shape)


def contract(axes: Axes, operation: Operation, result: Layout) -> tuple[Layout, Layout]:
    """The layouts of the two operands of a dot_general, from that of its result.

    Contracted axes get new labels.
    """
    shape = axes.reading.shape(operation.inputs[0])
    ranks = [len(axes.reading.shape(atom)) for atom in operation.inputs]
    over, batch = operation.params["dimension_numbers"]
    found: list[dict[int, Axis]] = [{}, {}]
    places = iter(result)
    for i, j in zip(*batch, strict=True):
        found[0][i] = found[1][j] = next(places)
    for i, j in zip(*over, strict=True):
        found[0][i] = found[1][j] = axes.new(int(shape[i]))
    for layout, rank in zip(found, ranks, strict=True):
        for i in range(rank):
            if i not in layout:
                layout[i] = next(places)
    first, second = (
        tuple(layout[i] for i in range(rank)) for layout, rank in zip(found, ranks, strict=True)
    )
    return first, second
