"""Ways to run a step as two woven sub-batches: which sizes, and which is predicted to be fastest.

Nothing is traced for a size, run or measured: the search takes milliseconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import SupportsIndex

from pbjax.decode.cost_model import Costs, Lanes, Rates, predicted_s, rates_of
from pbjax.decode.interleave import CAPACITY, Launch, Role, weave
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
class WovenWay:
    """Two sub-batches and the order of their launches.

    Attributes:
      sizes: Rows of each.
      lanes: The operations of each.
      rates: Of the device.
      launches: What runs, in order.
      predicted_s: Seconds of the launches.
      riding: Share of the guests' seconds that rides in a host.
    """

    sizes: tuple[int, int]
    lanes: Lanes
    rates: Rates
    launches: tuple[Launch, ...]
    predicted_s: float
    riding: float

    def in_sequence(self) -> "WovenWay":
        """The same sub-batches with every operation in a launch of its own."""
        return _way(self.sizes, self.lanes, self.rates, capacity=0.0)


class Ways:
    """Ways to run a step: the whole batch at once, and woven at any sizes."""

    def __init__(self, analysis: Analysis):
        """Reads the graphs that the analysis has traced."""
        self._batch_size = analysis.batch.batch_size
        sizes = max(self._batch_size, PROBE_SIZE + 1), PROBE_SIZE
        graphs = analysis.form_at(sizes[0]).graph, analysis.form_at(sizes[1]).graph
        self._rates = rates_of(analysis.device)
        self._items_at = cache(Costs(graphs, sizes, self._rates).items)

    @property
    def unsplit_s(self) -> float:
        """Predicted seconds of the whole batch at once."""
        return sum(item.seconds for item in self._items_at(self._batch_size))

    def best(self) -> WovenWay | None:
        """The way to weave that is predicted to be fastest; None if nothing can ride."""
        first_sizes = _first_sizes(self._batch_size)
        ways = [self.at((first, self._batch_size - first)) for first in first_sizes]
        riding = [way for way in ways if way.riding > 0]
        return min(riding, key=lambda way: way.predicted_s, default=None)

    def at(self, sizes: tuple[int, int]) -> WovenWay:
        """The way with these sizes, whether or not anything can ride."""
        first, second = sizes
        return _way(sizes, (self._items_at(first), self._items_at(second)), self._rates)


def _way(
    sizes: tuple[int, int], lanes: Lanes, rates: Rates, capacity: float = CAPACITY
) -> WovenWay:
    launches = weave(*lanes, capacity=capacity)
    return WovenWay(
        sizes=sizes,
        lanes=lanes,
        rates=rates,
        launches=launches,
        predicted_s=predicted_s(launches, lanes, rates),
        riding=_riding(launches, lanes),
    )


def _first_sizes(batch_size: int) -> tuple[int, ...]:
    """Half of the batch and more, in steps that fill the tiles of products where there are rows.

    More rows in the first sub-batch shorten the start, in which the second waits.
    """
    unit = min(LARGEST_UNIT, 1 << max(batch_size.bit_length() - 4, 0))
    smallest = measured_size(1)
    sizes = {batch_size // 2, *range(-(-batch_size // 2 // unit) * unit, batch_size, unit)}
    return tuple(sorted(s for s in sizes if smallest <= s <= batch_size - smallest))


def _riding(launches: Sequence[Launch], lanes: Lanes) -> float:
    total = sum(item.seconds for lane in lanes for item in lane if item.role == Role.GUEST)
    rides = 0.0
    for launch in launches:
        if launch.guest:
            item = lanes[launch.guest.lane][launch.guest.item]
            rides += item.seconds * launch.guest.count / item.parts
    return rides / total if total else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChoice:
    """Whether to weave the batch and how, and what that rests on.

    Attributes:
      way: How to weave it; None to run it whole.
      kept: Name of the program that runs, whatever it takes; None where measured seconds decide.
      reason: Why that is settled, or why nothing is woven; empty where seconds decide.
      timed: Whether the programs are timed; not for a plan of this device and version of jax.
      warnings: Things that changed a cost.
    """

    way: WovenWay | None
    kept: str | None = None
    reason: str = ""
    timed: bool = True
    warnings: tuple[str, ...] = ()


def choose(
    analysis: Analysis, ways: Ways, split: Sequence[SupportsIndex] | None, plan: Plan | None
) -> StepChoice:
    """The given split, that of a plan, or the best one of the search if it may pay.

    Raises:
      InputTypeError: The split is no whole numbers.
      InputError: It is no split of the batch into one or two; the plan is for another batch.
      ModelError: The plan is for another function.
    """
    if split is not None:
        return _forced(ways, given_split(split, analysis.batch.batch_size).sizes)
    if plan is not None:
        return _planned(analysis, ways, plan)
    way = ways.best()
    if way is None:
        return StepChoice(
            way=None, reason="no kernel of one sub-batch can share a launch with the other's"
        )
    if way.predicted_s > HOPELESS * ways.unsplit_s:
        reason = (
            f"woven is predicted to take {milliseconds(way.predicted_s)} ms with {way.sizes}, "
            f"unsplit {milliseconds(ways.unsplit_s)} ms: not tried"
        )
        return StepChoice(way=None, reason=reason)
    return StepChoice(way=way)


def _forced(ways: Ways, sizes: tuple[int, ...]) -> StepChoice:
    reason = f"split={sizes} was given"
    if len(sizes) == 1:
        return StepChoice(way=None, kept="unsplit", reason=reason)
    return StepChoice(way=_at(ways, "split", sizes), kept="woven", reason=reason)


def _planned(analysis: Analysis, ways: Ways, plan: Plan) -> StepChoice:
    checked = planned(analysis, plan)
    _check_woven(plan)
    split = len(plan.sizes) > 1 and (plan.decision == "split" or bool(checked.warnings))
    way = _at(ways, "plan", plan.sizes) if split else None
    if checked.warnings:
        return StepChoice(way=way, warnings=checked.warnings)
    kept = {"split": "woven"}.get(plan.decision, plan.decision)
    return StepChoice(way=way, kept=kept, reason=plan.reason, timed=False)


def _check_woven(plan: Plan) -> None:
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
            f"optimize(state=..., plan=...): the plan has {text}; woven sub-batches have none of "
            "these; a plan that was saved from a step is allowed; leave out plan= to search"
        )


def _at(ways: Ways, argument: str, sizes: tuple[int, ...]) -> WovenWay:
    if len(sizes) != 2 or min(sizes) < measured_size(1):
        raise InputError(
            f"optimize(state=..., {argument}={sizes}): a step runs as one or two sub-batches; two "
            f"sizes of {measured_size(1)} rows or more are allowed; give such, or leave out "
            f"{argument}= to search"
        )
    first, second = sizes
    return ways.at((first, second))
