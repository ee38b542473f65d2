"""Everything about a model that needs no measurement: graph, classes, stages, summary.

The model is traced at the whole batch and at two rows, and kernels replace the operations that
they can compute. One cutting serves every size if the graphs agree in all but shapes, and the
shapes that differ show where the batch lies. A model that mixes the rows of its batch, or differs
at two rows, is taken apart at the whole batch alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import jax
from jaxtyping import Array

from pallas_kernels.dispatch import default_implementation
from pbjax.batch_axes.inputs import BatchAxes, find_batch, inputs_at
from pbjax.batch_axes.propagation import Rows, SplitError, find_rows
from pbjax.device import Device
from pbjax.errors import FusionError, ModelError
from pbjax.fusion import FusionReport, Patterns, Selection, selection_of
from pbjax.graph.classify import Label, classify
from pbjax.graph.functional import Functional, Model, check_state, functional
from pbjax.graph.trace import Graph
from pbjax.planning.program_summary import Layers, ProgramSummary
from pbjax.program.stages import Program, build, cut, graph_fingerprint
from pbjax.program.summarize import summary
from pbjax.program.traced_model import (
    PROBE_SIZE,
    TracedModel,
    check_alike,
    make_tracer,
    outgrowing,
    prepared,
    translated,
    varying,
)
from pbjax.program.unrolling import unrolled


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """A model, taken apart.

    Attributes:
      model: The model as a function.
      batch: The place of the batch in the inputs.
      traced: The model as a graph at the whole batch; at PROBE_SIZE + 1 rows where a batch that can
        be split has fewer.
      probe: The model as a graph at PROBE_SIZE rows; `traced` itself where the batch cannot be
        split and the model is another one at that size.
      labels: Cost and class of each operation of the graph.
      scanned: Whether the block is the body of a scan that the model holds already.
      program: The graph cut into prologue, block and epilogue.
      summary: The program as plain data.
      fingerprint: Hash of the traced graph; the same at every batch size if the batch can be split.
      out_axes: Batch axis of each output; None for one that does not depend on the rows, and for
        all of them where the batch cannot be split.
      program_at: The program at any batch size of PROBE_SIZE or more; traced once each. Raises the
        SplitError where the batch cannot be split.
      traced_at: The model as a graph at any batch size, not yet cut; traced once each. Where the
        batch cannot be split it raises the SplitError at all other sizes than the batch's.
      own_weights: Prepares the weights of the graph from the model's own params, once.
      fusion: The matches of fusion.
      device: The device whose peak rates the labels are for.
      split_error: The error that says why the batch cannot be split; None if it can.
    """

    model: Functional
    batch: BatchAxes
    traced: TracedModel
    probe: TracedModel
    labels: tuple[Label, ...]
    scanned: bool
    program: Program
    summary: ProgramSummary
    fingerprint: str
    out_axes: tuple[int | None, ...]
    program_at: Callable[[int], Program]
    traced_at: Callable[[int], TracedModel]
    own_weights: Callable[[], tuple[Array, ...]]
    fusion: FusionReport
    device: Device
    split_error: SplitError | None = None

    @property
    def graph(self) -> Graph:
        """The model at the whole batch, with kernels where fusion has found some."""
        return self.traced.graph

    @property
    def source(self) -> Graph:
        """The model's own graph, which rounds as it does."""
        return self.traced.source

    @property
    def prepare(self) -> Callable[[Sequence[Array]], tuple[Array, ...]]:
        """Makes the weights of the graph from the leaves of any params of the model."""
        return self.traced.prepare

    @property
    def weights(self) -> tuple[Array, ...]:
        """The weights of the graph: the model's own params first, captured arrays last."""
        return self.own_weights()

    @property
    def fused(self) -> bool:
        """Whether kernels stand in the graph that the model does not call."""
        return bool(self.fusion.kinds) and any(not kind.left_out for kind in self.fusion.kinds)

    @property
    def unsplittable(self) -> str:
        """The operation and line for which the batch cannot be split; empty if it can be split."""
        return "" if self.split_error is None else self.split_error.found

    def require_split(self, asked: str) -> None:
        """Refuses a model whose batch cannot be split.

        Args:
          asked: The request that needs a split, such as "optimize(split=(4, 4))".

        Raises:
          SplitError: The batch cannot be split; the message names the operation and its line.
        """
        if self.split_error is not None:
            found, advice = self.split_error.found, self.split_error.advice
            raise SplitError(found, advice, asked) from self.split_error


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
      device: The device whose peak rates decide the resource classes.
      variables: The variables of an unbound linen module.
      batch_axes: One axis or None, or a tuple with one entry per input, each an axis, None, or a
        pytree of them, as in_axes of vmap.
      fuse: The patterns to replace by kernels; see `pbjax.optimize`.

    Returns:
      The analysis; nothing has been run. A model that mixes the rows of its batch, or is another
      one at another batch size, is taken apart at the whole batch, as one that cannot be split.

    Raises:
      InputError: The inputs do not have one batch size, or there is no such pattern.
      InputTypeError: An input is no array, or fuse no text.
      ModelError: The model keeps state, computes nothing, or cannot be traced.
      FusionError: Only with kernels its rows cannot be told apart, or it depends on their number.
    """
    seam = functional(model, variables)
    batch = find_batch(inputs, batch_axes)
    # State is the same whatever computes, and plain forms are traced in a third of the time.
    with translated(seam, batch.batch_size), default_implementation("xla"):
        check_state(seam, *inputs)
    shapes_at = partial(inputs_at, batch, jax.tree.leaves(inputs))
    fused_at = make_tracer(seam, shapes_at, selection_of(fuse), device, batch.batch_size)
    try:
        return _splittable(seam, batch, fused_at, device)
    except SplitError as error:
        return _unsplittable(seam, batch, fused_at, device, error)


def _splittable(
    seam: Functional, batch: BatchAxes, fused_at: Callable[[int], TracedModel], device: Device
) -> Analysis:
    """The analysis of a model whose batch can be split."""
    size = max(batch.batch_size, PROBE_SIZE + 1)
    whole, small = fused_at(size), fused_at(PROBE_SIZE)
    _check_computes(seam, whole)
    rows = _rows(seam, whole, small, size, batch)
    keep = varying(whole.graph, small.graph)

    @cache
    def traced_at(batch_size: int) -> TracedModel:
        found = fused_at(batch_size)
        if batch_size > PROBE_SIZE and batch_size != size:
            check_alike(seam, whole, found, batch_size)
        return prepared(found, keep)

    traced, probe = traced_at(size), traced_at(PROBE_SIZE)
    labels = classify(traced.graph, device)
    cutting = cut(traced.graph, labels, device, probe.graph)

    @cache
    def program_at(batch_size: int) -> Program:
        return build(traced_at(batch_size).graph, cutting)

    program, outputs = program_at(size), whole.graph.outputs
    return Analysis(
        model=seam,
        batch=batch,
        traced=traced,
        probe=probe,
        labels=labels,
        scanned=cutting.repetition.scanned,
        program=program,
        summary=summary(program, program_at(PROBE_SIZE), size),
        fingerprint=graph_fingerprint(probe.graph),
        out_axes=tuple(_axis(rows[a]) if isinstance(a, int) else None for a in outputs),
        program_at=program_at,
        traced_at=traced_at,
        own_weights=cache(partial(traced.prepare, jax.tree.leaves(seam.params))),
        fusion=traced.report(),
        device=device,
    )


def _unsplittable(
    seam: Functional,
    batch: BatchAxes,
    fused_at: Callable[[int], TracedModel],
    device: Device,
    split_error: SplitError,
) -> Analysis:
    """The analysis of a model at its whole batch alone."""
    size = batch.batch_size
    whole = fused_at(size)
    _check_computes(seam, whole)
    small = _alike(seam, whole, fused_at)
    keep = outgrowing(whole.graph) if small is None else varying(whole.graph, small.graph)
    traced = prepared(whole, keep)
    probe = None if small is None else prepared(small, keep)
    labels = classify(traced.graph, device)
    cutting = cut(traced.graph, labels, device, (probe or traced).graph)
    program = build(traced.graph, cutting)

    def traced_at(batch_size: int) -> TracedModel:
        if batch_size != size:
            raise SplitError(split_error.found, split_error.advice, f"{batch_size} of {size} rows")
        return traced

    def program_at(batch_size: int) -> Program:
        raise SplitError(split_error.found, split_error.advice)

    return Analysis(
        model=seam,
        batch=batch,
        traced=traced,
        probe=probe or traced,
        labels=labels,
        scanned=cutting.repetition.scanned,
        program=program,
        summary=summary(program, None if probe is None else build(probe.graph, cutting), size),
        fingerprint=graph_fingerprint(traced.graph),
        out_axes=(None,) * len(traced.graph.outputs),
        program_at=program_at,
        traced_at=traced_at,
        own_weights=cache(partial(traced.prepare, jax.tree.leaves(seam.params))),
        fusion=traced.report(),
        device=device,
        split_error=split_error,
    )


def _check_computes(seam: Functional, traced: TracedModel) -> None:
    if not traced.graph.operations:
        raise ModelError(
            f"{seam.name}: it computes nothing from its inputs; a model of at least one operation "
            "can be optimized; call it as it is"
        )


def _alike(
    seam: Functional, whole: TracedModel, fused_at: Callable[[int], TracedModel]
) -> TracedModel | None:
    """The model at PROBE_SIZE rows if it is the same there in all but shapes, else None."""
    try:
        small = fused_at(PROBE_SIZE)
        check_alike(seam, whole, small, PROBE_SIZE)
    except (SplitError, FusionError):
        return None
    return None if small is whole else small


def _rows(
    seam: Functional, whole: TracedModel, small: TracedModel, size: int, batch: BatchAxes
) -> tuple[Rows | None, ...]:
    """Finds the rows of the batch in every value of the graph with kernels."""
    try:
        check_alike(seam, whole, small, PROBE_SIZE)
        return find_rows(whole.graph, small.graph, size, PROBE_SIZE, batch.axes)
    except (SplitError, FusionError) as error:
        if whole.graph is whole.source:
            raise
        # A model that mixes its rows cannot be split for what it does itself.
        find_rows(whole.source, small.source, size, PROBE_SIZE, batch.axes)
        if isinstance(error, FusionError):
            raise
        raise FusionError(
            f"{seam.name}: its rows cannot be told apart with kernels: {error}; as it is they can; "
            "pass fuse='none', and please report the model"
        ) from error


def whole_batch(
    analysis: Analysis, *, plain: bool, layers: Layers = "as given"
) -> Callable[[Sequence[Array], Sequence[Array]], list[Array]]:
    """Makes the model's function from weights and leaves of inputs to leaves of outputs.

    Args:
      analysis: The model; the function takes the whole batch, and weights like the model's own.
      plain: Whether to run the model as it was given, even where fusion has put kernels into it.
      layers: "as given", or "unrolled" to write out the scan over them.
    """
    tree = jax.tree.structure(analysis.model.params)
    num_params = tree.num_leaves

    def given(weights, leaves):
        inputs = jax.tree.unflatten(analysis.batch.tree, leaves)
        params = jax.tree.unflatten(tree, weights[:num_params])
        return jax.tree.leaves(analysis.model.apply(params, *inputs))

    if layers == "as given" and (plain or not analysis.fused):
        return given
    traced = analysis.traced_at(analysis.batch.batch_size)
    if layers == "unrolled":
        traced = replace(traced, graph=unrolled(traced.graph, analysis.summary.num_blocks))
    shared = traced.shares_weights(analysis.traced)

    def fused(weights, leaves):
        read = [weights[i] for i in traced.read] if shared else traced.pack(weights[:num_params])
        return traced.run(read, leaves)

    return fused


def _axis(rows: Rows | None) -> int | None:
    return rows.axis if rows is not None else None
