"""Split against unsplit on this device: build both, compare their outputs, time them, keep one.

Where fusion has put kernels into the model, the unsplit program has them too: a split has to beat
that. What outputs are compared with is the model as it was given, which is timed as well.
"""

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
from pbjax.plan import Decision, Plan, Seconds
from pbjax.program_cache import verified_difference
from pbjax.reports import MeasuredProgram, joined, milliseconds

# A split is kept only if it gains more than this many times the spread of the timings.
NOISE_FACTOR = 2.0

# What a plan says of each program that may be kept.
_DECISIONS: dict[str, Decision] = {
    "plain": "plain",
    "unsplit": "unsplit",
    "sequential": "split",
    "split": "split",
}

PLAIN_WINS = "the model as it was given is faster than with the kernels that fusion found"


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
    if choice.plan is not None and _settled(choice):
        return _run_plan(analysis, weights, leaves, choice, choice.plan, phases)
    whole = Way(sizes=(choice.batch_size,), staggers=(0,), predicted_s=choice.unsplit_s)
    unroll = choice.plan.unroll if choice.plan else unroll
    ways = _with_sequential(choice)
    given = replace(whole, plain=True, predicted_s=None)
    total = 1 + analysis.fused + len(ways)
    with phases.phase("compile", total) as report:
        unsplit = compile_unsplit(analysis, leaves, whole)
        plain = [compile_unsplit(analysis, leaves, given)] if analysis.fused else []
        splits = []
        for way in ways:
            report(total - len(ways) + len(splits), total, f"{way.name} {way.sizes}")
            splits.append(compile_split(analysis, weights, leaves, way, unroll=unroll))
    built = (*plain, unsplit, *splits)
    with phases.phase("verify") as report:
        difference = verify(analysis, leaves, built[1:], built[0], report)
    timed: tuple[MeasuredProgram, ...] = ()
    if len(built) > 1:
        with phases.phase("measure") as report:
            timed = measure(built, leaves, report)
    verdict = _decide(built[: len(built) - len(splits)], splits, timed, choice)
    return Contest(
        kept=verdict.kept,
        plan=_plan(analysis, choice, verdict, timed, difference=difference, unroll=unroll),
        programs=timed,
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
    whole = Way(sizes=(choice.batch_size,), staggers=(0,), predicted_s=choice.unsplit_s)
    given = replace(whole, plain=True, predicted_s=None)
    with phases.phase("compile") as report:
        if choice.ways and plan.decision == "split":
            way = choice.ways[0]
            kept = compile_split(analysis, weights, leaves, way, unroll=plan.unroll)
        else:
            way = given if plan.decision == "plain" or not analysis.fused else whole
            kept = compile_unsplit(analysis, leaves, way)
        reference = None
        if way != given and verified_difference(kept.key) is None:
            report(1, 2, "the model as given, to compare with")
            reference = compile_unsplit(analysis, leaves, given)
    if reference is not None:
        with phases.phase("verify") as report:
            verify(analysis, leaves, (kept,), reference, report)
    return Contest(kept=kept, plan=plan, programs=())


def _settled(choice: Choice) -> bool:
    """Whether a plan from this device and version of jax decides."""
    return choice.plan is not None and not choice.warnings


def _with_sequential(choice: Choice) -> tuple[Way, ...]:
    """The splits to build; the best one also without staggers, to tell overlap from splitting."""
    best = choice.ways[0] if choice.ways else None
    if best is None or not any(best.staggers):
        return choice.ways
    return (*choice.ways, replace(best, staggers=(0,) * len(best.sizes), predicted_s=None))


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
        reason = f"{choice.reason}; {PLAIN_WINS}" if unsplit.way.plain else choice.reason
        return _Verdict(kept=unsplit, split=unsplit, reason=reason)
    base, others = timed[place], timed[len(wholes) :]
    index = min(range(len(others)), key=lambda i: others[i].measured_s)
    fastest, gain = others[index], base.measured_s - others[index].measured_s
    noise = NOISE_FACTOR * max(base.spread_s, fastest.spread_s)
    figures = (
        f"{joined(fastest.sizes)} takes {milliseconds(fastest.measured_s)} ms, {base.name} "
        f"{milliseconds(base.measured_s)} ms"
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
    unroll: int,
) -> Plan:
    way = verdict.split.way
    by_way = {(p.name, p.sizes, p.staggers): p.measured_s for p in timed}
    whole = (choice.batch_size,), (0,)
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
        decision=_DECISIONS[verdict.kept.way.name],
        reason=verdict.reason,
        digest=choice.digest,
        predicted=Seconds(unsplit=choice.unsplit_s, split=way.predicted_s),
        measured=Seconds(
            plain=by_way.get(("plain", *whole)),
            unsplit=by_way.get(("unsplit", *whole)),
            sequential=by_way.get(("sequential", way.sizes, (0,) * len(way.sizes))),
            split=by_way.get((way.name, way.sizes, way.staggers)) if len(way.sizes) > 1 else None,
        ),
        max_difference=difference,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
