"""The callable that `optimize` returns, and how it runs calls without state.

A step that carries state runs by `decode.state`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, NoReturn, Protocol, SupportsIndex, cast, runtime_checkable

import jax
from jaxtyping import Array

from pbjax.batch_axes.inputs import refuse_lists
from pbjax.errors import InputError, InputTypeError
from pbjax.planning.plan import Plan
from pbjax.program.analysis import Analysis
from pbjax.tuning.call_arrays import (
    Dtype,
    check_alike,
    described,
    on_host,
    refuse_traced,
    repeat_last,
    run_here,
    size_of,
)
from pbjax.tuning.named_inputs import InputNames
from pbjax.tuning.report import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A batch size that a program is compiled for.

    Attributes:
      batch_size: Its rows.
      signature: Shape and dtype of each input leaf.
      program: Compiled; called as program(weights, *leaves), returns the model's output.
      pack: From leaves of the params to the weights that the program takes.
      weights: The weights of the model's own params.
    """

    batch_size: int
    signature: tuple[tuple[tuple[int, ...], Dtype], ...]
    program: Callable
    pack: Callable[[Sequence[Array]], tuple[Array, ...]]
    weights: tuple[Array, ...]


@runtime_checkable
class Runner(Protocol):
    """How an `Optimized` runs; its methods of the same names say what each of these does."""

    @property
    def buckets(self) -> tuple[int, ...]:
        """The declared batch sizes, ascending."""
        ...

    def __call__(self, *inputs: object) -> object:
        """Runs the function."""
        ...

    def apply(self, params: object, *inputs: object) -> object:
        """Runs the function with other params."""
        ...

    def hold(self, state: object) -> object:
        """Takes a state over."""
        ...

    def release(self, held: object) -> object:
        """The state as a whole again."""
        ...

    def close(self) -> None:
        """Lets go of the weights and programs."""
        ...


class Optimized:
    """A function that runs as planned; called like the function that was optimised.

    A call without state may have fewer rows than a declared batch size: they are padded, and the
    padding is cut off the outputs. Another shape or dtype is an error. Nothing is compiled after
    construction.

    A step that carries state (`optimize(..., state=)`) takes its state held on the device, in the
    pieces of its sub-batches, and returns it so; each call uses up the state that it is given:

    held = step.hold(cache)
    out = step(tokens, held)  # out.cache is held, and goes into the next call
    cache = step.release(out.cache)
    """

    def __init__(self, runner: Runner, report: Report, names: InputNames | None = None):
        """Wraps compiled programs.

        Args:
          runner: Runs them.
          report: The report, with the plan.
          names: The model's names of its inputs; they have none if None.
        """
        self._runner = runner
        self._report = report
        self._names = names or InputNames()

    def __repr__(self) -> str:
        """The model, what runs, and for which batch sizes, in a line."""
        plan = self.plan
        sizes = " of " + "+".join(map(str, plan.sizes)) if plan.decision == "split" else ""
        buckets = ", ".join(map(str, self.buckets)) or "none: closed"
        return f"<Optimized {plan.model}: {plan.decision}{sizes}, batch sizes {buckets}>"

    def __copy__(self) -> "Optimized":
        """The same programs."""
        return Optimized(self._runner, self._report, self._names)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuses to be pickled or copied deeply: programs are compiled for this process."""
        raise InputTypeError(
            f"pickle, deepcopy: {self!r} holds programs that were compiled for this process; a plan"
            " can be stored; save fast.plan, and call optimize(..., plan=) where it is needed"
        )

    @property
    def plan(self) -> Plan:
        """The plan; with several batch sizes that of the largest."""
        return self._report.plan

    @property
    def buckets(self) -> tuple[int, ...]:
        """The declared batch sizes, ascending."""
        return self._runner.buckets

    def report(self) -> Report:
        """Classes, stages, split, timetable, predicted and measured seconds; print it."""
        return self._report

    def __call__(self, *inputs: object, **named: object) -> object:
        """Runs the function.

        Args:
          *inputs: Like the example inputs; without state with at most as many rows as the largest
            declared size; with state, the state held. Arrays on other devices are moved.
          **named: Inputs by the names of the model's arguments, as in fast(**batch); a single
            dictionary of these will do too.

        Returns:
          What the function returns, with a held state in the place of the new state.

        Raises:
          InputError: The batch, a shape or a dtype is not what was planned for, or the state was
            used up, or is another step's. A state that was passed is as it was.
          InputTypeError: The inputs have another structure, or the state is not held.
        """
        if named or self._names.are_keys_of(inputs):
            inputs = self._ordered(inputs, named)
        return self._runner(*inputs)

    def _ordered(
        self, inputs: tuple[object, ...], named: Mapping[str, object]
    ) -> tuple[object, ...]:
        if named:
            return self._names.in_order("call", inputs, named)
        (by_name,) = inputs
        return self._names.in_order("call", (), cast(Mapping[str, object], by_name))

    def apply(self, params: object, *inputs: object) -> object:
        """Runs a function without state with other params of the same structure and shapes.

        The weights of the layers are stacked in every call: for a few calls, not for a hot loop.

        Args:
          params: As the model's own: the nnx state, the linen variables, () for a callable.
          *inputs: As in a call.

        Raises:
          InputError: The params have another structure, shape or dtype, the inputs do not fit, or
            the function carries state.
        """
        return self._runner.apply(params, *inputs)

    def hold(self, state: object) -> object:
        """Takes a step's state over: its arrays are used up by the next call.

        Args:
          state: Like the example's.

        Raises:
          InputTypeError: It has another structure.
          InputError: It has other shapes or dtypes, was used up, or the function carries no state.
        """
        return self._runner.hold(state)

    def release(self, held: object) -> object:
        """The state as a whole again; `held` is used up.

        Raises:
          InputTypeError: It is not held.
          InputError: It was used up, is another step's, or the function carries no state.
        """
        return self._runner.release(held)

    def close(self) -> None:
        """Lets go of the weights and programs; a later call is an error."""
        self._runner.close()


class BucketedCall:
    """Runs calls without state: one compiled program for each declared batch size.

    A smaller batch is padded through host memory to the next declared size by repeating its last
    row; where the rows of a batch depend on each other there is no padding.
    """

    def __init__(self, buckets: Mapping[int, Bucket], analysis: Analysis):
        """Wraps compiled programs.

        Args:
          buckets: Programs by batch size.
          analysis: The model; neither it nor its params are kept.
        """
        self._buckets = dict(sorted(buckets.items()))
        self._batch = batch = analysis.batch
        self._out_axes = tuple(analysis.out_axes)
        self._unsplittable = analysis.unsplittable
        params = jax.eval_shape(lambda: analysis.model.params)
        leaves, self._params_tree = jax.tree.flatten(params)
        self._params_signature = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        self._row_leaf = next(i for i, axis in enumerate(batch.axes) if axis is not None)
        self._row_axis = next(axis for axis in batch.axes if axis is not None)

    @property
    def buckets(self) -> tuple[int, ...]:
        """The declared batch sizes, ascending."""
        return tuple(self._buckets)

    def __call__(self, *inputs: object) -> object:
        """Runs the model on a batch."""
        leaves = self._leaves(inputs)
        bucket = self._buckets.get(self._num_rows(leaves))
        if bucket is None:
            return self._padded(leaves, None)
        check_alike("call: input", leaves, bucket.signature)
        return _run(bucket.program, bucket.weights, leaves)

    def apply(self, params: object, *inputs: object) -> object:
        """Runs the model on a batch with other params."""
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

    def hold(self, state: object) -> object:
        """Refuses: there is no state."""
        _refuse_state("hold")

    def release(self, held: object) -> object:
        """Refuses: there is no state."""
        _refuse_state("release")

    def close(self) -> None:
        """Lets go of the weights and programs."""
        self._buckets = {}

    def _leaves(self, inputs: tuple[object, ...]) -> list[Any]:
        leaves, tree = jax.tree.flatten(inputs)
        if tree != self._batch.tree:
            refuse_lists("call: input ", inputs)
            raise InputTypeError(
                f"call: the inputs are {tree}; {self._batch.tree} was planned for; pass inputs of "
                "the same structure as the example"
            )
        return leaves

    def _num_rows(self, leaves: Sequence[Any]) -> int:
        leaf = leaves[self._row_leaf]
        size = size_of(leaf, self._row_axis)
        if size is None:
            raise InputError(
                f"call: input {self._row_leaf} is {described(leaf)}; an array with the batch in "
                f"axis {self._row_axis} was planned for; pass inputs like the example"
            )
        return size

    def _check_rows(self, leaves: Sequence[Any], size: int) -> None:
        for index, (x, axis) in enumerate(zip(leaves, self._batch.axes, strict=True)):
            if axis is not None and size_of(x, axis) != size:
                raise InputError(
                    f"call(batch={size}): input {index} is {described(x)}; {size} rows in axis "
                    f"{axis} are needed, as in the other inputs; correct the input"
                )

    def _padded(self, leaves: Sequence[Any], params: Sequence[Array] | None) -> object:
        size = self._num_rows(leaves)
        if not self._buckets:
            raise InputError(
                f"call(batch={size}): close() has let go of the programs; calls before it are "
                "allowed; optimize again"
            )
        if self._unsplittable:
            raise InputError(
                f"call(batch={size}): the rows of a batch depend on each other "
                f"({self._unsplittable}), so a batch of another size cannot be padded; "
                f"{self.buckets[0]} rows are allowed; pass these, or optimize again with an "
                "example of that batch"
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
            else on_host(x, partial(repeat_last, axis=axis, size=bucket.batch_size))
            for x, axis in zip(leaves, self._batch.axes, strict=True)
        ]
        check_alike("call: input", padded, bucket.signature)
        weights = bucket.weights if params is None else bucket.pack(params)
        outputs, tree = jax.tree.flatten(_run(bucket.program, weights, padded))
        cut = [
            y if axis is None else on_host(y, itemgetter((slice(None),) * axis + (slice(size),)))
            for y, axis in zip(outputs, self._out_axes, strict=True)
        ]
        return jax.tree.unflatten(tree, cut)


def _refuse_state(method: str) -> NoReturn:
    raise InputError(
        f"{method}: this function carries no state; steps that were optimized with state= hold "
        "one; call it with its inputs, or optimize it again with state="
    )


def _run(program: Callable, weights: tuple[Array, ...], leaves: Sequence[Any]) -> object:
    try:
        return run_here(program, weights, *leaves)
    except TypeError:
        refuse_traced("call", leaves)
        raise
    except Exception as error:
        if type(error).__name__ != "InternalFloatingPointError":  # JAX keeps its class to itself
            raise
        raise FloatingPointError(
            f"call: the program returns {error.args[-1]}, and jax_debug_nans or jax_debug_infs is "
            "on; finite numbers are allowed then; correct the inputs, or call the model itself, "
            "which names the operation"
        ) from None
