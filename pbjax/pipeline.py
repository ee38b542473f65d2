"""`optimize`: from a model to a callable that runs as planned; the order of all other modules."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import SupportsIndex

import jax

from pbjax.decode.programs import StepWorkload
from pbjax.decode.report import state_report
from pbjax.decode.search import step_shortlist
from pbjax.device import Device, check_platforms
from pbjax.errors import FusionError, warn
from pbjax.fusion import Patterns, Selection
from pbjax.graph.functional import Model
from pbjax.graph.placement import refuse_captured
from pbjax.planning.plan import Plan
from pbjax.planning.profiling import Profile
from pbjax.program.analysis import Analysis, analyse
from pbjax.runtime.phases import Phases, Progress
from pbjax.runtime.program_cache import keep_programs
from pbjax.tuning.autotune import autotune, verify_fusion
from pbjax.tuning.calls import CallWorkload, StackedWeights
from pbjax.tuning.optimized import BucketedCall, Optimized
from pbjax.tuning.report import report_of
from pbjax.tuning.request import Request
from pbjax.tuning.shortlist import shortlists


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
) -> Optimized:
    """Plans, compiles, checks and measures a model, split and unsplit, and returns the fastest.

    A step that carries state, such as the decoding of a token over a KV cache, is optimised by
    `state=`: its state is split once and kept split, and memory kernels of one sub-batch run beside
    matrix products of the other where one launch can do both.

    A model whose rows depend on each other, such as one that returns similarities within its batch,
    runs unsplit; the plan's reason names the operation.

    Args:
      model: An nnx module, a linen module or a JAX function. It is not changed.
      *inputs: Example inputs of a call: arrays or pytrees of arrays; their shapes, and for the
        measurements their values, are what is planned for. A single dictionary whose keys are the
        model's argument names holds one input each. Arrays elsewhere are moved to the device that
        programs run on.
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
      state: Which input is carried from call to call; the function returns its like. It runs as one
        or two sub-batches; profile, buckets and unroll do not apply to it.
      progress: Called as progress(phase, done, total, item).

    Returns:
      A callable with the model's signature; `.plan` and `.report()` say what was decided and why.
      With `state`, its `.hold()` takes the state over.

    Raises:
      InputError: An argument has a wrong value.
      InputTypeError: An argument has a wrong type.
      ModelError: The model keeps state or cannot be traced; or it is to run in sub-batches and
        cannot: the message names the operation.
      VerificationError: A program's outputs are not the model's, or a kernel's not those of the
        operations that it replaces.
      MemoryBudgetError: A split that is given does not fit the device.
      FileError: A plan or profile file is corrupt.
      DeviceError: The device, or a profile, is not of the kind that JAX runs on.
    """
    check_platforms()
    request = Request.of(
        model,
        inputs,
        variables=variables,
        batch_axes=batch_axes,
        split=split,
        plan=plan,
        profile=profile,
        device=device,
        buckets=buckets,
        unroll=unroll,
        fuse=fuse,
        state=state,
        progress=progress,
    )
    keep_programs()
    # Programs run on random inputs, of which NaN and infinity are no fault of the model.
    with jax.debug_nans(False), jax.debug_infs(False):
        return _with_fallback(request)


def _with_fallback(request: Request) -> Optimized:
    """What `optimize` does, without kernels where the model with those found is another."""
    try:
        return _optimized(request)
    except FusionError as error:
        if not request.fuse.auto:
            raise
        reason = f"left out, since with kernels it is not the model: {error}"
    warn(f"fusion is {reason}")
    return _optimized(replace(request, fuse=Selection(patterns=frozenset(), reason=reason)))


def _optimized(request: Request) -> Optimized:
    """What `optimize` does with the matches that are asked for."""
    phases = Phases(request.progress)
    with phases.phase("analyse"):
        analysis = analyse(
            request.model,
            request.inputs,
            device=request.device,
            variables=request.variables,
            batch_axes=request.batch_axes,
            fuse=request.fuse,
        )
        refuse_captured(analysis.model.name, analysis.source.constants)
    if request.plan is None:
        verify_fusion(analysis, phases)
    run = _optimized_call if request.state is None else _optimized_step
    return run(request, analysis, phases)


def _optimized_call(request: Request, analysis: Analysis, phases: Phases) -> Optimized:
    """A function without state, at each of its batch sizes."""
    stacked, buckets, reports = StackedWeights(analysis), {}, []
    for shortlist in shortlists(request, analysis, phases):
        workload = CallWorkload.of(request, analysis, stacked, shortlist.batch_size)
        tuned = autotune(workload, shortlist, phases)
        buckets[shortlist.batch_size] = workload.bucket(tuned.kept)
        reports.append(report_of(analysis, shortlist, tuned, phases.finished()))
    return Optimized(BucketedCall(buckets, analysis), reports[-1], request.names)


def _optimized_step(request: Request, analysis: Analysis, phases: Phases) -> Optimized:
    """A step that carries state."""
    with phases.phase("search"):
        workload = StepWorkload.of(request, analysis)
        shortlist = step_shortlist(request, analysis, workload.specs)
    tuned = autotune(workload, shortlist, phases)
    state = state_report(workload, shortlist)
    report = report_of(analysis, shortlist, tuned, phases.finished(), state)
    return Optimized(workload.runner(tuned.kept), report, request.names)
