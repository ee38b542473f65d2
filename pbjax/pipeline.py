"""`optimize`: from a model to a callable that runs as planned; the order of all other modules."""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import SupportsIndex, overload

import jax
from jax import lax
from jaxtyping import Array

from pbjax.arguments import whole_number
from pbjax.decode.state import OptimizedStep
from pbjax.decode.step_pipeline import optimize_step
from pbjax.device import Device
from pbjax.errors import (
    FusionError,
    PbjaxWarning,
)
from pbjax.fusion import Patterns, Selection, selection_of
from pbjax.graph.classify import class_shares
from pbjax.graph.functional import Model
from pbjax.planning.plan import Plan
from pbjax.planning.profiling import Profile
from pbjax.planning.timetable import timetable
from pbjax.program.analysis import PROBE_SIZE, Analysis, analyse
from pbjax.runtime.compilation import PackedWeights
from pbjax.runtime.phases import Phases, Progress
from pbjax.runtime.program_cache import keep_programs
from pbjax.tuning.autotune import Contest, run_contest, verify_fusion
from pbjax.tuning.choices import Choice, device_room, forced, given_split, planned, searched
from pbjax.tuning.measured_table import measured_table
from pbjax.tuning.optimized import Bucket, Optimized
from pbjax.tuning.report import Report, SplitTimetable
from pbjax.tuning.request import (
    arrays,
    bucket_sizes,
    check_split_or_plan,
    check_step_options,
    check_types,
    checked_unroll,
    loaded,
    this_device,
)


@overload
def optimize(
    model: Model,
    *inputs: object,
    variables: Mapping[str, object] | None = None,
    batch_axes: object = 0,
    split: Sequence[SupportsIndex] | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    profile: Profile | str | os.PathLike[str] | None = None,
    device: Device | None = None,
    buckets: Sequence[SupportsIndex] | None = None,
    unroll: int | None = None,
    fuse: Patterns = "auto",
    state: None = None,
    progress: Progress | None = None,
) -> Optimized: ...


@overload
def optimize(
    model: Model,
    *inputs: object,
    variables: Mapping[str, object] | None = None,
    batch_axes: object = 0,
    split: Sequence[SupportsIndex] | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    profile: Profile | str | os.PathLike[str] | None = None,
    device: Device | None = None,
    buckets: Sequence[SupportsIndex] | None = None,
    unroll: int | None = None,
    fuse: Patterns = "auto",
    state: int,
    progress: Progress | None = None,
) -> OptimizedStep: ...


def optimize(
    model: Model,
    *inputs: object,
    variables: Mapping[str, object] | None = None,
    batch_axes: object = 0,
    split: Sequence[SupportsIndex] | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    profile: Profile | str | os.PathLike[str] | None = None,
    device: Device | None = None,
    buckets: Sequence[SupportsIndex] | None = None,
    unroll: int | None = None,
    fuse: Patterns = "auto",
    state: int | None = None,
    progress: Progress | None = None,
) -> Optimized | OptimizedStep:
    """Plans, compiles, checks and measures a model, split and unsplit, and returns the faster.

    A step that carries state, such as the decoding of a token over a KV cache, is optimised by
    `state=`: its state is split once and kept split, and what reads it runs beside the other
    sub-batch's matrix products where a kernel can do both.

    Args:
      model: An nnx module, a linen module or a JAX function. It is not changed.
      *inputs: Example inputs of a call: arrays or pytrees of arrays; their shapes, and for the
        measurements their values, are what is planned for.
      variables: What `init` of an unbound linen module returned.
      batch_axes: Like in_axes of vmap: where the batch is in the inputs; None for an input that all
        rows share.
      split: Sizes of one to three sub-batches, run even if slower; searched if None.
      plan: A saved plan, or its file: nothing is searched, and nothing measured unless it was made
        for another device or version of jax.
      profile: A measured table, or its file; the tables that ship if None. Rows that it lacks are
        measured, and saved to the file.
      device: Peak rates for the classes; those of the first device of JAX if None.
      buckets: Further, smaller batch sizes to compile a program for.
      unroll: Blocks in one step of the split program's loop; a plan brings its own. None lets 1
        compete with 2 and all of them where overlap ends at the boundary of a step.
      fuse: What to replace by kernels: "auto", all that is found, on Hopper GPUs and for models
        that call no kernels themselves, unless results are then not the model's, of which a
        `PbjaxWarning` and the report tell; "all"; "none"; names out of `pbjax.fusion.PATTERNS`, as
        a collection or joined by commas. A name after a minus leaves out a pattern, or a match as
        `.report()` names it: "all,-gemm.2".
      state: Which input is carried from call to call; the function returns its like. The callable
        is then an `OptimizedStep`. It runs as one or two sub-batches; profile, buckets and
        unroll do not apply to it.
      progress: Called as progress(phase, done, total, item).

    Returns:
      A callable with the model's signature; `.plan` and `.report()` say what was decided and why.
      An `OptimizedStep` where `state` is given.

    Raises:
      InputError: An argument has a wrong value.
      InputTypeError: An argument has a wrong type.
      ModelError: The model cannot run in sub-batches: the message names the operation.
      VerificationError: A program's outputs are not the model's, or a kernel's not those of the
        operations that it replaces.
      FileError: A plan or profile file is corrupt.
      DeviceError: The device, or a profile, is not of the kind that JAX runs on.
    """
    check_types(plan=plan, profile=profile, device=device, progress=progress)
    keep_programs()
    run = partial(
        _optimize,
        model,
        inputs,
        variables=variables,
        batch_axes=batch_axes,
        split=split,
        plan=loaded(plan),
        profile=profile,
        device=this_device(device),
        buckets=buckets,
        unroll=checked_unroll(unroll),
        state=None if state is None else whole_number("optimize(state)", state),
        progress=progress,
    )
    selection = selection_of(fuse)
    try:
        return run(fuse=selection)
    except FusionError as error:
        if not selection.auto:
            raise
        reason = f"left out, since with kernels it is not the model: {error}"
    warnings.warn(f"fusion is {reason}", PbjaxWarning, stacklevel=2)
    return run(fuse=Selection(patterns=frozenset(), reason=reason))


def _optimize(
    model: Model,
    inputs: Sequence[object],
    *,
    variables: Mapping[str, object] | None,
    batch_axes: object,
    split: Sequence[SupportsIndex] | None,
    plan: Plan | None,
    profile: Profile | str | os.PathLike[str] | None,
    device: Device,
    buckets: Sequence[SupportsIndex] | None,
    unroll: int | None,
    fuse: Selection,
    state: int | None,
    progress: Progress | None,
) -> Optimized | OptimizedStep:
    """What `optimize` does, with the matches that are asked for."""
    phases = Phases(progress)
    check_split_or_plan(split, plan)
    if state is not None:
        check_step_options(profile=profile, buckets=buckets, unroll=unroll)
    with phases.phase("analyse"):
        analysis = analyse(
            model,
            inputs,
            device=device,
            variables=variables,
            batch_axes=batch_axes,
            fuse=fuse,
        )
    if state is not None:
        return optimize_step(analysis, inputs, state, phases=phases, split=split, plan=plan)
    if plan is None:
        verify_fusion(analysis, phases)
    leaves = arrays(inputs)
    sizes = bucket_sizes(analysis.batch.batch_size, buckets, split, plan)
    choices = _choices(analysis, leaves, sizes, phases, split=split, plan=plan, profile=profile)
    weights, built = PackedWeights(analysis), {}
    for size, choice in choices.items():
        rows = _first_rows(leaves, analysis.batch.axes, size)
        built[size] = _build(analysis, weights, rows, choice, phases, unroll=unroll)
    return Optimized(
        {size: bucket for size, (bucket, _) in built.items()},
        analysis.batch,
        analysis.out_axes,
        jax.eval_shape(lambda: analysis.model.params),
        replace(built[sizes[-1]][1], phases=phases.finished()),
    )


def _choices(
    analysis: Analysis,
    leaves: Sequence[Array],
    sizes: Sequence[int],
    phases: Phases,
    *,
    split: Sequence[SupportsIndex] | None,
    plan: Plan | None,
    profile: Profile | str | os.PathLike[str] | None,
) -> dict[int, Choice]:
    """Which programs to build for each batch size."""
    if plan is not None:
        return {sizes[-1]: planned(analysis, plan)}
    wanted = None if split is None else given_split(split, sizes[-1])
    if sizes[-1] == 1:
        return {1: Choice(batch_size=1, reason="a batch of one row cannot be split")}
    room = device_room(analysis.device)
    measurements = measured_table(analysis, leaves, profile, phases)
    if wanted is not None:
        return {sizes[-1]: forced(analysis, measurements, wanted, room)}
    with phases.phase("search"):
        return {size: searched(measurements, size, room) for size in sizes}


def _first_rows(leaves: Sequence[Array], axes: Sequence[int | None], size: int) -> list[Array]:
    return [
        x if axis is None or x.shape[axis] == size else lax.slice_in_dim(x, 0, size, axis=axis)
        for x, axis in zip(leaves, axes, strict=True)
    ]


def _build(
    analysis: Analysis,
    weights: PackedWeights,
    leaves: Sequence[Array],
    choice: Choice,
    phases: Phases,
    *,
    unroll: int | None,
) -> tuple[Bucket, Report]:
    """Compiles, checks and times the programs for one batch size, and keeps the fastest."""
    contest = run_contest(analysis, weights, leaves, choice, phases, unroll=unroll)
    kept = contest.kept
    bucket = Bucket(
        plan=contest.plan,
        signature=tuple((leaf.shape, leaf.dtype) for leaf in leaves),
        program=kept.program,
        pack=kept.pack,
        weights=kept.weights,
    )
    return bucket, _report(analysis, choice, contest)


def _timetables(analysis: Analysis, contest: Contest) -> tuple[SplitTimetable, ...]:
    """Of the plan's split, then of the others that were built, but for those without staggers."""
    plan = contest.plan
    staggered = [(p.sizes, p.staggers) for p in contest.programs if any(p.staggers)]
    specs = dict.fromkeys([(plan.sizes, plan.staggers), *staggered])
    return tuple(
        SplitTimetable(sizes=sizes, timetable=timetable(analysis.summary, staggers))
        for sizes, staggers in specs
        if len(sizes) > 1
    )


def _report(analysis: Analysis, choice: Choice, contest: Contest) -> Report:
    measurements = choice.measurements
    plan = contest.plan
    return Report(
        model=analysis.model.name,
        device_kind=analysis.device.kind,
        batch_size=choice.batch_size,
        classes=class_shares(analysis.labels),
        unknown=tuple(
            sorted(
                operation.primitive
                for operation, label in zip(analysis.graph.operations, analysis.labels, strict=True)
                if not label.cost.known
            )
        ),
        operations_per_block=len(analysis.program_at(PROBE_SIZE).block.operations),
        scanned=analysis.scanned,
        summary=analysis.summary,
        profile=measurements.profile if measurements else None,
        measured_summary=measurements.relabelled if measurements else None,
        rows_measured=measurements.rows_measured if measurements else 0,
        search=choice.search,
        timetables=_timetables(analysis, contest),
        programs=contest.programs,
        plan=plan,
        phases=(),
        warnings=(*choice.warnings, *contest.warnings),
        fusion=analysis.fusion,
    )
