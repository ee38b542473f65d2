"""The tuning core: candidates compiled, verified, timed in turn, and one of them kept.

It serves calls without state and steps that carry state alike. One rule of memory: a program that
needs more than the device has room for is not run. One rule of noise: a program is faster than
another if what it saves, round by round, exceeds the spread of these savings. All programs are
compared with the model as it was given, which is timed as well; a split has to beat the fastest
whole batch.
"""

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax

from pbjax.errors import FusionError, MemoryBudgetError, VerificationError
from pbjax.planning.plan import Decision, Plan, Seconds
from pbjax.planning.profiling import Timing
from pbjax.program.analysis import Analysis
from pbjax.runtime.compilation import CompiledProgram, ProgramSpec, compile_all
from pbjax.runtime.measured_programs import MeasuredProgram, joined, milliseconds
from pbjax.runtime.phases import Phases
from pbjax.runtime.program_cache import verified_difference
from pbjax.runtime.timing import sample_in_turn
from pbjax.runtime.verification import Difference
from pbjax.tuning.shortlist import Shortlist, device_room
from pbjax.tuning.workload import TimedProgram, Workload

# A program is kept over another only if it gains more than this many times the spread of the gain.
NOISE_FACTOR = 2.0

PLAIN_WINS = "the model as it was given is faster than with the kernels that fusion found"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The outcome of tuning.

    Attributes:
      kept: The program that runs.
      plan: The decision.
      programs: The programs that were timed.
      warnings: Programs that do not fit the device, and what they need.
    """

    kept: CompiledProgram
    plan: Plan
    programs: tuple[MeasuredProgram, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    """The program that is kept, the split that stands in the plan, if any was timed, and why."""

    kept: CompiledProgram
    split: CompiledProgram | None
    reason: str


def verify_fusion(analysis: Analysis, phases: Phases) -> None:
    """Compares each kind of match with what it replaces, before anything is measured.

    Raises:
      FusionError: They differ by more than their dtypes allow.
    """
    if analysis.fused:
        with phases.phase("verify fusion"):
            analysis.probe.verify()


def autotune(workload: Workload, shortlist: Shortlist, phases: Phases) -> Tuned:
    """Builds the programs of a shortlist and keeps the fastest.

    Args:
      workload: What the programs are made of and run on.
      shortlist: What to build, and whether the decision is settled already.
      phases: Clocks compiling, verifying and timing.

    Returns:
      The program to run, the plan, and the timings.

    Raises:
      FusionError: The outputs of the model with kernels are not those of the model as it was given.
      VerificationError: Those of a split, or a plan, that the caller gave are not.
      MemoryBudgetError: A split that is to run whatever it takes does not fit the device.
    """
    if shortlist.plan is not None:
        return Tuned(kept=_planned(workload, shortlist, phases), plan=shortlist.plan)
    specs = shortlist.specs
    with phases.phase("compile", len(specs)) as report:
        built = compile_all([partial(workload.lower, spec) for spec in specs], report)
    programs, warnings = _fitting(built, shortlist, _room(workload))
    with phases.phase("verify") as report:
        found = workload.differences(programs[1:], programs[0], report)
    programs, wrong = _right(programs, found, shortlist)
    timed: list[TimedProgram] = []
    if len(programs) > 1:
        with phases.phase("measure") as report:
            timed = _traced(workload, measure(workload, programs, report))
    verdict = _decide(shortlist, programs, timed, wrong)
    difference = max((each.largest for each in found if not each.fault), default=None)
    return Tuned(
        kept=verdict.kept,
        plan=_plan(workload.analysis, shortlist, verdict, timed, difference=difference),
        programs=tuple(program.row() for program in timed),
        warnings=(*warnings, *wrong),
    )


def measure(
    workload: Workload,
    programs: Sequence[CompiledProgram],
    progress: Callable[[int, int, str], None],
) -> list[TimedProgram]:
    """Times programs in turn on the same inputs."""
    seconds = sample_in_turn(map(workload.sampler, programs), progress)
    pairs = zip(programs, seconds, strict=True)
    return [TimedProgram(program=program, seconds=each) for program, each in pairs]


def _planned(workload: Workload, shortlist: Shortlist, phases: Phases) -> CompiledProgram:
    """The program of a plan that decides; it is verified unless that was done before."""
    reference, *_ = specs = shortlist.specs
    with phases.phase("compile") as report:
        (kept,) = compile_all([partial(workload.lower, specs[-1])], report)
        if kept.spec == reference or verified_difference(kept.key) is not None:
            return kept
        report(1, 2, "the model as given, to compare with")
        (given,) = compile_all([partial(workload.lower, reference)], report)
    with phases.phase("verify") as report:
        (difference,) = workload.differences((kept,), given, report)
    if difference.fault:
        raise _error(kept.spec, difference.fault)
    return kept


def _right(
    programs: Sequence[CompiledProgram], differences: Sequence[Difference], shortlist: Shortlist
) -> tuple[list[CompiledProgram], tuple[str, ...]]:
    """The programs that return what the first one does, and a line about each of the others.

    Another order of sums may round otherwise than the rule foresees, as in a model that amplifies
    its roundings: such a split is left out, and the whole batch runs.

    Raises:
      FusionError: The whole batch with kernels, as the model writes it, is wrong.
      VerificationError: A split that the caller gave is.
    """
    right, lines = list(programs[:1]), []
    for program, difference in zip(programs[1:], differences, strict=True):
        spec = program.spec
        as_written = spec.is_whole and not spec.variant
        given = shortlist.forced and spec == shortlist.splits[0]
        if not difference.fault:
            right.append(program)
        elif as_written or given:
            raise _error(spec, difference.fault)
        else:
            where = difference.fault.replace("; ", ", and ")
            lines.append(f"{spec.label} {joined(spec.sizes)}: {where}: not run")
    return right, tuple(lines)


def _error(spec: ProgramSpec, fault: str) -> VerificationError:
    """The error about a program that has to run, and whose outputs are not the model's."""
    if spec.name == "unsplit" and not spec.variant:  # without fusion it is the model itself
        return FusionError(f"optimize: with kernels {fault}; pass fuse='none'")
    return VerificationError(
        f"optimize: {spec.label} {joined(spec.sizes)}: {fault}; leave out split= or plan=, which "
        "keeps the whole batch where a split differs, and please report the model"
    )


def _room(workload: Workload) -> int:
    """Bytes that a program may need while programs are compared."""
    return device_room(workload.analysis.device) - workload.held_bytes


def _fitting(
    built: Sequence[CompiledProgram], shortlist: Shortlist, room: int
) -> tuple[list[CompiledProgram], tuple[str, ...]]:
    """The programs that fit the device, and a line about each of the others.

    The whole batch as the model writes it is always among them: nothing needs less.

    Raises:
      MemoryBudgetError: The split that is to run whatever it takes does not fit.
    """

    def fits(program: CompiledProgram) -> bool:
        as_written = program.spec.is_whole and not program.spec.variant
        return as_written or program.needed_bytes <= room

    def need(program: CompiledProgram) -> str:
        return (
            f"{program.spec.label} {joined(program.spec.sizes)} needs "
            f"{program.needed_bytes / 1e9:.3g} GB, {program.temporary_bytes / 1e9:.3g} of them "
            f"temporary; {room / 1e9:.3g} GB are there"
        )

    too_large = [program for program in built if not fits(program)]
    for program in too_large:
        if shortlist.forced and program.spec == shortlist.splits[0]:
            raise MemoryBudgetError(
                f"optimize(split={program.spec.sizes}): {need(program)}; what fits the device is "
                "allowed; lower the batch, or leave the split out to search"
            )
    lines = tuple(f"{need(program)}: not run" for program in too_large)
    return [program for program in built if fits(program)], lines


def _traced(workload: Workload, timed: list[TimedProgram]) -> list[TimedProgram]:
    """The timings, of the fastest staggered program with what overlaps in it."""
    staggered = [each for each in timed if any(each.spec.staggers)]
    if not staggered:
        return timed
    fastest = min(staggered, key=lambda each: each.median_s)
    share = workload.overlapped_fraction(fastest.program)
    return [replace(each, overlapped_share=share) if each is fastest else each for each in timed]


def _decide(
    shortlist: Shortlist,
    programs: Sequence[CompiledProgram],
    timed: Sequence[TimedProgram],
    wrong: Sequence[str] = (),
) -> _Verdict:
    """Keeps the fastest whole batch, or a split that is faster than that; tells what is wrong."""
    verdict = _fastest(shortlist, programs, timed, "no split fits the device" if not wrong else "")
    reason = "; ".join(part for part in (verdict.reason, *wrong) if part)
    return replace(verdict, reason=reason)


def _fastest(
    shortlist: Shortlist,
    programs: Sequence[CompiledProgram],
    timed: Sequence[TimedProgram],
    no_split: str,
) -> _Verdict:
    splits = [program for program in programs if program.spec in shortlist.splits]
    if shortlist.forced:
        return _Verdict(kept=splits[0], split=splits[0], reason=shortlist.reason)
    no_split = shortlist.reason or no_split
    if not timed:
        return _Verdict(kept=programs[0], split=None, reason=no_split)
    whole, better = _best_whole([each for each in timed if each.spec.is_whole])
    if not splits:
        reason = "; ".join(part for part in (no_split, better) if part)
        return _Verdict(kept=whole.program, split=None, reason=reason)
    may_be_kept = (each for each in timed if each.spec in shortlist.splits)
    split = min(may_be_kept, key=lambda each: each.median_s)
    comparison, is_faster = _compare(split, whole)
    kept = split if is_faster else whole
    return _Verdict(kept=kept.program, split=split.program, reason=comparison)


def _best_whole(wholes: Sequence[TimedProgram]) -> tuple[TimedProgram, str]:
    """The whole batch with kernels as the model is written, or what is faster, and why."""
    base = next((each for each in wholes if each.spec.name == "unsplit"), wholes[0])
    gains = [(each.gain_over(base), each) for each in wholes if each is not base]
    faster = [(gain.median_s, each) for gain, each in gains if _exceeds_noise(gain)]
    if not faster:
        return base, ""
    _, best = max(faster, key=lambda pair: pair[0])
    return best, PLAIN_WINS if best.spec.plain else _compare(best, base)[0]


def _compare(one: TimedProgram, other: TimedProgram) -> tuple[str, bool]:
    """Figures of two programs in a line, and whether the first is faster by more than the noise."""
    gain, seconds = one.gain_over(other), (one.median_s, other.median_s)
    sizes = "" if one.spec.is_whole else f" {joined(one.spec.sizes)}"
    one_ms, other_ms, noise_ms = map(milliseconds, (*seconds, NOISE_FACTOR * gain.spread_s))
    figures = f"{one.spec.label}{sizes} takes {one_ms} ms, {other.spec.label} {other_ms} ms"
    if _exceeds_noise(gain):
        ratio = seconds[1] / seconds[0]
        return f"{figures}: {ratio:.3f}x, more than the noise of {noise_ms} ms", True
    inside = f"the gain is inside the noise of {noise_ms} ms"
    return f"{figures}: {'slower' if gain.median_s <= 0 else inside}", False


def _exceeds_noise(gain: Timing) -> bool:
    return gain.median_s > NOISE_FACTOR * gain.spread_s


def _plan(
    analysis: Analysis,
    shortlist: Shortlist,
    verdict: _Verdict,
    timed: Sequence[TimedProgram],
    *,
    difference: float | None,
) -> Plan:
    kept = verdict.kept.spec
    split = verdict.split.spec if verdict.split else None
    shown = split or kept
    return Plan(
        model=analysis.model.name,
        fingerprint=analysis.fingerprint,
        device_kind=analysis.device.kind,
        jax=jax.__version__,
        batch_size=shortlist.batch_size,
        sizes=shown.sizes,
        staggers=shown.staggers,
        unroll=shown.unroll,
        sm_budgets=shown.sm_budgets,
        layers=kept.layers,
        compiler_options=dict(kept.compiler_options),
        decision=_decision(verdict.kept),
        reason=verdict.reason,
        digest=shortlist.digest,
        predicted=Seconds(unsplit=shortlist.whole_s, split=split.predicted_s if split else None),
        measured=_seconds(timed, verdict),
        max_difference=difference,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _decision(kept: CompiledProgram) -> Decision:
    if not kept.spec.is_whole:
        return "split"
    return "plain" if kept.spec.plain else "unsplit"


def _seconds(timed: Sequence[TimedProgram], verdict: _Verdict) -> Seconds:
    """Seconds of the programs that the plan names."""
    kept, split = verdict.kept, verdict.split

    def of(program: CompiledProgram) -> float | None:
        return next((each.median_s for each in timed if each.program is program), None)

    def first(name: str, sizes: tuple[int, ...]) -> float | None:
        found = (each for each in timed if (each.spec.name, each.spec.sizes) == (name, sizes))
        return next((each.median_s for each in found), None)

    whole = (sum(kept.spec.sizes),)
    return Seconds(
        plain=first("plain", whole),
        unsplit=of(kept) if kept.spec.name == "unsplit" else first("unsplit", whole),
        sequential=first("sequential", split.spec.sizes) if split else None,
        split=of(split) if split else None,
    )
