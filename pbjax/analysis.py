"""Everything about a model that needs no measurement: graph, classes, stages, outline.

The model is traced at the whole batch and at two rows. That the traces agree in all but shapes
shows that one cutting serves every size; what differs in shape shows where the batch lies.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pbjax.batching import Rows, find_rows
from pbjax.classify import Label, classify
from pbjax.device import Device
from pbjax.errors import InputError, InputTypeError, ModelError, PbjaxError
from pbjax.functional import Functional, Model, check_state, functional
from pbjax.outline import Outline
from pbjax.stages import Program, build, cut, fingerprint, outline
from pbjax.trace import Graph, difference, trace

# Programs of at least this size have the operations of every larger one; of one row they may not.
PROBE_SIZE = 2

type _ArrayLike = Array | np.ndarray | jax.ShapeDtypeStruct


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAxes:
    """Where the batch is in the inputs of a call.

    Attributes:
      tree: Structure of the inputs.
      axes: Batch axis of each leaf; None for a leaf that all rows share.
      batch_size: Rows of the batch.
    """

    tree: jax.tree_util.PyTreeDef
    axes: tuple[int | None, ...]
    batch_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """A model, taken apart.

    Attributes:
      model: The model as a function.
      batch: Where the batch is in the inputs.
      graph: Traced at the whole batch.
      labels: Cost and class of each operation.
      scanned: Whether the block is the body of a scan that the model holds already.
      outline: The program as plain data.
      fingerprint: Hash of the traced graph, whatever the batch size.
      out_axes: Batch axis of each output; None for one that does not depend on the rows.
      program_at: The program at any batch size of PROBE_SIZE or more; traced once each.
      weights: Leaves of the params, then captured arrays.
      device: Whose peak rates the labels are for.
    """

    model: Functional
    batch: BatchAxes
    graph: Graph
    labels: tuple[Label, ...]
    scanned: bool
    outline: Outline
    fingerprint: str
    out_axes: tuple[int | None, ...]
    program_at: Callable[[int], Program]
    weights: tuple[Array, ...]
    device: Device


def analyse(
    model: Model,
    inputs: Sequence[object],
    *,
    device: Device,
    variables: Mapping[str, object] | None = None,
    batch_axes: object = 0,
) -> Analysis:
    """Takes a model apart.

    Args:
      model: An nnx module, a linen module or a callable.
      inputs: Example inputs of a call, or their shapes and dtypes.
      device: Whose peak rates decide the resource classes.
      variables: Of an unbound linen module.
      batch_axes: Like in_axes of vmap: one axis or None, or a tuple with one entry per input, each
        an axis, None, or a pytree of them.

    Returns:
      The analysis; nothing has been run.

    Raises:
      InputError: The inputs do not have one batch size.
      ModelError: The model mixes the rows of its batch, keeps state, or cannot be traced.
    """
    seam = functional(model, variables)
    batch = find_batch(inputs, batch_axes)
    with _translated(seam, batch.batch_size):
        check_state(seam, *inputs)
    graph_at = _tracer(seam, batch, jax.tree.leaves(inputs))
    size = max(batch.batch_size, PROBE_SIZE + 1)
    graph, probe = graph_at(size), graph_at(PROBE_SIZE)
    if not graph.operations:
        raise ModelError(
            f"{seam.name}: it computes nothing from its inputs; a model of at least one operation "
            "can be optimized; call it as it is"
        )
    rows = find_rows(graph, probe, size, PROBE_SIZE, batch.axes)
    labels = classify(graph, device)
    cutting = cut(graph, labels, device, probe)

    @cache
    def program_at(batch_size: int) -> Program:
        return build(graph_at(batch_size), cutting)

    return Analysis(
        model=seam,
        batch=batch,
        graph=graph,
        labels=labels,
        scanned=cutting.repetition.scanned,
        outline=outline(program_at(size), program_at(PROBE_SIZE), size),
        fingerprint=fingerprint(program_at(PROBE_SIZE)),
        out_axes=tuple(_axis(rows[a]) if isinstance(a, int) else None for a in graph.outputs),
        program_at=program_at,
        weights=(*jax.tree.leaves(seam.params), *map(jnp.asarray, graph.constants)),
        device=device,
    )


def find_batch(inputs: Sequence[object], batch_axes: object) -> BatchAxes:
    """Reads the batch size off the inputs.

    Raises:
      InputError: No input has a batch axis, an input lacks its axis, or sizes differ.
    """
    if not inputs:
        raise InputError(
            "optimize(model): there are no example inputs; their shapes say what to plan for; pass "
            "the inputs of a call after the model"
        )
    axes = tuple(_spread(batch_axes, tuple(inputs)))
    leaves, tree = jax.tree.flatten(tuple(inputs))
    sizes = {}
    for (path, leaf), axis in zip(
        jax.tree_util.tree_flatten_with_path(tuple(inputs))[0], axes, strict=True
    ):
        name = f"inputs{jax.tree_util.keystr(path)}"
        _check_array(name, leaf)
        if axis is not None:
            sizes[name] = _size(name, leaf, axis)
    if not sizes:
        raise InputError(
            f"optimize(batch_axes={batch_axes}): none of {len(leaves)} input arrays has a batch "
            "axis; at least one must; give it in batch_axes="
        )
    if len(set(sizes.values())) > 1 or 0 in sizes.values():
        found = ", ".join(f"{name} has {size} rows" for name, size in sizes.items())
        raise InputError(
            f"optimize(batch_axes={batch_axes}): {found}; all must have the same number of rows, "
            "one or more; correct batch_axes= (None for an input that all rows share)"
        )
    return BatchAxes(tree=tree, axes=axes, batch_size=next(iter(sizes.values())))


def _spread(batch_axes: object, inputs: tuple[object, ...]) -> list[Any]:
    """One axis for each leaf of the inputs, as it was given: not checked yet."""
    whole = batch_axes if isinstance(batch_axes, tuple) else (batch_axes,) * len(inputs)
    # Held in a leaf of its own, an axis of None differs from an input of None, which has no leaf.
    held = jax.tree.map(_Axis, whole, is_leaf=lambda axis: axis is None)
    try:
        spread = jax.tree.broadcast(held, inputs)
    except ValueError as error:
        raise InputError(
            f"optimize(batch_axes={batch_axes}): does not fit {len(inputs)} inputs; an axis, None, "
            "or one entry per input are allowed; give batch_axes= the structure of the inputs"
        ) from error
    return [leaf.axis for leaf in jax.tree.leaves(spread)]


@dataclass(frozen=True, slots=True)
class _Axis:
    axis: Any


def _check_array(name: str, leaf: object) -> None:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise InputTypeError(
            f"optimize: {name} is a {type(leaf).__name__}; inputs must be arrays or pytrees of "
            "arrays; wrap it in jnp.asarray, or bind it with functools.partial"
        )


def _size(name: str, leaf: _ArrayLike, axis: object) -> int:
    shape = leaf.shape
    if not isinstance(axis, int) or not 0 <= axis < len(shape):
        raise InputError(
            f"optimize(batch_axes={axis}): {name} has shape {tuple(shape)}; an axis from 0 to "
            f"{len(shape) - 1} or None is allowed; correct batch_axes="
        )
    return shape[axis]


def _tracer(
    seam: Functional, batch: BatchAxes, leaves: Sequence[_ArrayLike]
) -> Callable[[int], Graph]:
    """Traces the model at any batch size, and checks that it stays the same model."""
    first: list[Graph] = []

    @cache
    def graph_at(batch_size: int) -> Graph:
        # What JAX makes of a dtype: 64-bit numbers of numpy become 32-bit ones.
        as_read = partial(jax.dtypes.canonicalize_dtype, allow_extended_dtype=True)
        shapes = [
            jax.ShapeDtypeStruct(_resized(leaf.shape, axis, batch_size), as_read(leaf.dtype))
            for leaf, axis in zip(leaves, batch.axes, strict=True)
        ]
        graph = _traced(seam, jax.tree.unflatten(batch.tree, shapes), batch_size)
        first.append(graph)
        changed = difference(first[0], graph)
        if changed:
            raise ModelError(
                f"{seam.name}: at batch size {batch_size} it computes something else than at "
                f"{batch.batch_size}: {changed}; the operations must be the same at every batch "
                "size; take sizes from the inputs' shapes and do not compute with the batch size"
            )
        return graph

    return graph_at


def _traced(seam: Functional, inputs: tuple[object, ...], batch_size: int) -> Graph:
    with _translated(seam, batch_size):
        return trace(seam.apply, seam.params, *inputs)


@contextmanager
def _translated(seam: Functional, batch_size: int) -> Generator[None]:
    """Makes what a model raises when it is traced an error of ours."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if isinstance(error, PbjaxError):
            raise
        raise ModelError(
            f"{seam.name}: raises at batch size {batch_size}: {_first_line(error)}; a model must "
            "take inputs of the example's kind at every batch size, as a pure JAX function; "
            "correct the example, or what the message names in the model"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")


def _resized(shape: tuple[int, ...], axis: int | None, batch_size: int) -> tuple[int, ...]:
    return shape if axis is None else (*shape[:axis], batch_size, *shape[axis + 1 :])


def _axis(rows: Rows | None) -> int | None:
    return rows.axis if rows is not None else None
