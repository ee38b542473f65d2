"""Every way to split a batch, stagger its sub-batches and share the SMs out, predicted on demand.

The sizes of a candidate are unordered: the order of two sub-batches changes nothing once their
staggers go with them, and adding one number to all staggers changes nothing either. Of each sizes
the staggers are first bounded by what each pair of sub-batches can save; only those that may beat
what is known are predicted. SM budgets come from the table: those that stages were measured at.
Which sizes to visit is decided in `search`.
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

# Makespans nearer than this share of the unsplit one are equal: sums in another order differ so.
TIE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A split with its staggers and budgets, and what the table says about it.

    Attributes:
      split: Sizes of the sub-batches.
      staggers: How many stages each runs ahead.
      prediction: Of the table.
      sm_budgets: As in `Plan`; empty for none.
    """

    split: Split
    staggers: Staggers
    prediction: Prediction
    sm_budgets: Mapping[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """What may be searched, and how far.

    Attributes:
      max_sub_batches: Most sub-batches of a candidate.
      staggers: Fixed staggers; a candidate with fewer sub-batches takes the first of them. None
        searches them.
      sm_budgets: Fixed budgets, none of them if empty; None searches those of the table.
      first_window: Window that a slide starts with, as a share of the batch.
      decay: What the window is multiplied by when no neighbour is better.
      saturation_rounds: How many rounds together must gain.
      epsilon: What they must gain, as a share of the makespan.
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
        """Refuses options that no search ends with."""
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
type _Way = tuple[int, Staggers]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The best way known to run some sizes; `rounded` is what makespans are compared by."""

    rounded: int
    makespan_s: float
    spec: _Way


class Candidates:
    """The candidates of one batch: what is known of them, and what it cost to know.

    Attributes:
      evaluator: Predicts without budgets.
      counts: Numbers of sub-batches that are allowed.
      choices: For each number of sub-batches, every stagger.
      smallest: Smallest sub-batch.
      visit_cost: Predictions and bounds that visiting sizes takes at least.
      evaluations: Predictions of one split with one choice of staggers and budgets.
      bounds: Sizes of which all staggers were bounded at once, counted for each choice of budgets.
      dropped: Candidates over the memory limit.
      found: Sizes that were predicted, with the best way known to run them.
    """

    def __init__(
        self, summary: ProgramSummary, profile: Profile, batch_size: int, options: SearchOptions
    ):
        """Lays out the space.

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
        """How many splits there are, each counted with each choice of staggers."""
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
        """The makespan of these sizes, or a bound from below that is worse than the best known."""
        value = self._values.get(sizes)
        if value is None:
            value = self._values[sizes] = self._visit(sizes)
        return value

    def first(self, sizes: list[Sizes]) -> Sizes:
        """The best of sizes that were predicted: makespan, then balance, bubbles, fixed order."""
        least = min(self.found[each].rounded for each in sizes)
        return min([s for s in sizes if self.found[s].rounded == least], key=self._tie_order)

    def candidate(self, sizes: Sizes) -> Candidate:
        """The candidate of these sizes; of equal ways that under which classes meet least."""
        makespans = {self.found[sizes].spec: self.found[sizes].rounded}
        for bound, spec in self._promising(sizes):
            if bound > self.found[sizes].rounded:
                break
            makespans[spec] = self._rounded(self._predict(sizes, spec))
        least = min(makespans.values())
        equal = [spec for spec, makespan in makespans.items() if makespan == least]
        ideal = self.evaluator.ideal_seconds

        def rank(spec: _Way) -> tuple[int, int, int, Staggers]:
            # Of staggers that nothing tells apart, those with the most different stages: whatever
            # overlap was not measured can only come from there. Of budgets, none.
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
        """Says that nothing is within the memory limit."""
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
        # Staggered sub-batches take the same memory whatever their sizes are.
        parts = (self.batch_size - count + 1, *[1] * (count - 1))
        if count == 1 or self._fits(parts, (*[0] * (count - 1), 1)):
            return every
        in_turns = [each for each in every if not any(each)]
        self.dropped += (len(every) - len(in_turns)) * self.num_sizes(count)
        return in_turns

    def _in_two(self, total: int, low: int) -> Iterator[Sizes]:
        return ((total - size, size) for size in range(low, total // 2 + 1))

    def _allowed(self, sizes: Sizes) -> list[Staggers]:
        """The staggers under which these sizes are within the memory limit: all that are left.

        Or none: sub-batches in turns, without staggers, take no more than the same staggered.
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
        """The budgets under which these sizes were measured, by their numbers."""
        if len(sizes) == 1:
            return [0]
        every = enumerate(self._evaluators)
        return [i for i, each in every if not each.sm_budgets or each.covers(sizes)]

    def _visit(self, sizes: Sizes) -> float:
        least = self._least.get(len(sizes), math.inf)
        numbers, choices = self._numbers(sizes), self.choices[len(sizes)]
        # A bound on one choice is worth less than its prediction.
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

    def _promising(self, sizes: Sizes) -> Iterator[tuple[int, _Way]]:
        """All allowed ways with a bound on their rounded makespan, the least first."""
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
        # One by one: most callers stop after a few.
        for less, number, i in sorted(saved):
            yield self._rounded(alone + less), (number, allowed[i])

    def _bound(self, sizes: Sizes, evaluator: Evaluator) -> float:
        chain, totals = evaluator.path_seconds, evaluator.pair_totals
        pairs = [(a, b) for i, a in enumerate(sizes) for b in sizes[i + 1 :]]
        return sum([chain(size) for size in sizes]) - sum([max(totals(a, b)) for a, b in pairs])

    def _predict(self, sizes: Sizes, spec: _Way) -> float:
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
    """Seconds that two or three sub-batches save at most, for each choice of staggers."""
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
