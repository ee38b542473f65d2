"""Split against unsplit on this device: build both, compare their outputs, time them, keep one.

Where fusion has put kernels into the model, the unsplit program has them too: a split has to beat
that. What outputs are compared with is the model as it was given, which is timed as well. A split
that needs more memory than the device has is not run.
"""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
from jaxtyping import Array

from pbjax.errors import MemoryBudgetError
from pbjax.planning.plan import Decision, Plan, Seconds
from pbjax.program.analysis import PROBE_SIZE, Analysis
from pbjax.runtime.compilation import (
    CompiledProgram,
    PackedWeights,
    ProgramSpec,
    compile_all,
    lower_split,
    lower_unsplit,
    measure,
    overlapped_share,
    verify,
)
from pbjax.runtime.execution import overlap_options
from pbjax.runtime.measured_programs import MeasuredProgram, joined, milliseconds
from pbjax.runtime.phases import Phases
from pbjax.runtime.program_cache import verified_difference
from pbjax.tuning.choices import Choice, device_room

# A split is kept only if it gains more than this many times the spread of the timings.
NOISE_FACTOR = 2.0
# More blocks in one step take minutes to compile.
MAX_UNROLL = 16

# What a plan says of each program that may be kept.
_DECISIONS: dict[str, Decision] = {
    "plain": "plain",
    "unsplit": "unsplit",
    "sequential": "split",
    "split": "split",
}

PLAIN_WINS = "the model as it was given is faster than with the kernels that fusion found"


def verify_fusion(analysis: Analysis, phases: Phases) -> None:
    """Compares each kind of match with what it replaces, before anything is measured.

    Raises:
      FusionError: They differ by more than their dtypes allow.
    """
    if analysis.fused:
        with phases.phase("verify fusion"):
            analysis.traced_at(PROBE_SIZE).verify()


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """What came of it.

    Attributes:
      kept: The program that runs.
      plan: The decision.
      programs: What was timed.
      warnings: Splits that do not fit the device, and what they need.
    """

    kept: CompiledProgram
    plan: Plan
    programs: tuple[MeasuredProgram, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    """Which of the programs is kept, which split stands in the plan, and why."""

    kept: CompiledProgram
    split: CompiledProgram
    reason: str


def run_contest(
    analysis: Analysis,
    weights: PackedWeights,
    leaves: Sequence[Array],
    choice: Choice,
    phases: Phases,
    *,
    unroll: int | None,
) -> Contest:
    """Builds the unsplit program and the chosen splits, and keeps the faster.

    Args:
      analysis: The model.
      weights: Of all split programs of the model.
      leaves: Leaves of example inputs of this batch size.
      choice: What to build, and whether the decision is settled already.
      phases: Clocks compiling, verifying and timing.
      unroll: Blocks in one step of a split program's loop, unless a plan says it; None lets
        several compete where overlap ends at the boundary of a step.

    Returns:
      The program to run, the plan, and the timings.

    Raises:
      VerificationError: A program's outputs are not those of the model as it was given.
      MemoryBudgetError: The split that the caller gives does not fit the device.
    """
    if choice.plan is not None and _settled(choice):
        return _run_plan(analysis, weights, leaves, choice, choice.plan, phases)
    whole = ProgramSpec(sizes=(choice.batch_size,), staggers=(0,), predicted_s=choice.unsplit_s)
    specs = _contenders(choice, unroll, analysis.summary.num_blocks - 1)
    given = replace(whole, plain=True, predicted_s=None)
    wholes = (given, whole) if analysis.fused else (whole,)
    lower = [partial(lower_unsplit, analysis, leaves, spec) for spec in wholes]
    lower += [partial(lower_split, analysis, weights, leaves, spec) for spec in specs]
    with phases.phase("compile", len(lower)) as report:
        built = compile_all(lower, report)
    unsplit, compiled = built[: len(wholes)], built[len(wholes) :]
    splits, warnings = _fitting(compiled, choice, device_room(analysis.device))
    programs = (*unsplit, *splits)
    with phases.phase("verify") as report:
        difference = verify(analysis, leaves, programs[1:], programs[0], report)
    timed: tuple[MeasuredProgram, ...] = ()
    if len(programs) > 1:
        with phases.phase("measure") as report:
            timed = _traced(programs, measure(programs, leaves, report), leaves)
    verdict = _decide(unsplit, splits, timed, choice)
    return Contest(
        kept=verdict.kept,
        plan=_plan(analysis, choice, verdict, timed, difference=difference),
        programs=timed,
        warnings=warnings,
    )


def _run_plan(
    analysis: Analysis,
    weights: PackedWeights,
    leaves: Sequence[Array],
    choice: Choice,
    plan: Plan,
    phases: Phases,
) -> Contest:
    """Builds the program of a plan that decides; checks it unless that was done before."""
    whole = ProgramSpec(sizes=(choice.batch_size,), staggers=(0,), predicted_s=choice.unsplit_s)
    given = replace(whole, plain=True, predicted_s=None)
    with phases.phase("compile") as report:
        if choice.specs and plan.decision == "split":
            spec = choice.specs[0]
            lower = partial(lower_split, analysis, weights, leaves, spec)
        else:
            spec = given if plan.decision == "plain" or not analysis.fused else whole
            lower = partial(lower_unsplit, analysis, leaves, spec)
        (kept,) = compile_all([lower], report)
        reference = None
        if spec != given and verified_difference(kept.key) is None:
            report(1, 2, "the model as given, to compare with")
            (reference,) = compile_all([partial(lower_unsplit, analysis, leaves, given)], report)
    if reference is not None:
        with phases.phase("verify") as report:
            verify(analysis, leaves, (kept,), reference, report)
    return Contest(kept=kept, plan=plan, programs=())


def _settled(choice: Choice) -> bool:
    """Whether a plan from this device and version of jax decides."""
    return choice.plan is not None and not choice.warnings


def _contenders(choice: Choice, unroll: int | None, steps: int) -> tuple[ProgramSpec, ...]:
    """The splits to build, the best first.

    Of the best also: without staggers, to tell overlap from splitting; without budgets; and with
    more blocks in a step, where the caller leaves that open.

    Args:
      choice: What the search, the caller or a plan chose.
      unroll: What the caller gives.
      steps: Of the loop.
    """
    if not choice.specs:
        return ()
    specs = choice.specs
    if choice.plan is None:
        specs = tuple(replace(spec, unroll=unroll or 1) for spec in specs)
    best = specs[0]
    if not any(best.staggers):
        return specs
    others = [replace(best, staggers=(0,) * len(best.sizes), sm_budgets={}, predicted_s=None)]
    if best.sm_budgets and not choice.reason:
        others.append(replace(best, sm_budgets={}, predicted_s=None))
    if unroll is None and not choice.reason:
        others += [replace(best, unroll=each) for each in _unrolls(steps)]
    return (*specs, *others)


def _unrolls(steps: int) -> tuple[int, ...]:
    """Blocks in one step that may be worth a try: a step is a CUDA graph of its own on a GPU."""
    if not overlap_options():
        return ()
    return tuple(each for each in dict.fromkeys((2, steps)) if 1 < each <= min(steps, MAX_UNROLL))


def _fitting(
    splits: Sequence[CompiledProgram], choice: Choice, room: int
) -> tuple[list[CompiledProgram], tuple[str, ...]]:
    """The splits that fit the device, and a line about each of the others.

    Raises:
      MemoryBudgetError: The split that is to run whatever it takes is among the others.
    """
    fitting = [split for split in splits if split.needed_bytes <= room]
    lines = tuple(
        f"{split.spec.label} {joined(split.spec.sizes)} needs {split.needed_bytes / 1e9:.3g} GB, "
        f"{split.temporary_bytes / 1e9:.3g} of them temporary; {room / 1e9:.3g} GB are there: "
        "not run"
        for split in splits
        if split.needed_bytes > room
    )
    if splits and choice.reason and splits[0].needed_bytes > room:
        raise MemoryBudgetError(
            f"optimize(split={splits[0].spec.sizes}): {lines[0].removesuffix(': not run')}; what "
            "fits the device is allowed; lower the batch, or leave the split out to search"
        )
    return fitting, lines


def _traced(
    programs: Sequence[CompiledProgram],
    timed: Sequence[MeasuredProgram],
    leaves: Sequence[Array],
) -> tuple[MeasuredProgram, ...]:
    """The timings, of the fastest staggered program with what overlaps in it."""
    staggered = [i for i, program in enumerate(timed) if program.name == "split"]
    if not staggered:
        return tuple(timed)
    fastest = min(staggered, key=lambda i: timed[i].measured_s)
    share = overlapped_share(programs[fastest], leaves)
    return tuple(
        replace(program, overlapped_share=share) if i == fastest else program
        for i, program in enumerate(timed)
    )


def _decide(
    wholes: Sequence[CompiledProgram],
    splits: Sequence[CompiledProgram],
    timed: Sequence[MeasuredProgram],
    choice: Choice,
) -> _Verdict:
    """Keeps one of the unsplit programs, the one without fusion first, or of the splits."""
    if splits and choice.reason:  # the caller or a plan has decided
        return _Verdict(kept=splits[0], split=splits[0], reason=choice.reason)
    place = _better_whole(timed[: len(wholes)])
    unsplit = wholes[place]
    if not splits:
        reason = choice.reason or "no split fits the device"
        reason = f"{reason}; {PLAIN_WINS}" if unsplit.spec.plain else reason
        return _Verdict(kept=unsplit, split=unsplit, reason=reason)
    base, others = timed[place], timed[len(wholes) :]
    index = min(range(len(others)), key=lambda i: others[i].measured_s)
    fastest, gain = others[index], base.measured_s - others[index].measured_s
    noise = NOISE_FACTOR * max(base.spread_s, fastest.spread_s)
    figures = (
        f"{fastest.label} {joined(fastest.sizes)} takes {milliseconds(fastest.measured_s)} ms, "
        f"{base.name} {milliseconds(base.measured_s)} ms"
    )
    if gain > noise:
        speedup = base.measured_s / fastest.measured_s
        reason = f"{figures}: {speedup:.3f}x, more than the noise of {milliseconds(noise)} ms"
        return _Verdict(kept=splits[index], split=splits[index], reason=reason)
    lost = "slower" if gain <= 0 else f"the gain is inside the noise of {milliseconds(noise)} ms"
    return _Verdict(kept=unsplit, split=splits[index], reason=f"{figures}: {lost}")


def _better_whole(timed: Sequence[MeasuredProgram]) -> int:
    """The unsplit program with kernels, unless the model is faster as it was given."""
    if len(timed) < 2:
        return 0
    plain, fused = timed
    noise = NOISE_FACTOR * max(plain.spread_s, fused.spread_s)
    return 0 if fused.measured_s - plain.measured_s > noise else 1


def _plan(
    analysis: Analysis,
    choice: Choice,
    verdict: _Verdict,
    timed: Sequence[MeasuredProgram],
    *,
    difference: float | None,
) -> Plan:
    spec = verdict.split.spec
    seconds = {}
    for program in timed:  # the fastest first: budgets and unrolling tell others of a name apart
        same = (program.name, program.sizes, program.staggers)
        seconds[same] = min(program.measured_s, seconds.get(same, program.measured_s))
    whole = (choice.batch_size,), (0,)
    return Plan(
        model=analysis.model.name,
        fingerprint=analysis.fingerprint,
        device_kind=analysis.device.kind,
        jax=jax.__version__,
        batch_size=choice.batch_size,
        sizes=spec.sizes,
        staggers=spec.staggers,
        unroll=spec.unroll,
        compiler_options=dict(verdict.split.options),
        decision=_DECISIONS[verdict.kept.spec.name],
        reason=verdict.reason,
        digest=choice.digest,
        predicted=Seconds(unsplit=choice.unsplit_s, split=spec.predicted_s),
        measured=Seconds(
            plain=seconds.get(("plain", *whole)),
            unsplit=seconds.get(("unsplit", *whole)),
            sequential=seconds.get(("sequential", spec.sizes, (0,) * len(spec.sizes))),
            split=seconds.get((spec.name, spec.sizes, spec.staggers))
            if len(spec.sizes) > 1
            else None,
        ),
        max_difference=difference,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        sm_budgets=spec.sm_budgets,
    )
