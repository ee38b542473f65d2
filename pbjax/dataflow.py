"""Facts about lists of operations: when two are equal, and what is alive between them."""

from collections.abc import Sequence

import numpy as np
from jax.extend.core import Literal

from pbjax.trace import Atom, Aval, Operation


def signature(operation: Operation, avals: Sequence[Aval]) -> tuple[object, ...]:
    """What makes two operations equal: primitive, parameters, shapes, dtypes and literals."""
    operands = tuple(
        f"literal {np.asarray(a.val)!r}" if isinstance(a, Literal) else _shape(avals[a])
        for a in operation.inputs
    )
    results = tuple(_shape(avals[i]) for i in operation.outputs)
    params = tuple((k, str(v)) for k, v in sorted(operation.params.items()))
    return operation.primitive, params, operands, results


def _shape(aval: Aval) -> str:
    return f"{aval.dtype}{tuple(aval.shape)}"


def live_bytes(
    operations: Sequence[Operation],
    avals: Sequence[Aval],
    outputs: Sequence[Atom],
    weights: range,
) -> list[int]:
    """Bytes of values written before and read after each position between operations.

    Args:
      operations: In program order.
      avals: Shape and dtype of the values.
      outputs: Values read after the last operation.
      weights: Values that are always there and do not count; nor does any other value that no
        operation writes.

    Returns:
      One figure for each position, 0 .. len(operations).
    """
    last = {atom: len(operations) for atom in outputs if isinstance(atom, int)}
    change = [0] * (len(operations) + 2)
    for position in range(len(operations) - 1, -1, -1):
        operation = operations[position]
        for atom in operation.inputs:
            if isinstance(atom, int):
                last.setdefault(atom, position)
        for value in operation.outputs:
            if value in last:
                size = nbytes(avals[value])
                change[position + 1] += size
                change[last[value] + 1] -= size
    return [int(total) for total in np.cumsum(change[:-1])]


def nbytes(aval: Aval) -> int:
    """Bytes of a value."""
    return int(np.prod(aval.shape, dtype=np.int64)) * aval.dtype.itemsize
