"""Facts about lists of operations: when two are equal, and how many bytes live between them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from pallas_kernels.operation import PRIMITIVE as KERNEL
from pbjax.graph.trace import Atom, Aval, Operation


def signature(operation: Operation, avals: Sequence[Aval]) -> tuple[object, ...]:
    """Everything that makes two operations equal: primitive, parameters, shapes, dtypes, literals.

    A kernel of ours is known by its name and its arguments. How it computes is left out, so that a
    measured table stays valid when a kernel gets another option.
    """
    operands = tuple(
        f"literal {np.asarray(a.val)!r}" if isinstance(a, Literal) else _shape(avals[a])
        for a in operation.inputs
    )
    results = tuple(_shape(avals[i]) for i in operation.outputs)
    return operation.primitive, _parameters(operation), operands, results


def _parameters(operation: Operation) -> tuple[tuple[str, str], ...]:
    params: Mapping[str, Any] = operation.params
    if operation.primitive == KERNEL and params["arguments"]:
        given = {name: value for name, value in params["arguments"] if value is not None}
        return ("name", params["name"]), ("arguments", str(given))
    return tuple((name, str(value)) for name, value in sorted(params.items()))


def _shape(aval: Aval) -> str:
    return f"{aval.dtype}{tuple(aval.shape)}"


def live_bytes(
    operations: Sequence[Operation],
    avals: Sequence[Aval],
    outputs: Sequence[Atom],
) -> list[int]:
    """Bytes of values written before and read after each position between operations.

    Weights and inputs, which no operation writes, are always there and do not count.

    Args:
      operations: Operations in program order.
      avals: Shape and dtype of the values.
      outputs: Values read after the last operation.

    Returns:
      The bytes at each position, 0 .. len(operations).
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
    return math.prod(aval.shape) * aval.dtype.itemsize
