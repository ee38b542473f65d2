"""The facts about a value while the rows of the batch are followed through a graph.

A step is one operation, which leads from the facts of its inputs to those of its outputs. The rules
of the single primitives are in `rules` and `indexing`, those of loops in `loops`, and the walk over
the graph is in `propagation`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum, auto
from typing import Never

import numpy as np

from pbjax.errors import ModelError
from pbjax.graph.trace import Operation, describe

type Shape = tuple[int, ...]


class SplitError(ModelError):
    """The batch cannot be split: an operation mixes its rows, or needs their number.

    Attributes:
      found: The operation with its line in the model, and its fault.
      advice: The form that is allowed, and the way out.
      asked: The request that needs a split.
    """

    def __init__(self, found: str, advice: str, asked: str = "split of the batch"):
        """Takes the parts of the message."""
        super().__init__(found, advice, asked)
        self.found, self.advice, self.asked = found, advice, asked

    def __str__(self) -> str:
        """The message, in the form of all errors."""
        return f"{self.asked}: {self.found}; {self.advice}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The place of the batch's rows in a value.

    Along `axis`, index = (o * batch_size + row) * inner + i with o < outer and i < inner.

    Attributes:
      axis: The axis that the rows lie along.
      outer: Number of times that the whole batch follows itself along the axis.
      inner: Number of neighbouring indices that belong to one row.
    """

    axis: int
    outer: int = 1
    inner: int = 1

    def size(self, batch_size: int) -> int:
        """Length of the axis at a batch size."""
        return self.outer * batch_size * self.inner

    def moved(self, axis: int) -> "Rows":
        """The same rows along another axis."""
        return replace(self, axis=axis)


class Content(StrEnum):
    """The content of a value that has rows."""

    DATA = auto()
    UNIFORM = auto()
    ROW_NUMBER = auto()
    SHIFTED_ROW_NUMBER = auto()
    FALSE = auto()
    INDICES = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A value that has rows.

    Attributes:
      rows: The place of its rows.
      content: DATA depends on the row's own data. UNIFORM is constant along the axis, so that every
        factorisation of its length is right. ROW_NUMBER holds each row's number, which only
        indexing may use; SHIFTED_ROW_NUMBER is that plus the batch size and FALSE the test whether
        it is negative, as they occur where negative indices are normalised. INDICES are index
        vectors along the last axis, with row numbers in some places.
      columns: The places of the row numbers in INDICES.
    """

    rows: Rows
    content: Content = Content.DATA
    columns: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A scalar whose value is known in the graph and in the probe."""

    value: np.generic | np.ndarray
    probe_value: np.generic | np.ndarray

    @property
    def varies(self) -> bool:
        """Whether the number depends on the batch size."""
        return not np.array_equal(self.value, self.probe_value, equal_nan=True)


type Fact = Layout | Constant | None


def rows_of(fact: Fact) -> Rows | None:
    """Returns the place of a value's rows; None for a value without."""
    return fact.rows if isinstance(fact, Layout) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One operation in the graph and in the probe, with what is known of its inputs."""

    operation: Operation
    twin: Operation
    facts: tuple[Fact, ...]
    batch_size: int
    probe_size: int

    @property
    def params(self) -> Mapping:
        """The parameters of the primitive, in the graph."""
        return self.operation.params

    @property
    def twin_params(self) -> Mapping:
        """The parameters of the primitive, in the probe."""
        return self.twin.params

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Shapes of the inputs in the graph."""
        return _shapes(self.operation.equation.invars)

    @property
    def out_shapes(self) -> tuple[Shape, ...]:
        """Shapes of the outputs in the graph."""
        return _shapes(self.operation.equation.outvars)

    @property
    def twin_out_shapes(self) -> tuple[Shape, ...]:
        """Shapes of the outputs in the probe."""
        return _shapes(self.twin.equation.outvars)

    def refuse(self, found: str) -> Never:
        """Raises the SplitError that names the operation."""
        refuse(describe(self.operation), found)

    def same(self, rows: Rows | None) -> tuple[Rows | None, ...]:
        """The same rows for every output."""
        return (rows,) * len(self.operation.outputs)

    def check(self, rows: Rows | None, number: int) -> None:
        """Compares where the rows should lie in an output with its shape at both batch sizes."""
        shape, twin_shape = self.out_shapes[number], self.twin_out_shapes[number]
        if not fits(rows, shape, twin_shape, self.batch_size, self.probe_size):
            self.refuse(
                f"gives shape {shape} at batch size {self.batch_size} and {twin_shape} at "
                f"{self.probe_size}, where the rows cannot be told apart"
            )


def _shapes(atoms: Sequence) -> tuple[Shape, ...]:
    return tuple(atom.aval.shape for atom in atoms)


def refuse(what: str, found: str) -> Never:
    """Raises the error that says which operation mixes rows, and how."""
    raise SplitError(
        f"{what} {found}",
        "each row must be computed without the others; take this step out of the model, or give "
        "batch_axes=None to an input that all rows share",
    )


def fits(
    rows: Rows | None, shape: Shape, twin_shape: Shape, batch_size: int, probe_size: int
) -> bool:
    """Whether a value with these shapes at the two batch sizes can have its rows there."""
    if rows is None:
        return shape == twin_shape
    if len(shape) != len(twin_shape) or rows.axis >= len(shape):
        return False
    expected, twin_expected = list(shape), list(shape)
    expected[rows.axis] = rows.size(batch_size)
    twin_expected[rows.axis] = rows.size(probe_size)
    return shape == tuple(expected) and twin_shape == tuple(twin_expected)


def main_rows(step: Step, rows: tuple[Rows | None, ...]) -> Rows:
    """The rows of the first operand, where the others only say what to do with it."""
    if rows[0] is None:
        step.refuse("works on an array that all rows share, differently for each row")
    return rows[0]


def join(step: Step, rows: tuple[Rows | None, ...]) -> Rows:
    """The rows of a result that pairs its operands element by element; some operand has rows."""
    found = [r for r in rows if r is not None]
    if any(r != found[0] for r in found):
        step.refuse(
            "combines values whose rows lie differently "
            f"(axis {', '.join(str(r.axis) for r in found)}), so different rows meet"
        )
    return found[0]


def scaling_axis(shape: Shape, twin_shape: Shape) -> int | None:
    """The one axis whose length changes with the batch size, or None if it is not one."""
    if len(shape) != len(twin_shape):
        return None
    axes = [i for i, (a, b) in enumerate(zip(shape, twin_shape, strict=True)) if a != b]
    return axes[0] if len(axes) == 1 else None


def reshaped(rows: Rows, shape: Shape, new_shape: Shape, batch_size: int) -> Rows | None:
    """Finds the rows after a reshape; None if it merges them with other axes."""
    before = math.prod(shape[: rows.axis]) * rows.outer
    after = math.prod(shape[rows.axis + 1 :]) * rows.inner
    for axis, size in enumerate(new_shape):
        pre, post = math.prod(new_shape[:axis]), math.prod(new_shape[axis + 1 :])
        if pre and post and before % pre == 0 and after % post == 0:
            moved = Rows(axis=axis, outer=before // pre, inner=after // post)
            if moved.size(batch_size) == size:
                return moved
    return None
