"""Constants with labelled axes: masks and biases that depend on no input, computed.

An axis along which a constant was broadcast is not computed, so that a mask costs the same to read
whatever the batch size.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from pbjax.fusion.activations import ELEMENTWISE
from pbjax.fusion.axes import Axes, Axis, Layout, labels_of
from pbjax.fusion.reading import Source
from pbjax.graph.trace import Atom

# Larger ones are not computed: ALiBi's bias of 32 heads over 2,048 tokens has as many elements.
MAX_ELEMENTS = 1 << 27


class Known(NamedTuple):
    """A constant; each of its dimensions has one label."""

    array: np.ndarray
    labels: Axis

    def over(self, labels: Axis) -> np.ndarray | None:
        """The array with its dimensions in the given order, missing ones of size one.

        None if it has other labels.
        """
        if not set(self.labels) <= set(labels):
            return None
        order = [self.labels.index(label) for label in labels if label in self.labels]
        sizes = dict(zip(self.labels, self.array.shape, strict=True))
        return self.array.transpose(order).reshape([sizes.get(label, 1) for label in labels])

    def varying(self) -> "Known":
        """The constant without the dimensions along which it does not vary."""
        array, labels = self.array, list(self.labels)
        for axis in reversed(range(array.ndim)):
            first = array.take([0], axis)
            if np.array_equal(np.broadcast_to(first, array.shape), array):
                array = first.squeeze(axis)
                del labels[axis]
        return Known(array, tuple(labels))


def known(axes: Axes, atom: Atom, layout: Layout) -> Known | None:
    """Computes a value; None if it depends on weights or inputs, or is too large.

    Args:
      axes: The labels of the match.
      atom: The value.
      layout: Its layout.
    """
    reading = axes.reading
    if reading.source(atom) != Source.CONSTANT:
        return None
    atom, layout = axes.pull(atom, layout, narrowing=True)
    operation = reading.maker(atom)
    if operation is not None and operation.primitive == "iota":
        axis = int(operation.params["dimension"])
        count = np.arange(reading.shape(atom)[axis], dtype=reading.dtype(atom))
        return _labelled(axes, count, layout[axis : axis + 1])
    if operation is not None and operation.primitive in ELEMENTWISE:
        return _elementwise(axes, operation, layout)
    value = reading.constant(atom)
    return None if value is None else _labelled(axes, value, layout)


def _labelled(axes: Axes, value: np.ndarray, layout: Layout) -> Known:
    labels = axes.cut(labels_of(layout))
    return Known(value.reshape([axes.size((label,)) for label in labels]), labels)


def _elementwise(axes: Axes, operation, layout: Layout) -> Known | None:
    operands = [known(axes, a, axes.aligned(layout, a)) for a in operation.inputs]
    present = [operand for operand in operands if operand is not None]
    found = {label for operand in present for label in operand.labels}
    labels = tuple(label for label in axes.cut(labels_of(layout)) if label in found)
    shape = [axes.size((label,)) for label in labels]
    arrays = [a for operand in present if (a := operand.over(labels)) is not None]
    if len(arrays) < len(operands) or math.prod(shape) > MAX_ELEMENTS:
        return None
    primitive = operation.equation.primitive
    given = [jnp.asarray(np.broadcast_to(array, shape)) for array in arrays]
    result = primitive.bind(*given, **primitive.get_bind_params(operation.params))
    return Known(np.asarray(result), labels)
