"""The callable that `optimize` hands out: one compiled program for each declared batch size."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pbjax.analysis import BatchAxes
from pbjax.errors import InputError, InputTypeError
from pbjax.plan import Plan
from pbjax.reports import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A batch size that a program is compiled for.

    Attributes:
      plan: How the batch is run.
      signature: Shape and dtype of each input leaf.
      program: Compiled; called as program(weights, *leaves), returns the model's output.
      pack: From leaves of the params to the weights that the program takes.
      weights: What pack returned for the model's own params.
    """

    plan: Plan
    signature: tuple[tuple[tuple[int, ...], np.dtype], ...]
    program: Callable
    pack: Callable[[Sequence[Array]], tuple[Array, ...]]
    weights: tuple[Array, ...]


class Optimized:
    """A model that runs as planned; called like the model.

    Batches of a declared size run as they are. A smaller one is padded through host memory to the
    next declared size by repeating its last row, and the padding is cut off the outputs; a larger
    one, or another shape or dtype, is an error. Nothing is compiled after construction.
    """

    def __init__(
        self,
        buckets: Mapping[int, Bucket],
        batch: BatchAxes,
        out_axes: Sequence[int | None],
        params_tree: jax.tree_util.PyTreeDef,
        report: Report,
    ):
        """Wraps compiled programs.

        Args:
          buckets: By batch size.
          batch: Where the batch is in the inputs.
          out_axes: Batch axis of each output leaf, or None.
          params_tree: Structure of the model's params.
          report: What was found out on the way.
        """
        self._buckets = dict(sorted(buckets.items()))
        self._batch = batch
        self._out_axes = tuple(out_axes)
        self._params_tree = params_tree
        self._report = report
        self._row_leaf = next(i for i, axis in enumerate(batch.axes) if axis is not None)
        self._row_axis = next(axis for axis in batch.axes if axis is not None)

    @property
    def plan(self) -> Plan:
        """The plan for the largest batch."""
        return next(reversed(self._buckets.values())).plan

    @property
    def buckets(self) -> tuple[int, ...]:
        """The declared batch sizes, ascending."""
        return tuple(self._buckets)

    @property
    def num_compiled(self) -> int:
        """How many programs were compiled to be called: one for each declared size."""
        return len(self._buckets)

    def report(self) -> Report:
        """Classes, stages, split, timetable, predicted and measured seconds; print it."""
        return self._report

    def __call__(self, *inputs: object) -> object:
        """Runs the model on a batch.

        Args:
          *inputs: Like the example inputs, with at most as many rows as the largest declared size.

        Returns:
          What the model returns.

        Raises:
          InputError: The batch, a shape or a dtype is not what was planned for.
        """
        leaves = self._leaves(inputs)
        bucket = self._buckets.get(leaves[self._row_leaf].shape[self._row_axis])
        if bucket is None:
            return self._padded(leaves, None)
        self._check(bucket, leaves)
        return bucket.program(bucket.weights, *leaves)

    def apply(self, params: object, *inputs: object) -> object:
        """Runs the model with other params of the same structure, shapes and dtypes.

        The weights of the layers are stacked in every call: for a few calls, not for a hot loop.

        Args:
          params: As the model's own: the nnx state, the linen variables, () for a callable.
          *inputs: As in a call.

        Raises:
          InputError: The params have another structure, or the inputs do not fit.
        """
        leaves, tree = jax.tree.flatten(params)
        if tree != self._params_tree:
            raise InputError(
                f"apply(params): the structure is {tree}; {self._params_tree} is allowed; pass "
                "params of the model that was optimized"
            )
        rows = self._leaves(inputs)
        bucket = self._buckets.get(rows[self._row_leaf].shape[self._row_axis])
        if bucket is None:
            return self._padded(rows, leaves)
        self._check(bucket, rows)
        return bucket.program(bucket.pack(leaves), *rows)

    def close(self) -> None:
        """Lets go of the weights and programs; a later call is an error."""
        self._buckets = {}

    def _leaves(self, inputs: tuple[object, ...]) -> list[Array]:
        leaves, tree = jax.tree.flatten(inputs)
        if tree != self._batch.tree:
            raise InputTypeError(
                f"call: the inputs are {tree}; {self._batch.tree} was planned for; pass inputs of "
                "the same structure as the example"
            )
        return leaves

    def _check(self, bucket: Bucket, leaves: Sequence[Array]) -> None:
        for index, (leaf, (shape, dtype)) in enumerate(zip(leaves, bucket.signature, strict=True)):
            if leaf.shape != shape or leaf.dtype != dtype:
                raise InputError(
                    f"call: input {index} is {leaf.dtype}{list(leaf.shape)}; {dtype}{list(shape)} "
                    "was planned for; pass that, or optimize again for the new shape"
                )

    def _check_rows(self, leaves: Sequence[Array], size: int) -> None:
        for index, (x, axis) in enumerate(zip(leaves, self._batch.axes, strict=True)):
            if axis is not None and x.shape[axis] != size:
                raise InputError(
                    f"call(batch={size}): input {index} has {x.shape[axis]} rows; all inputs must "
                    "have the same number; correct the input"
                )

    def _padded(self, leaves: Sequence[Array], params: Sequence[Array] | None) -> object:
        size = leaves[self._row_leaf].shape[self._row_axis]
        bucket = next((b for rows, b in self._buckets.items() if rows >= size), None)
        if bucket is None or size == 0:
            declared = f"declared buckets are {self.buckets}" if self._buckets else "it is closed"
            raise InputError(
                f"call(batch={size}): no program takes it; {declared}; pass a batch of 1 to the "
                "largest bucket, or optimize again with buckets= that include it"
            )
        self._check_rows(leaves, size)
        padded = [
            x if axis is None else jnp.asarray(_pad(x, axis, bucket.plan.batch_size))
            for x, axis in zip(leaves, self._batch.axes, strict=True)
        ]
        self._check(bucket, padded)
        weights = bucket.weights if params is None else bucket.pack(params)
        outputs, tree = jax.tree.flatten(bucket.program(weights, *padded))
        cut = [
            y
            if axis is None
            else jax.device_put(np.asarray(y)[(slice(None),) * axis + (slice(size),)])
            for y, axis in zip(outputs, self._out_axes, strict=True)
        ]
        return jax.tree.unflatten(tree, cut)


def _pad(x: Array, axis: int, size: int) -> np.ndarray:
    """Repeats the last row on the host, where no new shape has to be compiled."""
    values = np.asarray(x)
    missing = size - values.shape[axis]
    last = np.take(values, [-1], axis=axis)
    return np.concatenate([values, np.repeat(last, missing, axis=axis)], axis=axis)
