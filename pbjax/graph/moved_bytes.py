"""Bytes that one traced equation reads and writes: all of its operands, or the parts it touches."""

import math
from collections.abc import Callable, Mapping

from jax.extend.core import JaxprEqn


def shape_of(atom) -> tuple[int, ...]:
    """The shape of an operand; () for what has none."""
    return tuple(getattr(atom.aval, "shape", ()))


def num_elements(atom) -> int:
    """Elements of an operand."""
    return math.prod(shape_of(atom))


def num_bytes(atom) -> int:
    """Bytes of an operand; 0 for what has no dtype."""
    return num_elements(atom) * getattr(getattr(atom.aval, "dtype", None), "itemsize", 0)


def all_bytes(equation: JaxprEqn) -> int | float:
    """Bytes of all operands and results."""
    return sum(map(num_bytes, equation.invars)) + sum(map(num_bytes, equation.outvars))


# Bytes read or written of operands that are read or written in part.


def _gather_bytes(equation: JaxprEqn) -> int | float:
    return 2 * num_bytes(equation.outvars[0]) + num_bytes(equation.invars[1])


def _scatter_bytes(equation: JaxprEqn) -> int | float:
    updates = num_bytes(equation.invars[2])
    combined = updates if equation.primitive.name != "scatter" else 0
    return 2 * updates + combined + num_bytes(equation.invars[1])


def _slice_bytes(equation: JaxprEqn) -> int | float:
    return 2 * sum(map(num_bytes, equation.outvars))


def _update_bytes(equation: JaxprEqn) -> int | float:
    return 2 * num_bytes(equation.invars[1])


SCATTERS = ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")

TOUCHED_BYTES: Mapping[str, Callable[[JaxprEqn], int | float]] = {
    "gather": _gather_bytes,
    "slice": _slice_bytes,
    "dynamic_slice": _slice_bytes,
    "dynamic_update_slice": _update_bytes,
    **dict.fromkeys(SCATTERS, _scatter_bytes),
}
