"""All splits of a batch with their staggers and SM budgets, predicted on demand.

The sizes of a candidate are unordered: two sub-batches may swap places if their staggers go with
them, and the same number may be added to all staggers. For each sizes the savings of the pairs of
sub-batches bound every choice of staggers, and only those that may beat the best known are
predicted. The SM budgets are those of the table's rows. `search` decides which sizes to visit.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import permutations, product

from pbjax.errors import InputError, MemoryBudgetError
from pbjax.planning.corun_pairs import measured_budgets
from pbjax.planning.memory import predicted_bytes
from pbjax.planning.profile_table import Profile
from pbjax.planning.program_summary import ProgramSummary
from pbjax.planning.throughput import Evaluator, Prediction
from pbjax.planning.timetable import MAX_SUB_BATCHES, Split, check_staggers

type Sizes = tuple[int, ...]
type Staggers = tuple[int, ...]

# Makespans nearer than this share of the unsplit one count as equal: the order of sums moves them.
TIE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A split with its staggers and budgets, and its prediction.

    Attributes:
      split: Sizes of the sub-batches.
      staggers: How many stages each runs ahead.
      prediction: The times predicted from the table.
      sm_budgets: SMs by resource class, as in `Plan`; empty for no budgets.
    """

    split: Split
    staggers: Staggers
    prediction: Prediction
    sm_budgets: Mapping[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """The limits and settings of a search.

    Attributes:
      max_sub_batches: Most sub-batches of a candidate.
      staggers: Fixed staggers; a candidate with fewer sub-batches takes the first of them. None
        searches them.
      sm_budgets: Fixed budgets, empty for no budgets; None searches those of the table.
      first_window: Window that a slide starts with, as a share of the batch.
      decay: Factor on the window when no neighbour is better.
      saturation_rounds: A slide ends when its last rounds, this many, gain too little together.
      epsilon: Least gain of those rounds, as a share of the makespan.
      max_evaluations: Most predictions and bounds; fewer where the space is small.
      memory_limit_bytes: Candidates that need more device memory are dropped; None allows all.
    """

    max_sub_batches: int = MAX_SUB_BATCHES
    staggers: Staggers | None = None
    sm_budgets: Mapping[str, int] | None = None
    first_window: float = 0.125
    decay: float = 0.5
    saturation_rounds: int = 8
    epsilon: float = 1e-4
    max_evaluations: int = 4000
    memory_limit_bytes: int | None = None

    def __post_init__(self):
        """Refuses options with which a search would not end."""
        wrong = {
            "max_sub_batches": not 1 <= self.max_sub_batches <= MAX_SUB_BATCHES,
            "first_window": not 0 < self.first_window <= 1,
            "decay": not 0 < self.decay < 1,
            "saturation_rounds": self.saturation_rounds < 1,
            "epsilon": not self.epsilon >= 0,
            "max_evaluations": self.max_evaluations < 1,
        }
        for name in (name for name, is_wrong in wrong.items() if is_wrong):
            raise InputError(
                f"SearchOptions({name}={getattr(self, name)}): out of range; one to "
                f"{MAX_SUB_BATCHES} sub-batches, shares between 0 and 1 and positive counts are "
                "allowed; leave the option out for its default"
            )


# The number of the budgets, then the staggers.
type _Spec = tuple[int, Staggers]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The best known budgets and staggers of some sizes; makespans are compared by `rounded`."""

    rounded: int
    makespan_s: float
    spec: _Spec


class Candidates:
    """The candidates of one batch, their predictions so far, and the number of predictions.

    Attributes:
      evaluator: Predicts without budgets.
      counts: Allowed numbers of sub-batches.
      choices: All staggers for each number of sub-batches.
      smallest: Rows of the smallest sub-batch.
      visit_cost: Least number of predictions and bounds that a visit of sizes takes.
      evaluations: Number of predictions of one split with one choice of staggers and budgets.
      bounds: Number of sizes whose staggers were bounded at once, counted for each choice of
        budgets.
      dropped: Number of candidates over the memory limit.
      found: Sizes that were predicted, with their best known budgets and staggers.
    """

    def __init__(
        self, summary: ProgramSummary, profile: Profile, batch_size: int, options: SearchOptions
    ):
        """Lays out the space of candidates.

        Raises:
          InputError: The batch was not measured, or the fixed staggers do not fit the program.
        """
        fixed = options.sm_budgets
        budgets = measured_budgets(summary, profile) if fixed is None else (fixed,)
        self._evaluators = [Evaluator(summary, profile, each) for each in budgets]
        self._useful = sum(not each.saves_nothing for each in self._evaluators)
        self.visit_cost = max(1, self._useful)
        evaluator = self.evaluator = self._evaluators[0]
        self.batch_size = batch_size
        self.options = options
        self.evaluations = self.bounds = self.dropped = 0
        self.found: dict[Sizes, _Found] = {}
        self.smallest = evaluator.smallest_size
        most = options.max_sub_batches
        if options.staggers is not None:
            check_staggers(len(evaluator.summary.block), options.staggers)
            most = min(most, len(options.staggers))
        self.counts = [n for n in range(1, most + 1) if n == 1 or n * self.smallest <= batch_size]
        self.choices = {n: self._choices(n) for n in self.counts}
        self._tie_s = evaluator.path_seconds(batch_size) * TIE or TIE
        self._values: dict[Sizes, float] = {}
        self._least: dict[int, int] = {}

    def all_sizes(self, count: int) -> Iterator[Sizes]:
        """Every split of the batch into this many sub-batches, sizes falling."""
        if count == 1:
            yield (self.batch_size,)
        elif count == 2:
            yield from self._in_two(self.batch_size, self.smallest)
        else:
            for last in range(self.smallest, self.batch_size // 3 + 1):
                for pair in self._in_two(self.batch_size - last, last):
                    yield (*pair, last)

    def num_sizes(self, count: int) -> int:
        """How many splits into this many sub-batches there are."""
        low, batch = self.smallest, self.batch_size
        if count == 3:
            return sum((batch - last) // 2 - last + 1 for last in range(low, batch // 3 + 1))
        return 1 if count == 1 else batch // 2 - low + 1

    def num_candidates(self) -> int:
        """How many splits there are, each counted with each choice of staggers and budgets."""
        specs = {
            n: len(c) * (len(self._evaluators) if n > 1 else 1) for n, c in self.choices.items()
        }
        return sum(self.num_sizes(count) * specs[count] for count in self.counts)

    def predict_all(self, sizes: Sizes) -> None:
        """Predicts these sizes with every choice of staggers and budgets."""
        for staggers in self._allowed(sizes):
            for number in self._numbers(sizes):
                self._predict(sizes, (number, staggers))

    def visit(self, sizes: Sizes) -> float:
        """The makespan of these sizes, or a lower bound that is worse than the best known."""
        value = self._values.get(sizes)
        if value is None:
            value = self._values[sizes] = self._visit(sizes)
        return value

    def first(self, sizes: list[Sizes]) -> Sizes:
        """The best of predicted sizes by makespan, then balance, then bubbles, then their order."""
        least = min(self.found[each].rounded for each in sizes)
        return min([s for s in sizes if self.found[s].rounded == least], key=self._tie_order)

    def candidate(self, sizes: Sizes) -> Candidate:
        """The best candidate of these sizes; `rank` decides between equal makespans."""
        makespans = {self.found[sizes].spec: self.found[sizes].rounded}
        for bound, spec in self._promising(sizes):
            if bound > self.found[sizes].rounded:
                break
            makespans[spec] = self._rounded(self._predict(sizes, spec))
        least = min(makespans.values())
        equal = [spec for spec, makespan in makespans.items() if makespan == least]
        ideal = self.evaluator.ideal_seconds

        def rank(spec: _Spec) -> tuple[int, int, int, Staggers]:
            # No budgets first. Then the staggers that set most stages of different classes beside
            # each other, and the most different staggers: overlap that was not measured can only
            # come from there.
            number, each = spec
            return number, self._rounded(ideal(sizes, each)), -len(set(each)), each

        number, staggers = min(equal, key=rank)
        if self.options.staggers is not None:
            sizes, staggers = _as_fixed(sizes, staggers, self.options.staggers)
        split, evaluator = Split(sizes=sizes), self._evaluators[number]
        return Candidate(
            split=split,
            staggers=staggers,
            prediction=evaluator.evaluate(split, staggers),
            sm_budgets=evaluator.sm_budgets if len(sizes) > 1 else {},
        )

    def refusal(self) -> MemoryBudgetError:
        """The error that no candidate is within the memory limit."""
        needed = predicted_bytes(self.evaluator.summary, (self.batch_size,), (0,))
        return MemoryBudgetError(
            f"search(batch_size={self.batch_size}): {needed} bytes are needed unsplit, and too "
            f"many however it is split; {self.options.memory_limit_bytes} bytes are allowed; lower "
            "the batch or raise memory_limit_bytes"
        )

    def _choices(self, count: int) -> list[Staggers]:
        fixed = self.options.staggers
        if fixed is not None:
            every = sorted(set(permutations(fixed[:count])))
        else:
            stages = range(len(self.evaluator.summary.block))
            every = [each for each in product(stages, repeat=count) if min(each) == 0]
        # The memory of staggered sub-batches does not depend on their sizes.
        parts = (self.batch_size - count + 1, *[1] * (count - 1))
        if count == 1 or self._fits(parts, (*[0] * (count - 1), 1)):
            return every
        in_turns = [each for each in every if not any(each)]
        self.dropped += (len(every) - len(in_turns)) * self.num_sizes(count)
        return in_turns

    def _in_two(self, total: int, low: int) -> Iterator[Sizes]:
        return ((total - size, size) for size in range(low, total // 2 + 1))

    def _allowed(self, sizes: Sizes) -> list[Staggers]:
        """The staggers with which these sizes are within the memory limit: all that are left.

        Or none: sub-batches that take turns need no more memory than the same ones staggered.
        """
        choices = self.choices[len(sizes)]
        if self._fits(sizes, (0,) * len(sizes)):
            return choices
        self.dropped += len(choices)
        return []

    def _fits(self, sizes: Sizes, staggers: Staggers) -> bool:
        limit = self.options.memory_limit_bytes
        return limit is None or predicted_bytes(self.evaluator.summary, sizes, staggers) <= limit

    def _numbers(self, sizes: Sizes) -> list[int]:
        """The numbers of the budgets at which these sizes were measured."""
        if len(sizes) == 1:
            return [0]
        every = enumerate(self._evaluators)
        return [i for i, each in every if not each.sm_budgets or each.covers(sizes)]

    def _visit(self, sizes: Sizes) -> float:
        least = self._least.get(len(sizes), math.inf)
        numbers, choices = self._numbers(sizes), self.choices[len(sizes)]
        # With one choice its prediction costs no more than a bound.
        if len(choices) * len(numbers) == 1:
            specs = [(numbers[0], staggers) for staggers in self._allowed(sizes)]
            return min((self._predict(sizes, spec) for spec in specs), default=math.inf)
        if self._useful:
            evaluators = [self._evaluators[i] for i in numbers]
            self.bounds += sum(not each.saves_nothing for each in evaluators)
            bound = min(self._bound(sizes, each) for each in evaluators)
            if self._rounded(bound) > least:
                return bound
        return self._predict_promising(sizes, least)

    def _predict_promising(self, sizes: Sizes, least: float | int) -> float:
        value = math.inf
        for bound, spec in self._promising(sizes):
            known = self.found.get(sizes)
            if bound > least or (known and bound >= known.rounded):
                return min(value, bound * self._tie_s)
            value = min(value, self._predict(sizes, spec))
        return value

    def _promising(self, sizes: Sizes) -> Iterator[tuple[int, _Spec]]:
        """All allowed budgets and staggers with bounds on their rounded makespans, least first."""
        allowed = self._allowed(sizes)
        alone = sum([self.evaluator.path_seconds(size) for size in sizes])
        if len(sizes) == 1 or not self._useful:
            rounded = self._rounded(alone)
            yield from ((rounded, (0, staggers)) for staggers in allowed)
            return
        saved = []
        for number in self._numbers(sizes):
            each = _most_saved(self._evaluators[number], sizes, allowed)
            saved += [(-most, number, i) for i, most in enumerate(each)]
        # Yielded one by one: most callers stop after a few.
        for less, number, i in sorted(saved):
            yield self._rounded(alone + less), (number, allowed[i])

    def _bound(self, sizes: Sizes, evaluator: Evaluator) -> float:
        alone, totals = evaluator.path_seconds, evaluator.pair_totals
        pairs = [(a, b) for i, a in enumerate(sizes) for b in sizes[i + 1 :]]
        return sum([alone(size) for size in sizes]) - sum([max(totals(a, b)) for a, b in pairs])

    def _predict(self, sizes: Sizes, spec: _Spec) -> float:
        self.evaluations += 1
        number, staggers = spec
        makespan = self._evaluators[number].makespan(sizes, staggers)
        rounded = self._rounded(makespan)
        known = self.found.get(sizes)
        if known is None or rounded < known.rounded:
            self.found[sizes] = _Found(rounded=rounded, makespan_s=makespan, spec=spec)
            self._least[len(sizes)] = min(self._least.get(len(sizes), rounded), rounded)
        return makespan

    def _rounded(self, seconds: float) -> int:
        return round(seconds / self._tie_s)

    def _tie_order(self, sizes: Sizes) -> tuple[float, float, int, Sizes]:
        found = self.found[sizes]
        number, staggers = found.spec
        prediction = self._evaluators[number].evaluate(Split(sizes=sizes), staggers)
        balance, bubbles = round(prediction.balance, 9), round(prediction.bubble_fraction, 9)
        return -balance, bubbles, len(sizes), tuple(-size for size in sizes)


def _most_saved(evaluator: Evaluator, sizes: Sizes, choices: list[Staggers]) -> list[float]:
    """The most seconds that two or three sub-batches save, for each choice of staggers."""
    last, totals = len(evaluator.summary.block) - 1, evaluator.pair_totals
    ab = totals(sizes[0], sizes[1])
    if len(sizes) == 2:
        return [ab[a - b + last] for a, b in choices]
    ac, bc = totals(sizes[0], sizes[2]), totals(sizes[1], sizes[2])
    return [ab[a - b + last] + ac[a - c + last] + bc[b - c + last] for a, b, c in choices]


def _as_fixed(sizes: Sizes, staggers: Staggers, fixed: Staggers) -> tuple[Sizes, Staggers]:
    """Puts the sub-batches into the order in which their staggers are the fixed ones."""
    left = list(zip(staggers, sizes, strict=True))
    ordered = []
    for stagger in fixed[: len(sizes)]:
        pair = next(pair for pair in left if pair[0] == stagger)
        left.remove(pair)
        ordered.append(pair)
    return tuple(size for _, size in ordered), tuple(stagger for stagger, _ in ordered)
