"""`optimize` for a function that carries state: woven sub-batches against the whole batch."""

import datetime
from collections.abc import Mapping, Sequence

import jax
from jaxtyping import Array

from pbjax.analysis import Analysis, analyse
from pbjax.contest import NOISE_FACTOR
from pbjax.device import Device
from pbjax.functional import Model
from pbjax.phases import Phases
from pbjax.plan import Plan, Seconds
from pbjax.reports import MeasuredProgram, milliseconds
from pbjax.step import OptimizedStep, StateLayout
from pbjax.step_programs import (
    Runner,
    StepProgram,
    WovenWay,
    check_room,
    compile_unsplit,
    compile_woven,
    differences,
    find_state,
    woven_ways,
)
from pbjax.step_reports import StepReport
from pbjax.timing import Timing
from pbjax.weave import Role
from pbjax.woven import items


def optimize_step(
    model: Model,
    inputs: Sequence[object],
    state: int,
    *,
    device: Device,
    phases: Phases,
    variables: Mapping[str, object] | None,
    batch_axes: object,
) -> OptimizedStep:
    """Plans, compiles, checks and measures a step; see `pbjax.optimize`.

    Args:
      model: The function.
      inputs: Example inputs.
      state: Which of them is carried from call to call.
      device: Peak rates for the predictions.
      phases: Clocks the work.
      variables: Of an unbound linen module.
      batch_axes: Where the batch is in the inputs.

    Returns:
      The step, as the faster of the programs runs it.

    Raises:
      InputError: The state is not returned once, or three copies of it do not fit the device.
      ModelError: The function cannot run in sub-batches.
      VerificationError: A woven program's results are not the unsplit program's.
    """
    with phases.phase("analyse"):
        analysis = analyse(model, inputs, device=device, variables=variables, batch_axes=batch_axes)
        whole = find_state(analysis, inputs, state)
    leaves = [jax.numpy.asarray(leaf) for leaf in jax.tree.leaves(inputs)]
    check_room(analysis, whole, leaves)
    with phases.phase("search"):
        ways = woven_ways(analysis)
    steps = _compiled(analysis, whole, leaves, ways, phases)
    unsplit, *others = steps
    runner = Runner(analysis, leaves)
    difference: float | None = None
    if others:
        with phases.phase("verify"):
            difference = differences(analysis, runner, others, unsplit)
    with phases.phase("measure") as report:
        timings = runner.seconds(steps, report)
    decided = _decide(steps, timings)
    plan = _plan(analysis, steps, timings, decided, difference)
    return OptimizedStep(
        decided[0].program,
        analysis.weights,
        decided[0].layout,
        analysis.graph.out_tree,
        plan,
        _report(analysis, leaves, ways, steps, timings, plan, phases),
    )


def _compiled(
    analysis: Analysis,
    whole: StateLayout,
    leaves: Sequence[Array],
    ways: Sequence[WovenWay],
    phases: Phases,
) -> list[StepProgram]:
    """The unsplit program; the best way to weave, first with the same kernels in sequence."""
    alone = sum(label.seconds for label in analysis.labels)
    best = ways[:1]
    total = 1 + 2 * len(best)
    with phases.phase("compile", total) as report:
        steps = [compile_unsplit(analysis, whole, leaves, alone)]
        for way in best:
            for name, order in (("sequential", way.in_sequence()), ("woven", way)):
                report(len(steps), total, name)
                steps.append(compile_woven(analysis, whole, leaves, order, name))
    return steps


def _decide(steps: Sequence[StepProgram], timings: Sequence[Timing]) -> tuple[StepProgram, str]:
    """The program that is kept, and why."""
    unsplit = steps[0]
    if len(steps) == 1:
        return unsplit, "no kernel of one sub-batch can share a launch with the other's"
    base, _, woven = timings
    gain, noise = base.median_s - woven.median_s, NOISE_FACTOR * (base.spread_s + woven.spread_s)
    figures = f"woven {milliseconds(woven.median_s)} ms, unsplit {milliseconds(base.median_s)} ms"
    if gain > noise:
        return steps[-1], f"{figures}: {base.median_s / woven.median_s:.2f}x"
    lost = "slower" if gain <= 0 else f"the gain is inside the noise of {milliseconds(noise)} ms"
    return unsplit, f"{figures}: {lost}"


def _plan(
    analysis: Analysis,
    steps: Sequence[StepProgram],
    timings: Sequence[Timing],
    decided: tuple[StepProgram, str],
    difference: float | None,
) -> Plan:
    kept, reason = decided
    sizes = steps[-1].layout.sizes
    measured = {step.name: t.median_s for step, t in zip(steps, timings, strict=True)}
    return Plan(
        model=analysis.model.name,
        fingerprint=analysis.fingerprint,
        device_kind=analysis.device.kind,
        jax=jax.__version__,
        batch_size=analysis.batch.batch_size,
        sizes=sizes,
        staggers=(0,) * len(sizes),
        unroll=1,
        compiler_options={},
        decision="unsplit" if kept is steps[0] else "split",
        reason=reason,
        digest="",
        predicted=Seconds(
            unsplit=steps[0].predicted_s, split=steps[-1].predicted_s if len(steps) > 1 else None
        ),
        measured=Seconds(
            unsplit=measured.get("unsplit"),
            sequential=measured.get("sequential"),
            split=measured.get("woven"),
        ),
        max_difference=difference,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _report(
    analysis: Analysis,
    leaves: Sequence[Array],
    ways: Sequence[WovenWay],
    steps: Sequence[StepProgram],
    timings: Sequence[Timing],
    plan: Plan,
    phases: Phases,
) -> StepReport:
    roles = [item.role for item in items(analysis.graph, analysis.labels)]
    return StepReport(
        model=analysis.model.name,
        device_kind=analysis.device.kind,
        batch_size=analysis.batch.batch_size,
        state_bytes=sum(leaves[i].nbytes for i in steps[0].layout.inputs),
        hosts=roles.count(Role.HOST),
        guests=roles.count(Role.GUEST),
        riding=ways[0].riding if ways else 0.0,
        programs=tuple(
            MeasuredProgram(
                name=step.name,
                sizes=step.layout.sizes,
                staggers=(0,) * len(step.layout.sizes),
                predicted_s=step.predicted_s,
                measured_s=timing.median_s,
                spread_s=timing.spread_s,
                temporary_bytes=step.temporary_bytes,
                weight_bytes=0,
                compile_s=step.compile_s,
            )
            for step, timing in zip(steps, timings, strict=True)
        ),
        plan=plan,
        phases=phases.finished(),
    )
