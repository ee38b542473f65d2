"""Which programs are worth building for a batch: searched, given, or read from a plan."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import jax

from pbjax.device import Device
from pbjax.errors import InputError, MemoryBudgetError, ModelError, warn
from pbjax.planning.memory import predicted_bytes
from pbjax.planning.plan import Plan
from pbjax.planning.program_summary import ProgramSummary
from pbjax.planning.search import Candidate, SearchOptions, SearchResult, best_staggers, search
from pbjax.planning.throughput import Evaluator
from pbjax.planning.timetable import Split
from pbjax.program.analysis import Analysis
from pbjax.runtime.compilation import ProgramSpec
from pbjax.runtime.execution import overlap_options
from pbjax.runtime.phases import Phases
from pbjax.runtime.timing import on_gpu
from pbjax.tuning.measured_table import Measurements, measured_table
from pbjax.tuning.request import Request
from pbjax.tuning.whole_batch import as_written, no_sub_batches, whole_programs

# More blocks in one step of a loop take minutes to compile.
MAX_UNROLL = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortlist:
    """The programs to build for a batch, and what that rests on.

    Attributes:
      batch_size: Rows of the batch.
      wholes: Programs of the whole batch; the first is the model as it was given.
      splits: Programs of its sub-batches, the one predicted to be fastest first.
      compared: Programs of sub-batches that are timed to compare the splits with, and not kept.
      forced: Whether the first split runs whatever it takes.
      reason: Why the decision is settled before anything is timed; empty if it is not.
      plan: A plan that decides already; nothing is timed then.
      search: The search, if there was one.
      measurements: The measured table, if there was one.
      digest: SHA-256 of what was searched and found; empty if nothing was searched.
      warnings: Things that changed a result or a cost.
    """

    batch_size: int
    wholes: tuple[ProgramSpec, ...]
    splits: tuple[ProgramSpec, ...] = ()
    compared: tuple[ProgramSpec, ...] = ()
    forced: bool = False
    reason: str = ""
    plan: Plan | None = None
    search: SearchResult | None = None
    measurements: Measurements | None = None
    digest: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def specs(self) -> tuple[ProgramSpec, ...]:
        """All programs to build, the model as it was given first."""
        return (*self.wholes, *self.splits, *self.compared)

    @property
    def whole_s(self) -> float | None:
        """Predicted seconds of the whole batch; None if nothing predicts it."""
        return self.wholes[-1].predicted_s


def shortlists(request: Request, analysis: Analysis, phases: Phases) -> list[Shortlist]:
    """What to build for each batch size of a call without state, ascending.

    Raises:
      InputError: Buckets, split or plan do not fit the example's batch.
      ModelError: The plan is for another model, or what is asked for needs a split and the batch
        cannot be split: the message names the operation.
    """
    sizes = request.batch_sizes(analysis.batch.batch_size)
    if request.plan is not None:
        return [planned(analysis, request.plan)]
    split = given_split(request, analysis)
    if len(sizes) > 1:
        analysis.require_split(f"optimize(buckets={request.buckets})")
    if reason := no_sub_batches(analysis):
        return [Shortlist(batch_size=sizes[-1], wholes=whole_programs(analysis), reason=reason)]
    measurements = measured_table(analysis, request.leaves, request.profile, phases)
    if split is not None:
        return [forced(analysis, measurements, split, request.unroll)]
    with phases.phase("search"):
        return [searched(analysis, measurements, request.unroll, size) for size in sizes]


def device_room(device: Device) -> int:
    """Bytes that programs may use: the device's, or what JAX was given of them if that is less."""
    stats = jax.devices()[0].memory_stats() or {}
    return min(device.memory_bytes, stats.get("bytes_limit", device.memory_bytes))


def searched(
    analysis: Analysis, measurements: Measurements, unroll: int | None, batch_size: int
) -> Shortlist:
    """The best splits that the search finds, one with two and one with three sub-batches.

    Both are built even where the unsplit batch is predicted to be faster: what is measured decides.

    Args:
      analysis: The model.
      measurements: The table.
      unroll: Blocks in one step of the splits' loop; None lets several compete.
      batch_size: Rows of the batch, those of the example or fewer.
    """
    room = device_room(analysis.device)
    result = search_within(measurements, batch_size, room)
    specs = tuple(replace(spec, unroll=unroll or 1) for spec in best_splits(result))
    unrolls = _unrolls(analysis.summary.num_blocks - 1) if unroll is None else ()
    wholes = whole_programs(analysis, _whole_s(measurements, batch_size))
    return Shortlist(
        batch_size=batch_size,
        wholes=tuple(replace(whole, sizes=(batch_size,)) for whole in wholes),
        splits=(*specs, *_rivals(specs, unrolls)),
        search=result,
        measurements=measurements,
        digest=result.digest,
        reason="" if specs else no_split_reason(result, batch_size, room),
        warnings=_warnings(measurements),
    )


def search_within(measurements: Measurements, batch_size: int, room: int) -> SearchResult:
    """The search, among splits that are predicted to fit where its best ones are not.

    Args:
      measurements: The table.
      batch_size: Rows of the batch.
      room: Bytes that programs may use, weights included. If no split is predicted to fit, what
        the compiled programs need decides.
    """
    summary, profile = measurements.summary, measurements.profile
    result = search(summary, profile, batch_size)
    if not _fit(summary, _split(result), room):
        with suppress(MemoryBudgetError):
            within = SearchOptions(memory_limit_bytes=room)
            return search(summary, profile, batch_size, within)
    return result


def best_splits(result: SearchResult) -> tuple[ProgramSpec, ...]:
    """The best split of each number of sub-batches, the one predicted to be fastest first."""
    best = sorted(
        _split(result), key=lambda found: (found.prediction.makespan_s, -len(found.staggers))
    )
    return tuple(map(_spec, best))


def no_split_reason(result: SearchResult, batch_size: int, room: int) -> str:
    """Why a search found no split."""
    if result.dropped:
        return f"no split is predicted to fit in {room / 1e9:.3g} GB"
    return too_small(batch_size)


def too_small(batch_size: int) -> str:
    """Why a batch of few rows has no split."""
    return f"a batch of {batch_size} rows is too small to split"


def given_split(request: Request, analysis: Analysis) -> Split | None:
    """The split that the caller gives; None without one.

    Raises:
      InputError: Its sizes do not add up to the batch.
      ModelError: It has several sizes, and the batch cannot be split.
    """
    if request.split is None:
        return None
    split, batch_size = Split(sizes=request.split), analysis.batch.batch_size
    if split.batch_size != batch_size:
        raise InputError(
            f"optimize(split={split.sizes}): adds up to {split.batch_size}; the example has "
            f"{batch_size} rows; give sizes that add up to them, or leave out split= to search"
        )
    if len(split.sizes) > 1:
        analysis.require_split(f"optimize(split={split.sizes})")
    return split


def forced(
    analysis: Analysis, measurements: Measurements, split: Split, unroll: int | None
) -> Shortlist:
    """The split that the caller gives, with the best staggers.

    Args:
      analysis: The model.
      measurements: The table.
      split: The sizes.
      unroll: Blocks in one step of the loop; 1 if None.
    """
    summary, profile = measurements.summary, measurements.profile
    room = device_room(analysis.device)
    candidate = best_staggers(summary, profile, split)
    if not _fit(summary, (candidate,), room):
        with suppress(MemoryBudgetError):
            within = SearchOptions(memory_limit_bytes=room)
            candidate = best_staggers(summary, profile, split, within)
    specs = (replace(_spec(candidate), unroll=unroll or 1),) if len(split.sizes) > 1 else ()
    return Shortlist(
        batch_size=split.batch_size,
        wholes=as_written(whole_programs(analysis, _whole_s(measurements, split.batch_size))),
        splits=(*specs, *_rivals(specs)),
        forced=bool(specs),
        measurements=measurements,
        reason=f"split={split.sizes} was given",
        warnings=_warnings(measurements),
    )


def planned(analysis: Analysis, plan: Plan, *, can_scan: bool = True) -> Shortlist:
    """The programs of a saved plan.

    A plan of another device kind or version of jax keeps its sizes and staggers, but whether they
    pay is measured again, of which a `PbjaxWarning` tells.

    Args:
      analysis: The model.
      plan: The plan.
      can_scan: As in `whole_programs`.

    Raises:
      ModelError: The plan is for another model, or splits a batch that cannot be split.
      InputError: The plan is for another batch size.
    """
    _check_plan(analysis, plan)
    if len(plan.sizes) > 1:
        analysis.require_split(f"optimize(plan=...) of sizes {plan.sizes}")
    warning = _foreign(analysis, plan)
    split = ProgramSpec(
        sizes=plan.sizes,
        staggers=plan.staggers,
        predicted_s=plan.predicted.split,
        sm_budgets=plan.sm_budgets,
        unroll=plan.unroll,
        # Those of another device or version may not even be known here.
        compiler_options=_options(plan.staggers) if warning else plan.compiler_options,
    )
    splits = (split,) if len(plan.sizes) > 1 else ()
    if not warning:
        splits = splits if plan.decision == "split" else ()
        return Shortlist(
            batch_size=plan.batch_size,
            wholes=_planned_wholes(analysis, plan),
            splits=splits,
            forced=bool(splits),
            plan=plan,
            reason=plan.reason,
            digest=plan.digest,
        )
    warn(warning)
    return Shortlist(
        batch_size=plan.batch_size,
        wholes=whole_programs(analysis, plan.predicted.unsplit, can_scan=can_scan),
        splits=(*splits, *_rivals(splits)),
        digest=plan.digest,
        reason="" if splits else no_sub_batches(analysis) or "the plan has no split",
        warnings=(warning,),
    )


def _planned_wholes(analysis: Analysis, plan: Plan) -> tuple[ProgramSpec, ...]:
    """The model as it was given, and the whole-batch program of a plan if that is another."""
    whole = ProgramSpec(sizes=(plan.batch_size,), staggers=(0,), predicted_s=plan.predicted.unsplit)
    given = replace(whole, plain=analysis.fused, predicted_s=None)
    if plan.decision != "unsplit":
        return (given,)
    kept = replace(whole, layers=plan.layers, compiler_options=plan.compiler_options)
    return (given, kept) if analysis.fused or kept.variant else (kept,)


def _check_plan(analysis: Analysis, plan: Plan) -> None:
    if plan.fingerprint != analysis.fingerprint:
        raise ModelError(
            f"optimize(plan=...): the plan is for {plan.model} ({plan.fingerprint}); this model is "
            f"{analysis.model.name} ({analysis.fingerprint}); use the model it was made for, with "
            "inputs of the same shapes and dtypes and the same fuse=, or leave out plan= to search "
            "again"
        )
    if plan.batch_size != analysis.batch.batch_size:
        raise InputError(
            f"optimize(plan=...): the plan is for {plan.batch_size} rows; the example has "
            f"{analysis.batch.batch_size}; pass an example of that batch, or leave out plan="
        )


def _foreign(analysis: Analysis, plan: Plan) -> str:
    """What differs between where a plan was made and here, in a line; empty if nothing does."""
    here = {"device_kind": analysis.device.kind, "jax": jax.__version__}
    differing = [
        f"{name} {getattr(plan, name)!r} in the plan, {value!r} here"
        for name, value in here.items()
        if getattr(plan, name) != value
    ]
    if not differing:
        return ""
    return (
        f"optimize(plan=...): {' and '.join(differing)}; its sizes and staggers are kept, and "
        "whether they pay is measured again; leave the plan out to search for those of this device"
    )


def _rivals(specs: Sequence[ProgramSpec], unrolls: Iterable[int] = ()) -> tuple[ProgramSpec, ...]:
    """Other programs of the best split, to tell what its parts are worth.

    They are: without staggers, to tell overlap from splitting; without budgets; and with more
    blocks in a step, since a step is a CUDA graph of its own on a GPU.

    Args:
      specs: Splits, the best first.
      unrolls: Numbers of blocks in a step that compete.
    """
    if not specs or not any(specs[0].staggers):
        return ()
    best = specs[0]
    bare = (replace(best, sm_budgets={}, predicted_s=None),) if best.sm_budgets else ()
    return (_in_sequence(best), *bare, *(replace(best, unroll=each) for each in unrolls))


def _unrolls(steps: int) -> list[int]:
    """Numbers of blocks in one step of a loop that are worth a try."""
    if not on_gpu():
        return []
    return [n for n in dict.fromkeys((2, steps)) if 1 < n <= min(steps, MAX_UNROLL)]


def _in_sequence(spec: ProgramSpec) -> ProgramSpec:
    """The same sub-batches, one after the other."""
    staggers = (0,) * len(spec.sizes)
    return replace(spec, staggers=staggers, sm_budgets={}, predicted_s=None, compiler_options={})


def _spec(candidate: Candidate) -> ProgramSpec:
    return ProgramSpec(
        sizes=candidate.split.sizes,
        staggers=candidate.staggers,
        predicted_s=candidate.prediction.makespan_s,
        sm_budgets=candidate.sm_budgets,
        compiler_options=_options(candidate.staggers),
    )


def _options(staggers: Sequence[int]) -> dict[str, str | int | bool]:
    """Compiler options that let staggered sub-batches overlap."""
    return dict(overlap_options()) if any(staggers) else {}


def _split(result: SearchResult) -> list[Candidate]:
    return [candidate for count, candidate in result.by_count.items() if count > 1]


def _fit(summary: ProgramSummary, candidates: Sequence[Candidate], room: int) -> bool:
    needed = (predicted_bytes(summary, each.split.sizes, each.staggers) for each in candidates)
    return all(num_bytes <= room for num_bytes in needed)


def _whole_s(measurements: Measurements, batch_size: int) -> float:
    evaluator = Evaluator(measurements.summary, measurements.profile)
    return evaluator.evaluate(Split(sizes=(batch_size,)), (0,)).makespan_s


def _warnings(measurements: Measurements) -> tuple[str, ...]:
    return (measurements.warning,) if measurements.warning else ()
