"""Which sizes of two interleaved sub-batches a step is predicted to run fastest with.

Nothing is traced for a size, run or measured: the search takes milliseconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import SupportsIndex

from pbjax.decode.cost_model import Costs, Rates, SubBatches, predicted_s, rates_of
from pbjax.decode.interleave import CAPACITY, Launch, Role, interleave
from pbjax.errors import InputError
from pbjax.planning.plan import Plan
from pbjax.planning.profile_rows import measured_size
from pbjax.program.analysis import PROBE_SIZE, Analysis
from pbjax.runtime.measured_programs import milliseconds
from pbjax.tuning.choices import given_split, planned

# Sizes that are searched are multiples of a power of two of rows, at most this: products have tiles
# of 128 and 256 rows.
LARGEST_UNIT = 128
# Predictions are good to a tenth: a way that is predicted to be slower than that is not compiled.
HOPELESS = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class InterleavedSpec:
    """Two sub-batches and the order of their launches.

    Attributes:
      sizes: Rows of each.
      sub_batches: The operations of each.
      rates: Of the device.
      launches: What runs, in order.
      predicted_s: Seconds of the launches.
      overlapped_fraction: Share of the guests' seconds that rides in a host.
    """

    sizes: tuple[int, int]
    sub_batches: SubBatches
    rates: Rates
    launches: tuple[Launch, ...]
    predicted_s: float
    overlapped_fraction: float

    def in_sequence(self) -> "InterleavedSpec":
        """The same sub-batches with every operation in a launch of its own."""
        return _way(self.sizes, self.sub_batches, self.rates, capacity=0.0)


class SpecSearch:
    """Ways to run a step: the whole batch at once, and interleaved at any sizes."""

    def __init__(self, analysis: Analysis):
        """Reads the graphs that the analysis has traced."""
        self._batch_size = analysis.batch.batch_size
        sizes = max(self._batch_size, PROBE_SIZE + 1), PROBE_SIZE
        graphs = analysis.traced_at(sizes[0]).graph, analysis.traced_at(sizes[1]).graph
        self._rates = rates_of(analysis.device)
        self._items_at = cache(Costs(graphs, sizes, self._rates).items)

    @property
    def unsplit_s(self) -> float:
        """Predicted seconds of the whole batch at once."""
        return sum(item.seconds for item in self._items_at(self._batch_size))

    def best(self) -> InterleavedSpec | None:
        """The way to interleave that is predicted to be fastest; None if nothing can ride."""
        first_sizes = _first_sizes(self._batch_size)
        specs = [self.at((first, self._batch_size - first)) for first in first_sizes]
        overlapped_fraction = [spec for spec in specs if spec.overlapped_fraction > 0]
        return min(overlapped_fraction, key=lambda spec: spec.predicted_s, default=None)

    def at(self, sizes: tuple[int, int]) -> InterleavedSpec:
        """The way with these sizes, whether or not anything can ride."""
        first, second = sizes
        return _way(sizes, (self._items_at(first), self._items_at(second)), self._rates)


def _way(
    sizes: tuple[int, int], sub_batches: SubBatches, rates: Rates, capacity: float = CAPACITY
) -> InterleavedSpec:
    launches = interleave(*sub_batches, capacity=capacity)
    return InterleavedSpec(
        sizes=sizes,
        sub_batches=sub_batches,
        rates=rates,
        launches=launches,
        predicted_s=predicted_s(launches, sub_batches, rates),
        overlapped_fraction=_overlap(launches, sub_batches),
    )


def _first_sizes(batch_size: int) -> tuple[int, ...]:
    """Half of the batch and more, in steps that fill the tiles of products where there are rows.

    More rows in the first sub-batch shorten the start, in which the second waits.
    """
    unit = min(LARGEST_UNIT, 1 << max(batch_size.bit_length() - 4, 0))
    smallest = measured_size(1)
    sizes = {batch_size // 2, *range(-(-batch_size // 2 // unit) * unit, batch_size, unit)}
    return tuple(sorted(s for s in sizes if smallest <= s <= batch_size - smallest))


def _overlap(launches: Sequence[Launch], sub_batches: SubBatches) -> float:
    total = sum(
        item.seconds for sub_batch in sub_batches for item in sub_batch if item.role == Role.MEMORY
    )
    rides = 0.0
    for launch in launches:
        if launch.memory:
            item = sub_batches[launch.memory.sub_batch][launch.memory.item]
            rides += item.seconds * launch.memory.count / item.parts
    return rides / total if total else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChoice:
    """Whether to interleave the batch and how, and what that rests on.

    Attributes:
      spec: How to interleave it; None to run it whole.
      kept: Name of the program that runs, whatever it takes; None where measured seconds decide.
      reason: Why that is settled, or why nothing is interleaved; empty where seconds decide.
      timed: Whether the programs are timed; not for a plan of this device and version of jax.
      warnings: Things that changed a cost.
    """

    spec: InterleavedSpec | None
    kept: str | None = None
    reason: str = ""
    timed: bool = True
    warnings: tuple[str, ...] = ()


def choose(
    analysis: Analysis, specs: SpecSearch, split: Sequence[SupportsIndex] | None, plan: Plan | None
) -> StepChoice:
    """The given split, that of a plan, or the best one of the search if it may pay.

    Raises:
      InputTypeError: The split is no whole numbers.
      InputError: It is no split of the batch into one or two; the plan is for another batch.
      ModelError: The plan is for another function.
    """
    if split is not None:
        return _forced(specs, given_split(split, analysis.batch.batch_size).sizes)
    if plan is not None:
        return _planned(analysis, specs, plan)
    spec = specs.best()
    if spec is None:
        return StepChoice(
            spec=None, reason="no kernel of one sub-batch can share a launch with the other's"
        )
    if spec.predicted_s > HOPELESS * specs.unsplit_s:
        reason = (
            f"interleaved with {spec.sizes} is predicted to take "
            f"{milliseconds(spec.predicted_s)} ms, unsplit {milliseconds(specs.unsplit_s)} ms: "
            "not tried"
        )
        return StepChoice(spec=None, reason=reason)
    return StepChoice(spec=spec)


def _forced(specs: SpecSearch, sizes: tuple[int, ...]) -> StepChoice:
    reason = f"split={sizes} was given"
    if len(sizes) == 1:
        return StepChoice(spec=None, kept="unsplit", reason=reason)
    return StepChoice(spec=_at(specs, "split", sizes), kept="interleaved", reason=reason)


def _planned(analysis: Analysis, specs: SpecSearch, plan: Plan) -> StepChoice:
    checked = planned(analysis, plan)
    _check_interleaved(plan)
    split = len(plan.sizes) > 1 and (plan.decision == "split" or bool(checked.warnings))
    spec = _at(specs, "plan", plan.sizes) if split else None
    if checked.warnings:
        return StepChoice(spec=spec, warnings=checked.warnings)
    kept = {"split": "interleaved"}.get(plan.decision, plan.decision)
    return StepChoice(spec=spec, kept=kept, reason=plan.reason, timed=False)


def _check_interleaved(plan: Plan) -> None:
    """Refuses what a plan of a model without state may say and a step cannot do."""
    staggered = {"staggers": plan.staggers if any(plan.staggers) else ()}
    given = staggered | {
        "sm_budgets": dict(plan.sm_budgets),
        "unroll": plan.unroll if plan.unroll != 1 else None,
        "compiler_options": dict(plan.compiler_options),
    }
    if found := {name: value for name, value in given.items() if value}:
        text = ", ".join(f"{name} {value}" for name, value in found.items())
        raise InputError(
            f"optimize(state=..., plan=...): the plan has {text}; interleaved sub-batches have "
            "none of these; a plan that was saved from a step is allowed; leave out plan= to search"
        )


def _at(specs: SpecSearch, argument: str, sizes: tuple[int, ...]) -> InterleavedSpec:
    if len(sizes) != 2 or min(sizes) < measured_size(1):
        raise InputError(
            f"optimize(state=..., {argument}={sizes}): a step runs as one or two sub-batches; two "
            f"sizes of {measured_size(1)} rows or more are allowed; give such, or leave out "
            f"{argument}= to search"
        )
    first, second = sizes
    return specs.at((first, second))
