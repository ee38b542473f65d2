"""`optimize` for a function that carries state: interleaved sub-batches against the whole batch."""

import datetime
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import SupportsIndex

import jax
from jaxtyping import Array

from pbjax.decode.interleave import Role
from pbjax.decode.interleaved_program import role_of
from pbjax.decode.programs import (
    Runner,
    StepProgram,
    Timed,
    check_room,
    differences,
    lower_interleaved,
    lower_unsplit,
)
from pbjax.decode.report import StepReport
from pbjax.decode.search import SpecSearch, StepChoice, choose
from pbjax.decode.state import OptimizedStep, StateLayout, find_state
from pbjax.planning.plan import Decision, Plan, Seconds
from pbjax.program.analysis import Analysis
from pbjax.runtime.measured_programs import MeasuredProgram, milliseconds
from pbjax.runtime.phases import Phases
from pbjax.runtime.timing import Timing
from pbjax.tuning.autotune import NOISE_FACTOR, verify_fusion
from pbjax.tuning.request import arrays

# What a plan says of each program that may be kept.
_DECISIONS: dict[str, Decision] = {"plain": "plain", "unsplit": "unsplit", "interleaved": "split"}


def optimize_step(
    analysis: Analysis,
    inputs: Sequence[object],
    state: int,
    *,
    phases: Phases,
    split: Sequence[SupportsIndex] | None,
    plan: Plan | None,
) -> OptimizedStep:
    """Plans, compiles, checks and measures a step; see `pbjax.optimize`.

    Args:
      analysis: The function, taken apart.
      inputs: Example inputs.
      state: Which of them is carried from call to call.
      phases: Clocks the work.
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
        whole = find_state(analysis, inputs, state)
    leaves = arrays(inputs)
    check_room(analysis, whole, leaves)
    if plan is None:
        verify_fusion(analysis, phases)
    with phases.phase("search"):
        specs = SpecSearch(analysis)
        choice = choose(analysis, specs, split, plan)
    steps = _compiled(analysis, whole, leaves, specs, choice, phases)
    reference, *others = steps
    runner = Runner(analysis, leaves)
    difference: float | None = None
    if others:
        with phases.phase("verify"):
            difference = differences(analysis, runner, others, reference)
    timed: list[Timed] = []
    if choice.timed:
        with phases.phase("measure") as report:
            timed = runner.seconds(steps, report)
    kept, reason = _decide(steps, timed, choice)
    made = plan if plan is not None and not choice.timed else None
    made = made or _plan(analysis, steps, timed, (kept, reason), difference)
    return OptimizedStep(
        kept.program,
        analysis.weights,
        kept.layout,
        analysis.graph.out_tree,
        made,
        _report(
            analysis,
            choice,
            timed,
            made,
            phases,
            state_bytes=sum(leaves[i].nbytes for i in whole.inputs),
        ),
    )


def _compiled(
    analysis: Analysis,
    whole: StateLayout,
    leaves: Sequence[Array],
    specs: SpecSearch,
    choice: StepChoice,
    phases: Phases,
) -> list[StepProgram]:
    """The function as given, with kernels, and as two sub-batches, in sequence and interleaved."""
    makers = []
    if analysis.fused:
        makers.append(("plain", partial(lower_unsplit, plain=True)))
    makers.append(("unsplit", partial(lower_unsplit, predicted_s=specs.unsplit_s)))
    if choice.spec is not None:
        orders = {"sequential": choice.spec.in_sequence()} if choice.timed else {}
        for name, order in (orders | {"interleaved": choice.spec}).items():
            makers.append((name, partial(lower_interleaved, spec=order, name=name)))
    # XLA compiles one program while Python lowers the next.
    with phases.phase("compile", len(makers)) as report, ThreadPoolExecutor() as pool:
        compiling = []
        for done, (name, lower) in enumerate(makers):
            report(done, len(makers), name)
            compiling.append(pool.submit(lower(analysis, whole, leaves).compile))
        return [each.result() for each in compiling]


def _decide(
    steps: Sequence[StepProgram], timed: Sequence[Timed], choice: StepChoice
) -> tuple[StepProgram, str]:
    """The program that is kept, and why."""
    if choice.kept is not None:
        by_name = {step.name: step for step in steps}
        return by_name.get(choice.kept, by_name["unsplit"]), choice.reason
    measured = {each.step.name: each for each in timed}
    unsplit = _better_whole(measured)
    if "interleaved" not in measured:
        return unsplit.step, choice.reason
    interleaved = measured["interleaved"]
    gain = interleaved.gain(unsplit)
    base_s, split_s, noise_s = unsplit.timing.median_s, interleaved.timing.median_s, _noise_s(gain)
    figures = (
        f"interleaved {milliseconds(split_s)} ms, {unsplit.step.name} {milliseconds(base_s)} ms"
    )
    if gain.median_s > noise_s:
        return interleaved.step, f"{figures}: {base_s / split_s:.2f}x"
    inside = f"the gain is inside the noise of {milliseconds(noise_s)} ms"
    return unsplit.step, f"{figures}: {'slower' if gain.median_s <= 0 else inside}"


def _better_whole(measured: Mapping[str, Timed]) -> Timed:
    """The unsplit program with kernels, unless the function is faster as it was given."""
    fused, plain = measured["unsplit"], measured.get("plain", measured["unsplit"])
    gain = plain.gain(fused)
    return plain if gain.median_s > _noise_s(gain) else fused


def _noise_s(gain: Timing) -> float:
    return NOISE_FACTOR * gain.spread_s


def _plan(
    analysis: Analysis,
    steps: Sequence[StepProgram],
    timed: Sequence[Timed],
    decided: tuple[StepProgram, str],
    difference: float | None,
) -> Plan:
    kept, reason = decided
    sizes = steps[-1].layout.sizes
    measured = {each.step.name: each.timing.median_s for each in timed}
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
        predicted=Seconds(unsplit=predicted["unsplit"], split=predicted.get("interleaved")),
        measured=Seconds(
            plain=measured.get("plain"),
            unsplit=measured.get("unsplit"),
            sequential=measured.get("sequential"),
            split=measured.get("interleaved"),
        ),
        max_difference=difference,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _report(
    analysis: Analysis,
    choice: StepChoice,
    timed: Sequence[Timed],
    plan: Plan,
    phases: Phases,
    *,
    state_bytes: int,
) -> StepReport:
    roles = [role_of(operation) for operation in analysis.graph.operations]
    return StepReport(
        model=analysis.model.name,
        device_kind=analysis.device.kind,
        batch_size=analysis.batch.batch_size,
        state_bytes=state_bytes,
        compute_kernels=roles.count(Role.COMPUTE),
        memory_kernels=roles.count(Role.MEMORY),
        overlapped_fraction=choice.spec.overlapped_fraction if choice.spec else 0.0,
        programs=tuple(
            MeasuredProgram(
                name=each.step.name,
                sizes=each.step.layout.sizes,
                staggers=(0,) * len(each.step.layout.sizes),
                predicted_s=each.step.predicted_s,
                measured_s=each.timing.median_s,
                spread_s=each.timing.spread_s,
                temporary_bytes=each.step.temporary_bytes,
                weight_bytes=0,
                needed_bytes=each.step.needed_bytes,
                compile_s=each.step.compile_s,
            )
            for each in timed
        ),
        plan=plan,
        warnings=choice.warnings,
        phases=phases.finished(),
        fusion=analysis.fusion,
    )
