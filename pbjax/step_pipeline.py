"""`optimize` for a function that carries state: woven sub-batches against the whole batch."""

import datetime
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import SupportsIndex

import jax
from jaxtyping import Array

from pbjax.analysis import PROBE_SIZE, Analysis, analyse
from pbjax.contest import NOISE_FACTOR
from pbjax.device import Device
from pbjax.functional import Model
from pbjax.fusion import Patterns, Selection
from pbjax.phases import Phases
from pbjax.plan import Decision, Plan, Seconds
from pbjax.reports import MeasuredProgram, milliseconds
from pbjax.step import OptimizedStep, StateLayout
from pbjax.step_programs import (
    Runner,
    StepProgram,
    check_room,
    differences,
    find_state,
    lower_unsplit,
    lower_woven,
)
from pbjax.step_reports import StepReport
from pbjax.step_ways import StepChoice, Ways, choose
from pbjax.timing import Timing
from pbjax.weave import Role
from pbjax.woven import role_of

# What a plan says of each program that may be kept.
_DECISIONS: dict[str, Decision] = {"plain": "plain", "unsplit": "unsplit", "woven": "split"}


def optimize_step(
    model: Model,
    inputs: Sequence[object],
    state: int,
    *,
    device: Device,
    phases: Phases,
    variables: Mapping[str, object] | None,
    batch_axes: object,
    fuse: Patterns | Selection,
    split: Sequence[SupportsIndex] | None,
    plan: Plan | None,
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
      fuse: What to replace by kernels.
      split: Sizes of one or two sub-batches, run even if slower; searched if None.
      plan: A saved decision: nothing is searched, and nothing measured unless it was made for
        another device or version of jax.

    Returns:
      The step, as the faster of the programs runs it.

    Raises:
      InputError: The state is not returned once, three copies of it do not fit the device, or
        split or plan are not for this batch.
      ModelError: The function cannot run in sub-batches, or is not the plan's.
      VerificationError: A program's results are not the function's.
    """
    with phases.phase("analyse"):
        analysis = analyse(
            model,
            inputs,
            device=device,
            variables=variables,
            batch_axes=batch_axes,
            fuse=fuse,
        )
        whole = find_state(analysis, inputs, state)
    leaves = [jax.numpy.asarray(leaf) for leaf in jax.tree.leaves(inputs)]
    check_room(analysis, whole, leaves)
    if analysis.fused and plan is None:
        with phases.phase("verify fusion"):
            analysis.form_at(PROBE_SIZE).verify()
    with phases.phase("search"):
        ways = Ways(analysis)
        choice = choose(analysis, ways, split, plan)
    steps = _compiled(analysis, whole, leaves, ways, choice, phases)
    reference, *others = steps
    runner = Runner(analysis, leaves)
    difference: float | None = None
    if others:
        with phases.phase("verify"):
            difference = differences(analysis, runner, others, reference)
    timings: list[Timing] = []
    if choice.timed:
        with phases.phase("measure") as report:
            timings = runner.seconds(steps, report)
    kept, reason = _decide(steps, timings, choice)
    made = plan if plan is not None and not choice.timed else None
    made = made or _plan(analysis, steps, timings, (kept, reason), difference)
    return OptimizedStep(
        kept.program,
        analysis.weights,
        kept.layout,
        analysis.graph.out_tree,
        made,
        _report(analysis, leaves, choice, steps, timings, made, phases),
    )


def _compiled(
    analysis: Analysis,
    whole: StateLayout,
    leaves: Sequence[Array],
    ways: Ways,
    choice: StepChoice,
    phases: Phases,
) -> list[StepProgram]:
    """The function as given, with kernels, and woven, first with the same kernels in sequence."""
    makers = []
    if analysis.fused:
        makers.append(("plain", partial(lower_unsplit, plain=True)))
    makers.append(("unsplit", partial(lower_unsplit, predicted_s=ways.unsplit_s)))
    if choice.way is not None:
        orders = {"sequential": choice.way.in_sequence()} if choice.timed else {}
        for name, order in (orders | {"woven": choice.way}).items():
            makers.append((name, partial(lower_woven, way=order, name=name)))
    # XLA compiles one program while Python lowers the next.
    with phases.phase("compile", len(makers)) as report, ThreadPoolExecutor() as pool:
        compiling = []
        for done, (name, lower) in enumerate(makers):
            report(done, len(makers), name)
            compiling.append(pool.submit(lower(analysis, whole, leaves).compile))
        return [each.result() for each in compiling]


def _decide(
    steps: Sequence[StepProgram], timings: Sequence[Timing], choice: StepChoice
) -> tuple[StepProgram, str]:
    """The program that is kept, and why."""
    if choice.kept is not None:
        by_name = {step.name: step for step in steps}
        return by_name.get(choice.kept, by_name["unsplit"]), choice.reason
    measured = {step.name: (step, timing) for step, timing in zip(steps, timings, strict=True)}
    unsplit, base = _better_whole(measured)
    if "woven" not in measured:
        return unsplit, choice.reason
    step, woven = measured["woven"]
    gain, noise = base.median_s - woven.median_s, _noise(base, woven)
    figures = (
        f"woven {milliseconds(woven.median_s)} ms, {unsplit.name} {milliseconds(base.median_s)} ms"
    )
    if gain > noise:
        return step, f"{figures}: {base.median_s / woven.median_s:.2f}x"
    lost = "slower" if gain <= 0 else f"the gain is inside the noise of {milliseconds(noise)} ms"
    return unsplit, f"{figures}: {lost}"


def _better_whole(measured: Mapping[str, tuple[StepProgram, Timing]]) -> tuple[StepProgram, Timing]:
    """The unsplit program with kernels, unless the function is faster as it was given."""
    fused, plain = measured["unsplit"], measured.get("plain", measured["unsplit"])
    gain = fused[1].median_s - plain[1].median_s
    return plain if gain > _noise(fused[1], plain[1]) else fused


def _noise(a: Timing, b: Timing) -> float:
    return NOISE_FACTOR * max(a.spread_s, b.spread_s)


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
    predicted = {step.name: step.predicted_s for step in steps}
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
        decision=_DECISIONS[kept.name],
        reason=reason,
        digest="",
        predicted=Seconds(unsplit=predicted["unsplit"], split=predicted.get("woven")),
        measured=Seconds(
            plain=measured.get("plain"),
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
    choice: StepChoice,
    steps: Sequence[StepProgram],
    timings: Sequence[Timing],
    plan: Plan,
    phases: Phases,
) -> StepReport:
    roles = [role_of(operation) for operation in analysis.graph.operations]
    return StepReport(
        model=analysis.model.name,
        device_kind=analysis.device.kind,
        batch_size=analysis.batch.batch_size,
        state_bytes=sum(leaves[i].nbytes for i in steps[0].layout.inputs),
        hosts=roles.count(Role.HOST),
        guests=roles.count(Role.GUEST),
        riding=choice.way.riding if choice.way else 0.0,
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
            for step, timing in zip(steps, timings, strict=bool(timings))
        ),
        plan=plan,
        warnings=choice.warnings,
        phases=phases.finished(),
        fusion=analysis.fusion,
    )
