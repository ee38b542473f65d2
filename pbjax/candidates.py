"""Every way to split a batch and stagger its sub-batches, predicted on demand.

The sizes of a candidate are unordered: the order of two sub-batches changes nothing once their
staggers go with them, and adding one number to all staggers changes nothing either. Of each sizes
the staggers are first bounded by what each pair of sub-batches can save; only those that may beat
what is known are predicted. Which sizes to visit is decided in `search`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations, product

from pbjax.errors import InputError, MemoryBudgetError
from pbjax.outline import Outline
from pbjax.schedule import MAX_SUB_BATCHES, Split, check_staggers, timetable
from pbjax.throughput import Evaluator, Prediction

type Sizes = tuple[int, ...]
type Staggers = tuple[int, ...]

# Makespans nearer than this share of the unsplit one are equal: sums in another order differ so.
TIE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A split with its staggers and what the table says about it."""

    split: Split
    staggers: Staggers
    prediction: Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """What may be searched, and how far.

    Attributes:
      max_sub_batches: Most sub-batches of a candidate.
      staggers: Fixed staggers; a candidate with fewer sub-batches takes the first of them. None
        searches them.
      first_window: Window that a slide starts with, as a share of the batch.
      decay: What the window is multiplied by when no neighbour is better.
      saturation_rounds: How many rounds together must gain.
      epsilon: What they must gain, as a share of the makespan.
      max_evaluations: Most predictions and bounds; fewer where the space is small.
      memory_limit_bytes: Candidates that need more device memory are dropped; None allows all.
    """

    max_sub_batches: int = MAX_SUB_BATCHES
    staggers: Staggers | None = None
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


def predicted_bytes(outline: Outline, split: Split, staggers: Staggers) -> int:
    """Device memory of a split: all weights, and the activations of its largest slot."""
    chain = (outline.prologue, *outline.block, outline.epilogue)
    repeats = (1, *[outline.num_blocks] * len(outline.block), 1)
    weights = sum(n * stage.weight_bytes for n, stage in zip(repeats, chain, strict=True) if stage)
    table = timetable(outline, staggers)
    per_row = [stage.bytes_per_row if stage else 0.0 for stage in chain]
    largest = max(
        sum(split.sizes[task.sub_batch] * per_row[task.stage + 1] for task in slot)
        for slot in (*table.fill, *table.steady, *table.drain)
    )
    return weights + math.ceil(largest)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The best staggers known of some sizes; `rounded` is what makespans are compared by."""

    rounded: int
    makespan_s: float
    staggers: Staggers


class Candidates:
    """The candidates of one batch: what is known of them, and what it cost to know.

    Attributes:
      counts: Numbers of sub-batches that are allowed.
      choices: For each number of sub-batches, every stagger.
      smallest: Smallest sub-batch.
      evaluations: Predictions of one split with one choice of staggers.
      bounds: Sizes of which all staggers were bounded at once.
      dropped: Candidates over the memory limit.
      found: Sizes that were predicted, with their best staggers.
    """

    def __init__(self, evaluator: Evaluator, batch_size: int, options: SearchOptions):
        """Lays out the space.

        Raises:
          InputError: The batch was not measured, or the fixed staggers do not fit the program.
        """
        self.evaluator = evaluator
        self.batch_size = batch_size
        self.options = options
        self.evaluations = self.bounds = self.dropped = 0
        self.found: dict[Sizes, _Found] = {}
        self.smallest = evaluator.smallest_size
        most = options.max_sub_batches
        if options.staggers is not None:
            check_staggers(len(evaluator.outline.block), options.staggers)
            most = min(most, len(options.staggers))
        self.counts = [n for n in range(1, most + 1) if n == 1 or n * self.smallest <= batch_size]
        self.choices = {n: self._choices(n) for n in self.counts}
        self._tie_s = evaluator.chain_seconds(batch_size) * TIE or TIE
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
        return sum(self.num_sizes(count) * len(self.choices[count]) for count in self.counts)

    def predict_all(self, sizes: Sizes) -> None:
        """Predicts these sizes with every choice of staggers."""
        for staggers in self._allowed(sizes):
            self._predict(sizes, staggers)

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
        """The candidate of these sizes; of equal staggers those under which classes meet least."""
        makespans = {self.found[sizes].staggers: self.found[sizes].rounded}
        for bound, staggers in self._promising(sizes):
            if bound > self.found[sizes].rounded:
                break
            makespans[staggers] = self._rounded(self._predict(sizes, staggers))
        least = min(makespans.values())
        equal = [staggers for staggers, makespan in makespans.items() if makespan == least]
        ideal = self.evaluator.ideal_seconds

        def rank(each: Staggers) -> tuple[int, int, Staggers]:
            # Of staggers that nothing tells apart, those with the most different stages: whatever
            # overlap was not measured can only come from there.
            return self._rounded(ideal(sizes, each)), -len(set(each)), each

        staggers = min(equal, key=rank)
        if self.options.staggers is not None:
            sizes, staggers = _as_fixed(sizes, staggers, self.options.staggers)
        split = Split(sizes=sizes)
        prediction = self.evaluator.evaluate(split, staggers)
        return Candidate(split=split, staggers=staggers, prediction=prediction)

    def refusal(self) -> MemoryBudgetError:
        """Says that nothing is within the memory limit."""
        whole = Split(sizes=(self.batch_size,))
        needed = predicted_bytes(self.evaluator.outline, whole, (0,))
        return MemoryBudgetError(
            f"search(batch_size={self.batch_size}): {needed} bytes are needed unsplit, and too "
            f"many however it is split; {self.options.memory_limit_bytes} bytes are allowed; lower "
            "the batch or raise memory_limit_bytes"
        )

    def _choices(self, count: int) -> list[Staggers]:
        fixed = self.options.staggers
        if fixed is not None:
            return sorted(set(permutations(fixed[:count])))
        stages = range(len(self.evaluator.outline.block))
        return [each for each in product(stages, repeat=count) if min(each) == 0]

    def _in_two(self, total: int, low: int) -> Iterator[Sizes]:
        return ((total - size, size) for size in range(low, total // 2 + 1))

    def _allowed(self, sizes: Sizes) -> list[Staggers]:
        limit, choices = self.options.memory_limit_bytes, self.choices[len(sizes)]
        if limit is None:
            return choices
        split, outline = Split(sizes=sizes), self.evaluator.outline
        allowed = [each for each in choices if predicted_bytes(outline, split, each) <= limit]
        self.dropped += len(choices) - len(allowed)
        return allowed

    def _visit(self, sizes: Sizes) -> float:
        least = self._least.get(len(sizes), math.inf)
        # A bound on one choice of staggers is worth less than its prediction.
        if len(self.choices[len(sizes)]) == 1:
            return min((self._predict(sizes, s) for s in self._allowed(sizes)), default=math.inf)
        if not self.evaluator.saves_nothing:
            self.bounds += 1
            bound = self._bound(sizes)
            if self._rounded(bound) > least:
                return bound
        return self._predict_promising(sizes, least)

    def _predict_promising(self, sizes: Sizes, least: float | int) -> float:
        value = math.inf
        for bound, staggers in self._promising(sizes):
            known = self.found.get(sizes)
            if bound > least or (known and bound >= known.rounded):
                return min(value, bound * self._tie_s)
            value = min(value, self._predict(sizes, staggers))
        return value

    def _promising(self, sizes: Sizes) -> Iterator[tuple[int, Staggers]]:
        """All allowed staggers with a bound on their rounded makespan, the least first."""
        allowed = self._allowed(sizes)
        alone = sum([self.evaluator.chain_seconds(size) for size in sizes])
        if len(sizes) == 1 or self.evaluator.saves_nothing:
            rounded = self._rounded(alone)
            yield from ((rounded, staggers) for staggers in allowed)
            return
        last, totals = len(self.evaluator.outline.block) - 1, self.evaluator.pair_totals
        ab = totals(sizes[0], sizes[1])
        if len(sizes) == 2:
            saved = [ab[a - b + last] for a, b in allowed]
        else:
            ac, bc = totals(sizes[0], sizes[2]), totals(sizes[1], sizes[2])
            saved = [ab[a - b + last] + ac[a - c + last] + bc[b - c + last] for a, b, c in allowed]
        order = sorted(range(len(allowed)), key=saved.__getitem__, reverse=True)
        # One by one: most callers stop after a few.
        yield from ((self._rounded(alone - saved[i]), allowed[i]) for i in order)

    def _bound(self, sizes: Sizes) -> float:
        chain, totals = self.evaluator.chain_seconds, self.evaluator.pair_totals
        pairs = [(a, b) for i, a in enumerate(sizes) for b in sizes[i + 1 :]]
        return sum([chain(size) for size in sizes]) - sum([max(totals(a, b)) for a, b in pairs])

    def _predict(self, sizes: Sizes, staggers: Staggers) -> float:
        self.evaluations += 1
        makespan = self.evaluator.makespan(sizes, staggers)
        rounded = self._rounded(makespan)
        known = self.found.get(sizes)
        if known is None or rounded < known.rounded:
            self.found[sizes] = _Found(rounded=rounded, makespan_s=makespan, staggers=staggers)
            self._least[len(sizes)] = min(self._least.get(len(sizes), rounded), rounded)
        return makespan

    def _rounded(self, seconds: float) -> int:
        return round(seconds / self._tie_s)

    def _tie_order(self, sizes: Sizes) -> tuple[float, float, int, Sizes]:
        found = self.found[sizes]
        prediction = self.evaluator.evaluate(Split(sizes=sizes), found.staggers)
        balance, bubbles = round(prediction.balance, 9), round(prediction.bubble_fraction, 9)
        return -balance, bubbles, len(sizes), tuple(-size for size in sizes)


def _as_fixed(sizes: Sizes, staggers: Staggers, fixed: Staggers) -> tuple[Sizes, Staggers]:
    """Puts the sub-batches into the order in which their staggers are the fixed ones."""
    left = list(zip(staggers, sizes, strict=True))
    ordered = []
    for stagger in fixed[: len(sizes)]:
        pair = next(pair for pair in left if pair[0] == stagger)
        left.remove(pair)
        ordered.append(pair)
    return tuple(size for _, size in ordered), tuple(stagger for stagger, _ in ordered)
