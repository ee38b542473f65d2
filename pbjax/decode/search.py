"""Which sizes of two interleaved sub-batches a step is predicted to run fastest with.

Nothing is traced for a size, run or measured: the search takes milliseconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from pbjax.decode.cost_model import Costs, Rates, SubBatches, predicted_s, rates_of
from pbjax.decode.interleave import CAPACITY, Launch, Role, interleave
from pbjax.errors import InputError
from pbjax.planning.plan import Plan
from pbjax.planning.profile_rows import measured_size
from pbjax.program.analysis import PROBE_SIZE, Analysis
from pbjax.runtime.compilation import ProgramSpec
from pbjax.runtime.measured_programs import milliseconds
from pbjax.tuning.request import Request
from pbjax.tuning.shortlist import Shortlist, given_split, planned, too_small
from pbjax.tuning.whole_batch import as_written, no_sub_batches, whole_programs

# Sizes that are searched are multiples of a power of two of rows, at most this: products have tiles
# of 128 and 256 rows.
LARGEST_UNIT = 128
# Predictions are good to a tenth: sub-batches predicted to be slower than that are not compiled.
HOPELESS = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class InterleavedSpec:
    """Two sub-batches and the order of their launches.

    Attributes:
      sizes: Rows of each.
      sub_batches: The operations of each.
      rates: Rates of the device.
      launches: The launches, in order.
      predicted_s: Seconds of the launches.
      overlapped_fraction: Share of the memory kernels' seconds that runs beside compute kernels.
    """

    sizes: tuple[int, int]
    sub_batches: SubBatches
    rates: Rates
    launches: tuple[Launch, ...]
    predicted_s: float
    overlapped_fraction: float

    def in_sequence(self) -> "InterleavedSpec":
        """The same sub-batches with every operation in a launch of its own."""
        return _spec(self.sizes, self.sub_batches, self.rates, capacity=0.0)


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
        """The sizes that are predicted to be fastest; None if nothing can overlap."""
        first_sizes = _first_sizes(self._batch_size)
        specs = [self.at((first, self._batch_size - first)) for first in first_sizes]
        overlapped_fraction = [spec for spec in specs if spec.overlapped_fraction > 0]
        return min(overlapped_fraction, key=lambda spec: spec.predicted_s, default=None)

    def at(self, sizes: tuple[int, ...]) -> InterleavedSpec:
        """The launches of these sizes, whether or not anything overlaps."""
        first, second = sizes
        return _spec((first, second), (self._items_at(first), self._items_at(second)), self._rates)


def _spec(
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
    overlapped = 0.0
    for launch in launches:
        if launch.memory:
            item = sub_batches[launch.memory.sub_batch][launch.memory.item]
            overlapped += item.seconds * launch.memory.count / item.parts
    return overlapped / total if total else 0.0


def step_shortlist(request: Request, analysis: Analysis, specs: SpecSearch | None) -> Shortlist:
    """The given split, that of a plan, or the best one of the search if it may pay.

    Args:
      request: What `optimize` is asked for.
      analysis: The step.
      specs: Predicted seconds of two sub-batches at any sizes; None if the batch has none.

    Raises:
      InputError: It is no split of the batch into one or two; the plan is for another batch.
      ModelError: The plan is for another function; a split is asked for and the batch has none.
    """
    if specs is None:
        return _unsplittable(request, analysis)
    if request.plan is not None:
        return _planned(request.plan, planned(analysis, request.plan, can_scan=False), specs)
    unsplit = Shortlist(
        batch_size=analysis.batch.batch_size,
        wholes=whole_programs(analysis, specs.unsplit_s, can_scan=False),
    )
    if (split := given_split(request, analysis)) is not None:
        return _forced(split.sizes, unsplit, specs)
    best = specs.best()
    if best is None:
        return replace(unsplit, reason=_why_none(unsplit.batch_size))
    if best.predicted_s > HOPELESS * specs.unsplit_s:
        predicted_ms, unsplit_ms = map(milliseconds, (best.predicted_s, specs.unsplit_s))
        slower = (
            f"interleaved with {best.sizes} is predicted to take {predicted_ms} ms, unsplit "
            f"{unsplit_ms} ms: not tried"
        )
        return replace(unsplit, reason=slower)
    return _tried(unsplit, best)


def _why_none(batch_size: int) -> str:
    if batch_size < 2 * measured_size(1):
        return too_small(batch_size)
    return "no kernel of one sub-batch can share a launch with the other's"


def _unsplittable(request: Request, analysis: Analysis) -> Shortlist:
    """The whole batch of a step whose rows depend on each other."""
    if request.plan is not None:
        return planned(analysis, request.plan)
    given_split(request, analysis)  # Refused if it has several sizes.
    return Shortlist(
        batch_size=analysis.batch.batch_size,
        wholes=whole_programs(analysis),
        reason=no_sub_batches(analysis),
    )


def _tried(shortlist: Shortlist, found: InterleavedSpec) -> Shortlist:
    """Adds two sub-batches interleaved, and one after the other, to tell what overlap gains.

    The latter is never kept: a plan of a step has no word for it.
    """
    sequential = ProgramSpec(
        sizes=found.sizes, staggers=(0, 0), predicted_s=found.in_sequence().predicted_s
    )
    interleaved = replace(sequential, interleaved=True, predicted_s=found.predicted_s)
    return replace(shortlist, splits=(interleaved,), compared=(sequential,))


def _forced(sizes: tuple[int, ...], unsplit: Shortlist, specs: SpecSearch) -> Shortlist:
    wholes = as_written(unsplit.wholes)
    unsplit = replace(unsplit, wholes=wholes, reason=f"split={sizes} was given")
    if len(sizes) == 1:
        return unsplit
    return replace(_tried(unsplit, _at(specs, "split", sizes)), forced=True)


def _planned(plan: Plan, found: Shortlist, specs: SpecSearch) -> Shortlist:
    """The shortlist of a plan for a step, whose splits are interleaved."""
    _check_interleaved(plan)
    if not found.splits:
        return found
    tried = _tried(found, _at(specs, "plan", plan.sizes))
    return replace(tried, compared=()) if found.plan else tried


def _check_interleaved(plan: Plan) -> None:
    """Refuses what a plan of a model without state may say and a step cannot do."""
    given = {
        "staggers": plan.staggers if any(plan.staggers) else (),
        "sm_budgets": dict(plan.sm_budgets),
        "unroll": plan.unroll if plan.unroll != 1 else None,
        "compiler_options": dict(plan.compiler_options) if plan.decision == "split" else {},
        "layers": plan.layers if plan.layers == "scanned" else None,
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
