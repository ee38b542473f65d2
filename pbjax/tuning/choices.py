"""Which split programs are worth building: searched, given, or read from a plan."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import index
from typing import Any, SupportsIndex

import jax

from pbjax.device import Device
from pbjax.errors import InputError, InputTypeError, MemoryBudgetError, ModelError, warn
from pbjax.planning.memory import predicted_bytes
from pbjax.planning.plan import Plan
from pbjax.planning.program_summary import ProgramSummary
from pbjax.planning.search import Candidate, SearchOptions, SearchResult, best_staggers, search
from pbjax.planning.throughput import Evaluator
from pbjax.planning.timetable import Split
from pbjax.program.analysis import Analysis
from pbjax.runtime.compilation import ProgramSpec
from pbjax.tuning.measured_table import Measurements


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which split programs to build for a batch, and what that rests on.

    Attributes:
      batch_size: Rows of the batch.
      specs: Split programs to build, the one predicted to be fastest first.
      unsplit_s: Predicted seconds of the whole batch at once; None if it was not predicted.
      search: The search, if there was one.
      measurements: The table, if there was one.
      plan: A plan that decides already; nothing is timed then.
      reason: Why the decision is settled before anything is timed; empty if it is not.
      warnings: Things that changed a result or a cost.
    """

    batch_size: int
    specs: tuple[ProgramSpec, ...] = ()
    unsplit_s: float | None = None
    search: SearchResult | None = None
    measurements: Measurements | None = None
    plan: Plan | None = None
    reason: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """SHA-256 of what was searched and found; empty if nothing was searched."""
        return self.search.digest if self.search else self.plan.digest if self.plan else ""


def device_room(device: Device) -> int:
    """Bytes that programs may use: of the device, or what JAX was given of it."""
    stats = jax.devices()[0].memory_stats() or {}
    return min(device.memory_bytes, stats.get("bytes_limit", device.memory_bytes))


def searched(measurements: Measurements, batch_size: int, room: int) -> Choice:
    """The best splits that the search finds, one with two and one with three sub-batches.

    Both are built even where the unsplit batch is predicted to be faster: what is measured decides.

    Args:
      measurements: The table.
      batch_size: Rows of the batch.
      room: Bytes that the programs may use, weights included. Where they are predicted to need
        more, it is searched among those that are not; if there are none, what the compiled
        programs need decides.
    """
    summary, profile = measurements.summary, measurements.profile
    result = search(summary, profile, batch_size)
    if not _fit(summary, _split(result), room):
        with suppress(MemoryBudgetError):
            within = SearchOptions(memory_limit_bytes=room)
            result = search(summary, profile, batch_size, within)
    split = _split(result)
    split.sort(key=lambda candidate: (candidate.prediction.makespan_s, -len(candidate.staggers)))
    none = f"a batch of {batch_size} rows is too small to split"
    if result.dropped:
        none = f"no split is predicted to fit in {room / 1e9:.3g} GB"
    return Choice(
        batch_size=batch_size,
        specs=tuple(_way(candidate) for candidate in split),
        unsplit_s=_unsplit_s(measurements, batch_size),
        search=result,
        measurements=measurements,
        reason="" if split else none,
        warnings=_warnings(measurements),
    )


def _split(result: SearchResult) -> list[Candidate]:
    return [candidate for count, candidate in result.by_count.items() if count > 1]


def _fit(summary: ProgramSummary, candidates: Sequence[Candidate], room: int) -> bool:
    needed = (predicted_bytes(summary, each.split.sizes, each.staggers) for each in candidates)
    return all(num_bytes <= room for num_bytes in needed)


def _unsplit_s(measurements: Measurements, batch_size: int) -> float:
    evaluator = Evaluator(measurements.summary, measurements.profile)
    return evaluator.evaluate(Split(sizes=(batch_size,)), (0,)).makespan_s


def given_split(sizes: Sequence[SupportsIndex], batch_size: int) -> Split:
    """The split that the caller gives.

    Raises:
      InputTypeError: The sizes are no whole numbers.
      InputError: They do not add up to the batch.
    """
    split = Split(sizes=whole_numbers("split", sizes))
    if split.batch_size != batch_size:
        raise InputError(
            f"optimize(split={split.sizes}): adds up to {split.batch_size}; the example has "
            f"{batch_size} rows; give sizes that add up to them, or leave out split= to search"
        )
    return split


def whole_numbers(argument: str, values: Any) -> tuple[int, ...]:
    """Numbers that an argument of `optimize` gives, also numpy's, as Python's.

    Raises:
      InputTypeError: They are something else.
    """
    try:
        return tuple(index(value) for value in values)
    except TypeError as error:
        raise InputTypeError(
            f"optimize({argument}={values!r}): not whole numbers; a tuple of numbers of rows is "
            f"allowed; write for instance {argument}=(48, 32)"
        ) from error


def forced(analysis: Analysis, measurements: Measurements, split: Split, room: int) -> Choice:
    """The split that the caller gives, with the best staggers.

    Args:
      analysis: The model.
      measurements: The table.
      split: The sizes.
      room: As in `searched`, for the staggers.
    """
    summary, profile = measurements.summary, measurements.profile
    candidate = best_staggers(summary, profile, split)
    if not _fit(summary, (candidate,), room):
        with suppress(MemoryBudgetError):
            within = SearchOptions(memory_limit_bytes=room)
            candidate = best_staggers(summary, profile, split, within)
    return Choice(
        batch_size=analysis.batch.batch_size,
        specs=(_way(candidate),) if len(split.sizes) > 1 else (),
        unsplit_s=_unsplit_s(measurements, split.batch_size),
        measurements=measurements,
        reason=f"split={split.sizes} was given",
        warnings=_warnings(measurements),
    )


def planned(analysis: Analysis, plan: Plan) -> Choice:
    """The split of a saved plan.

    A plan from another device kind or version of jax keeps its sizes and staggers, but whether they
    pay is measured again, of which it warns.

    Raises:
      ModelError: The plan is for another model.
      InputError: The plan is for another batch size, or its staggers do not fit.
    """
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
    here = {"device_kind": analysis.device.kind, "jax": jax.__version__}
    foreign = [
        f"{name} {getattr(plan, name)!r} in the plan, {value!r} here"
        for name, value in here.items()
        if getattr(plan, name) != value
    ]
    warning = (
        f"optimize(plan=...): {' and '.join(foreign)}; its sizes and staggers are kept, and "
        "whether they pay is measured again; leave the plan out to search for those of this device"
    )
    if foreign:
        warn(warning)
    spec = ProgramSpec(
        sizes=plan.sizes,
        staggers=plan.staggers,
        predicted_s=plan.predicted.split,
        sm_budgets=plan.sm_budgets,
        unroll=plan.unroll,
        # Those of another device or version may not even be known here.
        compiler_options=None if foreign else plan.compiler_options,
    )
    return Choice(
        batch_size=plan.batch_size,
        specs=(spec,) if len(plan.sizes) > 1 else (),
        unsplit_s=plan.predicted.unsplit,
        plan=plan,
        reason="" if foreign else plan.reason,
        warnings=(warning,) if foreign else (),
    )


def _way(candidate: Candidate) -> ProgramSpec:
    return ProgramSpec(
        sizes=candidate.split.sizes,
        staggers=candidate.staggers,
        predicted_s=candidate.prediction.makespan_s,
        sm_budgets=candidate.sm_budgets,
    )


def _warnings(measurements: Measurements) -> tuple[str, ...]:
    return (measurements.warning,) if measurements.warning else ()
