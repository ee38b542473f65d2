"""Everything about a model that needs no measurement: graph, classes, stages, outline.

The model is traced at the whole batch and at two rows, and kernels take the place of what they can
compute. That the graphs agree in all but shapes shows that one cutting serves every size; what
differs in shape shows where the batch lies.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from pallas_kernels.dispatch import default_implementation
from pbjax.batch_axes.propagation import Rows, find_rows
from pbjax.device import Device
from pbjax.errors import FusionError, InputError, InputTypeError, ModelError
from pbjax.fusion import FusionReport, Patterns, Selection, selection_of
from pbjax.graph.classify import Label, classify
from pbjax.graph.functional import Functional, Model, check_state, functional
from pbjax.graph.trace import Graph
from pbjax.planning.program_summary import ProgramSummary
from pbjax.program.stages import Program, build, cut, fingerprint
from pbjax.program.summarize import summary
from pbjax.program.traced_model import PROBE_SIZE, TracedModel, former, translated

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
      graph: Traced at the whole batch, with kernels where fusion has found some.
      source: The model's own graph, which rounds as it does.
      labels: Cost and class of each operation.
      scanned: Whether the block is the body of a scan that the model holds already.
      summary: The program as plain data.
      fingerprint: Hash of the traced graph, whatever the batch size.
      out_axes: Batch axis of each output; None for one that does not depend on the rows.
      program_at: The program at any batch size of PROBE_SIZE or more; traced once each.
      form_at: The model as a graph at any batch size, not yet cut; traced once each.
      prepare: From the leaves of the params to the weights of the graph.
      own_weights: Prepares those of the model's own params, once.
      fusion: What fusion found.
      device: Whose peak rates the labels are for.
    """

    model: Functional
    batch: BatchAxes
    graph: Graph
    source: Graph
    labels: tuple[Label, ...]
    scanned: bool
    summary: ProgramSummary
    fingerprint: str
    out_axes: tuple[int | None, ...]
    program_at: Callable[[int], Program]
    traced_at: Callable[[int], TracedModel]
    prepare: Callable[[Sequence[Array]], tuple[Array, ...]]
    own_weights: Callable[[], tuple[Array, ...]]
    fusion: FusionReport
    device: Device

    @property
    def weights(self) -> tuple[Array, ...]:
        """The weights of the graph: the model's own params first, captured arrays last."""
        return self.own_weights()

    @property
    def fused(self) -> bool:
        """Whether kernels stand in the graph that the model does not call."""
        return bool(self.fusion.kinds) and any(not kind.left_out for kind in self.fusion.kinds)


def analyse(
    model: Model,
    inputs: Sequence[object],
    *,
    device: Device,
    variables: Mapping[str, object] | None = None,
    batch_axes: object = 0,
    fuse: Patterns | Selection = "auto",
) -> Analysis:
    """Takes a model apart.

    Args:
      model: An nnx module, a linen module or a callable.
      inputs: Example inputs of a call, or their shapes and dtypes.
      device: Whose peak rates decide the resource classes.
      variables: Of an unbound linen module.
      batch_axes: Like in_axes of vmap: one axis or None, or a tuple with one entry per input, each
        an axis, None, or a pytree of them.
      fuse: What to replace by kernels; see `pbjax.optimize`.

    Returns:
      The analysis; nothing has been run.

    Raises:
      InputError: The inputs do not have one batch size, or there is no such pattern.
      InputTypeError: An input is no array, or fuse no text.
      ModelError: The model mixes the rows of its batch, keeps state, or cannot be traced.
      FusionError: Only with kernels its rows cannot be told apart, or it depends on their number.
    """
    seam = functional(model, variables)
    batch = find_batch(inputs, batch_axes)
    # State is the same whatever computes, and plain forms are traced in a third of the time.
    with translated(seam, batch.batch_size), default_implementation("xla"):
        check_state(seam, *inputs)
    inputs_at = partial(_inputs_at, batch, jax.tree.leaves(inputs))
    size = max(batch.batch_size, PROBE_SIZE + 1)
    traced_at = former(seam, inputs_at, selection_of(fuse), device, size)
    traced = traced_at(size)
    graph, probe = traced.graph, traced_at(PROBE_SIZE).graph
    if not graph.operations:
        raise ModelError(
            f"{seam.name}: it computes nothing from its inputs; a model of at least one operation "
            "can be optimized; call it as it is"
        )
    rows = _rows(seam, traced, traced_at(PROBE_SIZE), size, batch)
    labels = classify(graph, device)
    cutting = cut(graph, labels, device, probe)

    @cache
    def program_at(batch_size: int) -> Program:
        return build(traced_at(batch_size).graph, cutting)

    return Analysis(
        model=seam,
        batch=batch,
        graph=graph,
        source=traced.source,
        labels=labels,
        scanned=cutting.repetition.scanned,
        summary=summary(program_at(size), program_at(PROBE_SIZE), size),
        fingerprint=fingerprint(program_at(PROBE_SIZE)),
        out_axes=tuple(_axis(rows[a]) if isinstance(a, int) else None for a in graph.outputs),
        program_at=program_at,
        traced_at=traced_at,
        prepare=traced.prepare,
        own_weights=cache(partial(traced.prepare, jax.tree.leaves(seam.params))),
        fusion=traced.report(),
        device=device,
    )


def _rows(
    seam: Functional, traced: TracedModel, probe: TracedModel, size: int, batch: BatchAxes
) -> tuple[Rows | None, ...]:
    """Where the rows of the batch lie in every value of the graph with kernels."""
    try:
        return find_rows(traced.graph, probe.graph, size, PROBE_SIZE, batch.axes)
    except ModelError as error:
        if traced.graph is traced.source:
            raise
        # A model that mixes its rows is refused here, for what it does itself.
        find_rows(traced.source, probe.source, size, PROBE_SIZE, batch.axes)
        raise FusionError(
            f"{seam.name}: its rows cannot be told apart with kernels: {error}; as it is they can; "
            "pass fuse='none', and please report the model"
        ) from error


def whole_batch(
    analysis: Analysis, *, plain: bool
) -> Callable[[Sequence[Array], Sequence[Array]], list[Array]]:
    """The model on the whole batch: from weights and leaves of inputs to leaves of outputs.

    Args:
      analysis: The model; the weights are as its own.
      plain: As it was given, even where fusion has put kernels into it.
    """
    tree = jax.tree.structure(analysis.model.params)
    num_params = tree.num_leaves

    def given(weights, leaves):
        inputs = jax.tree.unflatten(analysis.batch.tree, leaves)
        params = jax.tree.unflatten(tree, weights[:num_params])
        return jax.tree.leaves(analysis.model.apply(params, *inputs))

    if plain or not analysis.fused:
        return given
    traced = analysis.traced_at(analysis.batch.batch_size)
    shared = traced.shares_weights(analysis.traced_at(PROBE_SIZE))

    def fused(weights, leaves):
        read = [weights[i] for i in traced.read] if shared else traced.pack(weights[:num_params])
        return traced.run(read, leaves)

    return fused


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
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted():
        raise InputError(
            f"optimize: {name} was used up, as a state is by a call of its step; an array with "
            "values is needed; make it anew"
        )


def _size(name: str, leaf: _ArrayLike, axis: object) -> int:
    shape = leaf.shape
    if not isinstance(axis, int) or not 0 <= axis < len(shape):
        raise InputError(
            f"optimize(batch_axes={axis}): {name} has shape {tuple(shape)}; an axis from 0 to "
            f"{len(shape) - 1} or None is allowed; correct batch_axes="
        )
    return shape[axis]


def _inputs_at(
    batch: BatchAxes, leaves: Sequence[_ArrayLike], batch_size: int
) -> tuple[object, ...]:
    """Shapes of the inputs of a call with so many rows."""
    # What JAX makes of a dtype: 64-bit numbers of numpy become 32-bit ones.
    as_read = partial(jax.dtypes.canonicalize_dtype, allow_extended_dtype=True)
    shapes = [
        jax.ShapeDtypeStruct(_resized(leaf.shape, axis, batch_size), as_read(leaf.dtype))
        for leaf, axis in zip(leaves, batch.axes, strict=True)
    ]
    return jax.tree.unflatten(batch.tree, shapes)


def _resized(shape: tuple[int, ...], axis: int | None, batch_size: int) -> tuple[int, ...]:
    return shape if axis is None else (*shape[:axis], batch_size, *shape[axis + 1 :])


def _axis(rows: Rows | None) -> int | None:
    return rows.axis if rows is not None else None
