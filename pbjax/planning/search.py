"""The search for the split that is predicted to be fastest.

A window slides over the sizes (b_1, b_2, b_3) with b_1 + b_2 + b_3 = B: it visits the neighbours
one window away and moves to the best; it shrinks when none is better (window decay), and a slide
ends when its last rounds gained next to nothing (gain saturation). Slides start from the best of
the sizes where the table bends: without overlap the makespan is linear between them, so its minimum
lies at one; overlap moves the minimum, and the window finds it. A space of few sizes is visited
whole.
"""

import heapq
import time
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import combinations_with_replacement
from typing import Literal, get_args

from pbjax.arguments import check_type, whole_number
from pbjax.errors import InputError
from pbjax.planning.candidates import Candidate as Candidate
from pbjax.planning.candidates import Candidates, Sizes
from pbjax.planning.candidates import SearchOptions as SearchOptions
from pbjax.planning.profile_table import Profile
from pbjax.planning.program_summary import ProgramSummary
from pbjax.planning.timetable import Split

type Policy = Literal["window", "exhaustive"]

MAX_KINKS = 40
MAX_SEEDS = 320
MAX_SLIDES = 32
# Up to this many candidates all are looked at; of more, a tenth at most.
SMALL_SPACE = 5000
# Up to this many sizes all are visited, if the budget allows it.
FEW_SIZES = 1000
# A round bounds and predicts up to six neighbours, and starts only with this many left.
ROUND = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """A position of a slide, for plots.

    Attributes:
      split: The sizes.
      makespan_s: The predicted makespan, or a lower bound where that was enough to move on.
      window: Rows by which the neighbours differ.
    """

    split: Split
    makespan_s: float
    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The outcome of a search.

    Attributes:
      best: The candidate with the shortest makespan; among equal ones the better balanced, then the
        one with fewer bubbles, then the first in a fixed order.
      runner_up: The best of the other predicted sizes; None if there are none.
      by_count: The best candidate with one, two and three sub-batches.
      evaluations: Number of predictions of one split with one choice of staggers and budgets.
      bounds: Number of sizes whose staggers were bounded at once before any prediction, counted for
        each choice of budgets.
      dropped: Number of candidates over the memory limit, not predicted; one may count twice.
      seconds: Seconds that the search took.
      trajectory: The positions of its slides, in order.
      policy: The policy of the search.
      digest: SHA-256 of the program, the table, the options and the decision.
    """

    best: Candidate
    runner_up: Candidate | None
    by_count: dict[int, Candidate] = field(hash=False)
    evaluations: int
    bounds: int
    dropped: int
    seconds: float
    trajectory: tuple[Visit, ...]
    policy: Policy
    digest: str


def search(
    summary: ProgramSummary,
    profile: Profile,
    batch_size: int,
    options: SearchOptions | None = None,
    policy: Policy = "window",
) -> SearchResult:
    """Searches the split of a batch, its staggers and SM budgets, with the shortest makespan.

    Args:
      summary: The program.
      profile: Its measured table; sub-batches smaller than its smallest sizes are no candidates.
      batch_size: Rows of the whole batch.
      options: Limits and settings; None for the defaults.
      policy: "window" slides; "exhaustive" predicts every candidate.

    Returns:
      The best candidate, the others it was compared with, and how it was found. Equal arguments
      give equal results but for the seconds.

    Raises:
      InputError: The batch is not positive or was not measured, or the options do not fit.
      InputTypeError: An argument has a wrong type.
      MemoryBudgetError: No candidate is within the memory limit.
    """
    start = time.perf_counter()
    check_type("search(summary)", summary, (ProgramSummary,), "a ProgramSummary")
    check_type("search(profile)", profile, (Profile,), "a Profile, as of Profile.load(path),")
    batch_size = whole_number("search(batch_size)", batch_size)
    if options is not None:
        check_type("search(options)", options, (SearchOptions,), "a SearchOptions")
    if policy not in get_args(Policy.__value__):
        raise InputError(
            f"search(policy={policy!r}): unknown policy; 'window' and 'exhaustive' are allowed; "
            "leave it out for 'window'"
        )
    options = options or SearchOptions()
    candidates = Candidates(summary, profile, batch_size, options)
    trajectory: list[Visit] = []
    if policy == "window":
        trajectory = _Window(candidates).slide_all()
    else:
        for count in candidates.counts:
            for sizes in candidates.all_sizes(count):
                candidates.predict_all(sizes)
    outcome = _outcome(candidates)
    best = outcome.by_count[outcome.best]
    decision = (options, policy, batch_size, best.split, best.staggers, best.sm_budgets)
    return SearchResult(
        best=best,
        runner_up=outcome.runner_up,
        by_count=outcome.by_count,
        evaluations=candidates.evaluations,
        bounds=candidates.bounds,
        dropped=candidates.dropped,
        seconds=time.perf_counter() - start,
        trajectory=tuple(trajectory),
        policy=policy,
        digest=_digest(summary, profile, decision),
    )


def best_staggers(
    summary: ProgramSummary, profile: Profile, split: Split, options: SearchOptions | None = None
) -> Candidate:
    """The best staggers and budgets of a split whose sizes are given; they keep their order.

    Args:
      summary: The program.
      profile: Its measured table.
      split: The sizes.
      options: Limits and settings without fixed staggers; None for the defaults.

    Returns:
      The candidate with the shortest predicted makespan.

    Raises:
      InputError: A size was not measured, or the options do not fit.
      MemoryBudgetError: No staggers keep the split within the memory limit.
    """
    options = options or SearchOptions()
    if options.staggers is not None or len(split.sizes) > options.max_sub_batches:
        raise InputError(
            f"best_staggers(sizes={split.sizes}): the options fix the staggers, or allow at most "
            f"{options.max_sub_batches} sub-batches; free staggers and enough sub-batches are "
            "allowed; predict fixed staggers with pbjax.planning.throughput.evaluate"
        )
    candidates = Candidates(summary, profile, split.batch_size, options)
    for size in split.sizes:
        candidates.evaluator.path_seconds(size)
    candidates.visit(split.sizes)
    if split.sizes not in candidates.found:
        raise candidates.refusal()
    return candidates.candidate(split.sizes)


class _Window:
    """The sliding window over the sizes."""

    def __init__(self, candidates: Candidates):
        self.candidates = candidates
        self.options = candidates.options
        self.trajectory: list[Visit] = []
        space = candidates.num_candidates()
        # The comparison of equal staggers at the end comes on top.
        specs = max(len(choices) for choices in candidates.choices.values())
        ends = 4 * specs * candidates.visit_cost
        budget = space * 2 if space <= SMALL_SPACE else space // 10 - ends
        self.budget = min(self.options.max_evaluations, budget)

    @property
    def left(self) -> int:
        return max(0, self.budget - self.candidates.evaluations - self.candidates.bounds)

    def slide_all(self) -> list[Visit]:
        """Slides from the best seeds of each number of sub-batches."""
        for count in self.candidates.counts:
            # Two sub-batches have far fewer sizes than three.
            part = self.left // 4 if count == 2 and 3 in self.candidates.counts else self.left
            self._slide_count(count, self.left - part)
        return self.trajectory

    def _slide_count(self, count: int, reserve: int) -> None:
        left = (self.left - reserve) // self.candidates.visit_cost
        seeds = self._seeds(count, max(2, min(MAX_SEEDS, left // 3)))
        whole = self.candidates.num_sizes(count) <= min(left, FEW_SIZES)
        for sizes in self.candidates.all_sizes(count) if whole else seeds:
            self.candidates.visit(sizes)
        for sizes in heapq.nsmallest(MAX_SLIDES, seeds, key=self.candidates.visit):
            if count > 1:
                self._slide(sizes, reserve)

    def _slide(self, sizes: Sizes, reserve: int) -> None:
        options, visit = self.options, self.candidates.visit
        window = max(1, int(self.candidates.batch_size * options.first_window))
        value, gains = visit(sizes), []
        while window and self.left >= reserve + ROUND * self.candidates.visit_cost:
            nearest = min((sizes, *self._neighbours(sizes, window)), key=visit)
            gains.append(max(0.0, value - visit(nearest)))
            self._note(sizes, value, window)
            if gains[-1] > 0:
                sizes, value = nearest, visit(nearest)
            else:
                window = int(window * options.decay)
            recent = gains[-options.saturation_rounds :]
            if len(recent) == options.saturation_rounds and sum(recent) <= options.epsilon * value:
                break
        self._note(sizes, value, window)

    def _note(self, sizes: Sizes, value: float, window: int) -> None:
        self.trajectory.append(Visit(split=Split(sizes=sizes), makespan_s=value, window=window))

    def _neighbours(self, sizes: Sizes, window: int) -> list[Sizes]:
        """The sizes after moving `window` rows from one sub-batch to another."""
        moved = []
        for source in range(len(sizes)):
            for target in range(len(sizes)):
                if source != target and sizes[source] - window >= self.candidates.smallest:
                    after = list(sizes)
                    after[source] -= window
                    after[target] += window
                    moved.append(tuple(sorted(after, reverse=True)))
        return moved

    def _seeds(self, count: int, most: int) -> list[Sizes]:
        """Sizes where the table bends: equal parts, the shortest without overlap, some others.

        Since overlap may favour any of the others, they are taken at even steps.
        """
        batch = self.candidates.batch_size
        chosen = combinations_with_replacement(self._kinks(), count - 1)
        every = {tuple(sorted((*c, batch - sum(c)), reverse=True)) for c in chosen}
        seconds = self.candidates.evaluator.path_seconds
        equal = tuple((batch + i) // count for i in reversed(range(count)))
        allowed = [each for each in every if each[-1] >= self.candidates.smallest]
        allowed.sort(key=lambda each: (each != equal, sum([seconds(b) for b in each]), each))
        shortest, others = allowed[: most // 2], sorted(allowed[most // 2 :])
        step = max(1, -(-len(others) // (most - most // 2)))
        return [*shortest, *others[::step]]

    def _kinks(self) -> list[int]:
        """The sizes where the table bends or jumps most, and equal parts of the batch."""
        batch, smallest = self.candidates.batch_size, self.candidates.smallest
        seconds = self.candidates.evaluator.path_seconds
        inner = [k for k in self.candidates.evaluator.kinks if smallest < k < batch]
        points = [smallest, *inner, batch]

        def bend(i: int) -> float:
            low, middle, high = points[i - 1 : i + 2]
            share = (middle - low) / (high - low)
            return abs(seconds(middle) - (1 - share) * seconds(low) - share * seconds(high))

        sharpest = heapq.nlargest(MAX_KINKS, range(1, len(points) - 1), key=bend)
        equal = {batch // 2, batch // 3, (batch + 1) // 3, (batch + 2) // 3}
        kinks = {smallest, *(points[i] for i in sharpest), *equal, batch - smallest}
        return sorted(k for k in kinks if smallest <= k < batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """The number of sub-batches of the best candidate, and the candidates it was compared with."""

    best: int
    runner_up: Candidate | None
    by_count: dict[int, Candidate]


def _outcome(candidates: Candidates) -> _Outcome:
    by_count = {}
    for count in candidates.counts:
        found = [sizes for sizes in candidates.found if len(sizes) == count]
        if found:
            by_count[count] = candidates.first(found)
    if not by_count:
        raise candidates.refusal()
    polished = {count: candidates.candidate(sizes) for count, sizes in by_count.items()}
    best = candidates.first(list(by_count.values()))
    others = [sizes for sizes in candidates.found if sizes != best]
    runner_up = candidates.candidate(candidates.first(others)) if others else None
    return _Outcome(best=len(best), runner_up=runner_up, by_count=polished)


def _digest(summary: ProgramSummary, profile: Profile, decision: tuple[object, ...]) -> str:
    text = "\n".join(map(repr, (summary, *profile.rows, *profile.corun, *decision)))
    return sha256(text.encode()).hexdigest()
