"""The callable that `optimize` hands out: one compiled program for each declared batch size."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from pbjax.errors import InputError, InputTypeError
from pbjax.planning.plan import Plan
from pbjax.program.analysis import BatchAxes
from pbjax.tuning.report import Report

type Dtype = Any  # of numpy, or one of JAX's own, as random keys have


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
    signature: tuple[tuple[tuple[int, ...], Dtype], ...]
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
        params: object,
        report: Report,
    ):
        """Wraps compiled programs.

        Args:
          buckets: By batch size.
          batch: Where the batch is in the inputs.
          out_axes: Batch axis of each output leaf, or None.
          params: The model's params, or their shapes and dtypes.
          report: What was found out on the way.
        """
        self._buckets = dict(sorted(buckets.items()))
        self._plan = next(reversed(self._buckets.values())).plan
        self._batch = batch
        self._out_axes = tuple(out_axes)
        leaves, self._params_tree = jax.tree.flatten(params)
        self._params_signature = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        self._report = report
        self._row_leaf = next(i for i, axis in enumerate(batch.axes) if axis is not None)
        self._row_axis = next(axis for axis in batch.axes if axis is not None)

    @property
    def plan(self) -> Plan:
        """The plan for the largest batch."""
        return self._plan

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
        bucket = self._buckets.get(self._num_rows(leaves))
        if bucket is None:
            return self._padded(leaves, None)
        check_alike("call: input", leaves, bucket.signature)
        return _run(bucket.program, bucket.weights, leaves)

    def apply(self, params: object, *inputs: object) -> object:
        """Runs the model with other params of the same structure, shapes and dtypes.

        The weights of the layers are stacked in every call: for a few calls, not for a hot loop.

        Args:
          params: As the model's own: the nnx state, the linen variables, () for a callable.
          *inputs: As in a call.

        Raises:
          InputError: The params have another structure, shape or dtype, or the inputs do not fit.
        """
        leaves, tree = jax.tree.flatten(params)
        if tree != self._params_tree:
            raise InputError(
                f"apply(params): the structure is {tree}; {self._params_tree} is allowed; pass "
                "params of the model that was optimized"
            )
        check_alike("apply(params): leaf", leaves, self._params_signature)
        rows = self._leaves(inputs)
        bucket = self._buckets.get(self._num_rows(rows))
        if bucket is None:
            return self._padded(rows, leaves)
        check_alike("call: input", rows, bucket.signature)
        return _run(bucket.program, bucket.pack(leaves), rows)

    def close(self) -> None:
        """Lets go of the weights and programs; a later call is an error."""
        self._buckets = {}

    def _leaves(self, inputs: tuple[object, ...]) -> list[Any]:
        leaves, tree = jax.tree.flatten(inputs)
        if tree != self._batch.tree:
            raise InputTypeError(
                f"call: the inputs are {tree}; {self._batch.tree} was planned for; pass inputs of "
                "the same structure as the example"
            )
        return leaves

    def _num_rows(self, leaves: Sequence[Any]) -> int:
        leaf = leaves[self._row_leaf]
        size = _size(leaf, self._row_axis)
        if size is None:
            raise InputError(
                f"call: input {self._row_leaf} is {_described(leaf)}; an array with the batch in "
                f"axis {self._row_axis} was planned for; pass inputs like the example"
            )
        return size

    def _check_rows(self, leaves: Sequence[Any], size: int) -> None:
        for index, (x, axis) in enumerate(zip(leaves, self._batch.axes, strict=True)):
            if axis is not None and _size(x, axis) != size:
                raise InputError(
                    f"call(batch={size}): input {index} is {_described(x)}; {size} rows in axis "
                    f"{axis} are needed, as in the other inputs; correct the input"
                )

    def _padded(self, leaves: Sequence[Any], params: Sequence[Array] | None) -> object:
        size = self._num_rows(leaves)
        if not self._buckets:
            raise InputError(
                f"call(batch={size}): close() has let go of the programs; calls before it are "
                "allowed; optimize again"
            )
        bucket = next((b for rows, b in self._buckets.items() if rows >= size), None)
        if bucket is None or size == 0:
            raise InputError(
                f"call(batch={size}): no program takes it; declared buckets are {self.buckets}; "
                "pass a batch of 1 to the largest bucket, or optimize again with an example of "
                "that batch"
            )
        refuse_traced("call", leaves)
        self._check_rows(leaves, size)
        padded = [
            x
            if axis is None
            else _on_host(x, partial(_pad, axis=axis, size=bucket.plan.batch_size))
            for x, axis in zip(leaves, self._batch.axes, strict=True)
        ]
        check_alike("call: input", padded, bucket.signature)
        weights = bucket.weights if params is None else bucket.pack(params)
        outputs, tree = jax.tree.flatten(bucket.program(weights, *padded))
        cut = [
            y if axis is None else _on_host(y, itemgetter((slice(None),) * axis + (slice(size),)))
            for y, axis in zip(outputs, self._out_axes, strict=True)
        ]
        return jax.tree.unflatten(tree, cut)


def _run(program: Callable, weights: tuple[Array, ...], leaves: Sequence[Any]) -> object:
    try:
        return program(weights, *leaves)
    except TypeError:
        refuse_traced("call", leaves)
        raise


def refuse_traced(what: str, leaves: Sequence[Any]) -> None:
    """Raises InputTypeError where an input is being traced."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise InputTypeError(
            f"{what}: an input is being traced, as inside jax.jit, vmap or grad; a compiled "
            "program takes arrays; call it outside of them, or transform the model before "
            "optimizing it"
        )


def check_alike(
    what: str, leaves: Sequence[Any], signature: Sequence[tuple[tuple[int, ...], Dtype]]
) -> None:
    """Raises InputError unless leaves have the shapes and dtypes that were planned for."""
    for index, (leaf, (shape, dtype)) in enumerate(zip(leaves, signature, strict=True)):
        if getattr(leaf, "shape", None) != shape or not _same_dtype(leaf.dtype, dtype):
            raise InputError(
                f"{what} {index} is {_described(leaf)}; {dtype}{list(shape)} was planned for; "
                "pass that, or optimize again for the new shape"
            )


def _same_dtype(found: Dtype, planned: Dtype) -> bool:
    """Whether JAX takes one for the other: it reads 64-bit numbers of numpy as 32-bit ones."""
    as_read = partial(jax.dtypes.canonicalize_dtype, allow_extended_dtype=True)
    return found == planned or as_read(found) == planned


def _size(x: object, axis: int) -> int | None:
    """Length of an axis; None for what has no such axis."""
    shape = getattr(x, "shape", ())
    return shape[axis] if axis < len(shape) else None


def _described(x: object) -> str:
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, Array | np.ndarray) else type(x).__name__


def _on_host(x: Array | np.ndarray, change: Callable[[np.ndarray], np.ndarray]) -> Array:
    """Changes an array on the host, where no new shape has to be compiled; keys by their data."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _on_host(jax.random.key_data(x), change)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jax.device_put(change(np.asarray(x)))


def _pad(values: np.ndarray, *, axis: int, size: int) -> np.ndarray:
    """Repeats the last row."""
    missing = size - values.shape[axis]
    last = np.take(values, [-1], axis=axis)
    return np.concatenate([values, np.repeat(last, missing, axis=axis)], axis=axis)
