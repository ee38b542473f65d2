"""Where two traces of one function differ: it is then another function at another batch size."""

import numpy as np
from jax.extend.core import Literal

from pbjax.graph.trace import Atom, Graph, Operation, describe, made_by, read_by


def difference(graph: Graph, other: Graph) -> str | None:
    """Names the first place where two traces of a function differ in more than shapes.

    The values of literals may differ: jax.numpy adds the length of an axis to negative indices, and
    a mean over the batch divides by its size. `batch_axes` decides which of these a model may do.

    Returns:
      None if the graphs have the same operations on the same values.
    """
    for a, b in zip(graph.operations, other.operations, strict=False):
        if a.primitive != b.primitive:
            return f"{describe(a)} becomes {describe(b)}"
        sizes = [(len(each.inputs), len(each.outputs)) for each in (a, b)]
        if sizes[0] != sizes[1]:
            found, other_found = (
                f"{inputs} inputs and {outputs} results" for inputs, outputs in sizes
            )
            return f"{describe(a)} changes from {found} to {other_found}"
        for x, y in zip(a.inputs, b.inputs, strict=True):
            if not _same_atom(x, y):
                change = f"from {made_by(graph, x)} to {made_by(other, y)}"
                return f"an input of {describe(a)} changes {change}"
    counts = len(graph.operations), len(other.operations)
    if counts[0] != counts[1]:
        extra = max(graph, other, key=lambda each: len(each.operations)).operations[min(counts)]
        return f"{counts[0]} operations become {counts[1]}, with or without {describe(extra)}"
    for number, (x, y) in enumerate(zip(graph.outputs, other.outputs, strict=False)):
        if not _same_atom(x, y):
            return f"output {number} changes from {made_by(graph, x)} to {made_by(other, y)}"
    counts = len(graph.outputs), len(other.outputs)
    if counts[0] != counts[1]:
        longer = max(graph, other, key=lambda each: len(each.outputs))
        extra = made_by(longer, longer.outputs[min(counts)])
        return f"{counts[0]} outputs become {counts[1]}, with or without {extra}"
    return _constant_difference(graph, other)


def _counted(operation: Operation) -> str:
    return f"{len(operation.inputs)} inputs and {len(operation.outputs)} results"


def _same_atom(x: Atom, y: Atom) -> bool:
    if isinstance(x, Literal) and isinstance(y, Literal):
        return np.shape(x.val) == np.shape(y.val)
    return not isinstance(x, Literal) and not isinstance(y, Literal) and x == y


def _constant_difference(graph: Graph, other: Graph) -> str | None:
    first = graph.num_weights - len(graph.constants)
    pairs = zip(graph.constants, other.constants, strict=False)
    for value, (a, b) in enumerate(pairs, first):
        if a is not b and not np.array_equal(np.asarray(a), np.asarray(b)):
            name = f"the captured array {read_by(graph, value)}"
            if np.shape(a) == np.shape(b):
                return f"the values of {name} shape {np.shape(a)}, change"
            return f"the shape of {name} changes from {np.shape(a)} to {np.shape(b)}"
    if len(graph.constants) != len(other.constants):
        return f"{len(graph.constants)} captured arrays become {len(other.constants)}"
    return None
