"""Split against unsplit on this device: build both, compare their outputs, time them, keep one."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
from jaxtyping import Array

from pbjax.analysis import Analysis
from pbjax.choices import Choice
from pbjax.compilation import (
    CompiledProgram,
    PackedWeights,
    Way,
    compile_split,
    compile_unsplit,
    measure,
    verify,
)
from pbjax.phases import Phases
from pbjax.plan import Plan, Seconds
from pbjax.reports import MeasuredProgram, joined, milliseconds

# A split is kept only if it gains more than this many times the spread of the timings.
NOISE_FACTOR = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """What came of it.

    Attributes:
      kept: The program that runs.
      plan: The decision.
      programs: What was timed.
    """

    kept: CompiledProgram
    plan: Plan
    programs: tuple[MeasuredProgram, ...]


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
    unroll: int,
) -> Contest:
    """Builds the unsplit program and the chosen splits, and keeps the faster.

    Args:
      analysis: The model.
      weights: Of all split programs of the model.
      leaves: Leaves of example inputs of this batch size.
      choice: What to build, and whether the decision is settled already.
      phases: Clocks compiling, verifying and timing.
      unroll: Blocks in one step of a split program's loop, unless a plan says it.

    Returns:
      The program to run, the plan, and the timings.

    Raises:
      VerificationError: A split program's outputs are not the unsplit program's.
    """
    whole = Way(sizes=(choice.batch_size,), staggers=(0,), predicted_s=choice.unsplit_s)
    unroll = choice.plan.unroll if choice.plan else unroll
    ways = _with_sequential(choice)
    with phases.phase("compile", 1 + len(ways)) as report:
        unsplit = compile_unsplit(analysis, leaves, whole)
        splits = []
        for way in ways:
            report(1 + len(splits), 1 + len(ways), f"{way.name} {way.sizes}")
            splits.append(compile_split(analysis, weights, leaves, way, unroll=unroll))
    with phases.phase("verify") as report:
        difference = verify(analysis, leaves, splits, unsplit, report)
    timed: tuple[MeasuredProgram, ...] = ()
    if splits and not _settled(choice):
        with phases.phase("measure") as report:
            timed = measure((unsplit, *splits), leaves, report)
    verdict = _decide(unsplit, splits, timed, choice)
    return Contest(
        kept=verdict.kept,
        plan=_plan(analysis, choice, verdict, timed, difference=difference, unroll=unroll),
        programs=timed,
    )


def _settled(choice: Choice) -> bool:
    """Whether a plan from this device and version of jax decides."""
    return choice.plan is not None and not choice.warnings


def _with_sequential(choice: Choice) -> tuple[Way, ...]:
    """The splits to build; the best one also without staggers, to tell overlap from splitting."""
    if not choice.ways or _settled(choice):
        return choice.ways if choice.plan is None or choice.plan.decision == "split" else ()
    best = choice.ways[0]
    if not any(best.staggers):
        return choice.ways
    return (*choice.ways, replace(best, staggers=(0,) * len(best.sizes), predicted_s=None))


def _decide(
    unsplit: CompiledProgram,
    splits: Sequence[CompiledProgram],
    timed: Sequence[MeasuredProgram],
    choice: Choice,
) -> _Verdict:
    if not splits:
        return _Verdict(kept=unsplit, split=unsplit, reason=choice.reason)
    if choice.reason:  # the caller or a plan has decided
        return _Verdict(kept=splits[0], split=splits[0], reason=choice.reason)
    base, *others = timed
    index = min(range(len(others)), key=lambda i: others[i].measured_s)
    fastest, gain = others[index], base.measured_s - others[index].measured_s
    noise = NOISE_FACTOR * max(base.spread_s, fastest.spread_s)
    figures = (
        f"{joined(fastest.sizes)} takes {milliseconds(fastest.measured_s)} ms, unsplit "
        f"{milliseconds(base.measured_s)} ms"
    )
    if gain > noise:
        speedup = base.measured_s / fastest.measured_s
        reason = f"{figures}: {speedup:.3f}x, more than the noise of {milliseconds(noise)} ms"
        return _Verdict(kept=splits[index], split=splits[index], reason=reason)
    lost = "slower" if gain <= 0 else f"the gain is inside the noise of {milliseconds(noise)} ms"
    return _Verdict(kept=unsplit, split=splits[index], reason=f"{figures}: {lost}")


def _plan(
    analysis: Analysis,
    choice: Choice,
    verdict: _Verdict,
    timed: Sequence[MeasuredProgram],
    *,
    difference: float | None,
    unroll: int,
) -> Plan:
    if _settled(choice) and choice.plan is not None:
        return choice.plan
    way = verdict.split.way
    by_way = {(program.sizes, program.staggers): program.measured_s for program in timed}
    whole = ((choice.batch_size,), (0,))
    return Plan(
        model=analysis.model.name,
        fingerprint=analysis.fingerprint,
        device_kind=analysis.device.kind,
        jax=jax.__version__,
        batch_size=choice.batch_size,
        sizes=way.sizes,
        staggers=way.staggers,
        unroll=unroll,
        compiler_options=dict(verdict.split.options),
        decision="unsplit" if verdict.kept.way.name == "unsplit" else "split",
        reason=verdict.reason,
        digest=choice.digest,
        predicted=Seconds(unsplit=choice.unsplit_s, split=way.predicted_s),
        measured=Seconds(
            unsplit=by_way.get(whole),
            sequential=by_way.get((way.sizes, (0,) * len(way.sizes))),
            split=by_way.get((way.sizes, way.staggers)),
        ),
        max_difference=difference,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
