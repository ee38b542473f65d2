"""Predicts the seconds of a split program from the measured table.

The time of a slot is the sum of its tasks' seconds, less what each pair of them saves by running
together, and never less than its longest task; the makespan is the sum over the slots. Nothing
overlaps that was not measured to overlap. Under SM budgets, stages of different classes in one slot
take the seconds measured at their budgets. `search` decides which split to take.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

from pbjax.device import ResourceClass
from pbjax.errors import InputError
from pbjax.planning.corun_pairs import Pair, find_pairs, stage_budgets
from pbjax.planning.profile_rows import measured_size, nearest
from pbjax.planning.profile_table import Profile
from pbjax.planning.program_summary import ProgramSummary
from pbjax.planning.timetable import Slot, Split, timetable


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predicted times of a split with its staggers.

    Attributes:
      makespan_s: Seconds from the first start to the last end.
      items_per_s: Rows of the batch per second.
      class_s: Summed seconds of the stages of each class, each as if alone.
      sub_batch_s: Seconds of each sub-batch's stages, each as if alone.
      balance: Shortest over longest of sub_batch_s.
      bubble_fraction: Share of the makespan in which the busiest class is idle.
      ideal_s: Makespan if different classes in a slot overlapped wholly and equal ones not at all.
    """

    makespan_s: float
    items_per_s: float
    class_s: Mapping[ResourceClass, float] = field(hash=False)
    sub_batch_s: tuple[float, ...]
    balance: float
    bubble_fraction: float
    ideal_s: float


class Evaluator:
    """Predicts many splits of one program from one table; remembers what they share."""

    def __init__(
        self, summary: ProgramSummary, profile: Profile, sm_budgets: Mapping[str, int] | None = None
    ):
        """Looks every stage up.

        Args:
          summary: The program.
          profile: Its measured table.
          sm_budgets: SMs that the kernels of a stage may fill in a slot with stages of several
            classes, by class; None or empty for no budgets.

        Raises:
          InputError: A stage of the program was never measured.
        """
        self.summary = summary
        self.sm_budgets = dict(sm_budgets or {})
        stages = (summary.prologue, *summary.block, summary.epilogue)
        self._curves = [None if stage is None else profile.curve(stage) for stage in stages]
        self._classes = [None if stage is None else stage.resource for stage in stages]
        budgets = stage_budgets(summary, profile, self.sm_budgets)
        self._within = [
            curve if not budget or stage is None else profile.curve(stage, budget)
            for stage, curve, budget in zip(stages, self._curves, budgets, strict=True)
        ]
        self._pairs = find_pairs(summary, profile, budgets)
        self._repeats = [1, *([summary.num_blocks] * len(summary.block)), 1]
        # The position after the last stands for a sub-batch that is not in the slot.
        self._width = len(stages) + 1
        self._times: dict[int, tuple[float, ...]] = {}
        self._budget_times: dict[int, tuple[float, ...]] = {}
        self._path_times: dict[int, float] = {}
        self._savings: dict[tuple[int, int], list[float]] = {}
        self._totals: dict[tuple[int, int], list[float]] = {}
        self._patterns: dict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]] = {}

    @property
    def saves_nothing(self) -> bool:
        """Whether no two stages of the program were measured together."""
        return not self._pairs

    @property
    def smallest_size(self) -> int:
        """The smallest sub-batch for which the seconds of every stage are known."""
        smallest = max(curve.sizes[0] for curve in self._curves if curve)
        return smallest if smallest > measured_size(1) else 1

    @property
    def kinks(self) -> tuple[int, ...]:
        """Batch sizes where the predicted seconds may bend or jump, ascending."""
        kinks = {size for curve in (*self._curves, *self._within) if curve for size in curve.sizes}
        for _, batch_sizes in self._pairs:
            sizes = sorted({size for pair in batch_sizes for size in pair})
            # The nearest of two measured sizes changes at their geometric mean.
            means = [math.isqrt(a * b) for a, b in pairwise(sizes)]
            kinks.update(means, [mean + 1 for mean in means])
        return tuple(sorted(kinks))

    def covers(self, sizes: Sequence[int]) -> bool:
        """Whether every stage was measured at these sizes within its budget."""
        low = max(curve.sizes[0] for curve in self._within if curve)
        high = min(curve.sizes[-1] for curve in self._within if curve)
        return low <= measured_size(min(sizes)) and measured_size(max(sizes)) <= high

    def evaluate(self, split: Split, staggers: tuple[int, ...]) -> Prediction:
        """Predicts one split.

        Args:
          split: Sizes of the sub-batches.
          staggers: How many stages each sub-batch runs ahead.

        Returns:
          Makespan, throughput, busy seconds, balance and bubbles.

        Raises:
          InputError: A size was not measured, or the staggers fit neither split nor program.
        """
        if len(staggers) != len(split.sizes):
            raise InputError(
                f"evaluate(sizes={split.sizes}, staggers={staggers}): {len(staggers)} staggers for "
                f"{len(split.sizes)} sub-batches; one for each is allowed; give as many"
            )
        makespan = self.makespan(split.sizes, staggers)
        alone = tuple(self.path_seconds(size) for size in split.sizes)
        busy = self._class_seconds(split.sizes)
        idle = 1 - max(busy.values()) / makespan if makespan > 0 else 0.0
        return Prediction(
            makespan_s=makespan,
            items_per_s=split.batch_size / makespan if makespan > 0 else math.inf,
            class_s=busy,
            sub_batch_s=alone,
            balance=min(alone) / max(alone) if max(alone) > 0 else 1.0,
            bubble_fraction=max(0.0, idle),
            ideal_s=self.ideal_seconds(split.sizes, staggers),
        )

    def path_seconds(self, batch_size: int) -> float:
        """Seconds of the whole program for one sub-batch alone."""
        found = self._path_times.get(batch_size)
        if found is None:
            found = math.sumprod(self._repeats, self._seconds(batch_size)[:-1])
            self._path_times[batch_size] = found
        return found

    def makespan(self, sizes: Sequence[int], staggers: tuple[int, ...]) -> float:
        """Seconds from the first start to the last end."""
        alone = sum([self.path_seconds(size) for size in sizes])
        pattern = self._pattern(staggers)
        if len(sizes) == 1 or not self._pairs:
            return alone
        width = self._width
        if len(sizes) == 2:
            saved = self._saved(sizes[0], sizes[1])
            return alone - sum([n * saved[a * width + b] for n, (a, b) in pattern])
        times = [self._seconds(size) for size in sizes]
        return alone - self._saved_by_three(sizes, times, pattern)

    def slot_seconds(self, sizes: Sequence[int], slot: Slot) -> float:
        """Seconds of one slot; `makespan` is the sum of all.

        Args:
          sizes: Rows of each sub-batch.
          slot: The tasks of the slot.
        """
        positions = {task.sub_batch: task.stage + 1 for task in slot}
        times = [self._seconds(sizes[j])[place] for j, place in positions.items()]
        saved = sum(
            self._saved(sizes[i], sizes[j])[a * self._width + b]
            for (i, a), (j, b) in combinations(sorted(positions.items()), 2)
        )
        together = sum(times) - saved
        return max(together, *times) if len(sizes) > 2 and saved else together

    def pair_totals(self, size_a: int, size_b: int) -> list[float]:
        """Seconds that two sub-batches save over the whole program, by their staggers' difference.

        Entry d + S - 1, with S stages in a block, holds the saving when the first runs d stages
        ahead of the second: the difference alone decides which tasks share a slot.
        """
        found = self._totals.get((size_a, size_b))
        if found is None:
            found = self._sum_pairs(self._saved(size_a, size_b))
            self._totals[size_a, size_b] = found
        return found

    def ideal_seconds(self, sizes: Sequence[int], staggers: tuple[int, ...]) -> float:
        """Makespan if different classes overlapped wholly and equal ones not at all."""
        times = [self._seconds(size) for size in sizes]
        total = 0.0
        for count, positions in self._pattern(staggers):
            by_class: dict[object, float] = {}
            for seconds, position in zip(times, positions, strict=True):
                if position < self._width - 1:
                    kind = self._classes[position]
                    by_class[kind] = by_class.get(kind, 0.0) + seconds[position]
            total += count * max(by_class.values())
        return total

    def _seconds(self, batch_size: int) -> tuple[float, ...]:
        found = self._times.get(batch_size)
        if found is None:
            at = [curve.at(batch_size) if curve else 0.0 for curve in self._curves]
            found = self._times[batch_size] = (*at, 0.0)
        return found

    def _seconds_within(self, batch_size: int) -> tuple[float, ...]:
        """Seconds of each stage within its budget, as `_seconds`."""
        if not self.sm_budgets:
            return self._seconds(batch_size)
        found = self._budget_times.get(batch_size)
        if found is None:
            at = [curve.at(batch_size) if curve else 0.0 for curve in self._within]
            found = self._budget_times[batch_size] = (*at, 0.0)
        return found

    def _class_seconds(self, sizes: Sequence[int]) -> dict[ResourceClass, float]:
        busy = dict.fromkeys(ResourceClass, 0.0)
        for size in sizes:
            parts = zip(self._classes, self._repeats, self._seconds(size), strict=False)
            for kind, repeats, seconds in parts:
                if kind is not None:
                    busy[kind] += repeats * seconds
        return busy

    def _pattern(self, staggers: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
        """How often the program has a slot with the sub-batches at these positions."""
        found = self._patterns.get(staggers)
        if found is None:
            table = timetable(self.summary, staggers)
            counts: Counter[tuple[int, ...]] = Counter()
            parts = ((table.fill, 1), (table.steady, table.num_blocks - 1), (table.drain, 1))
            for slots, repeats in parts:
                for slot in slots:
                    positions = [self._width - 1] * len(staggers)
                    for task in slot:
                        positions[task.sub_batch] = task.stage + 1
                    counts[tuple(positions)] += repeats
            found = self._patterns[staggers] = [(n, p) for p, n in counts.items() if n]
        return found

    def _saved(self, size_a: int, size_b: int) -> list[float]:
        """Seconds saved by each pair of positions, at first * width + second.

        Two stages together take max(t'_a s_a, t'_b s_b, t_a, t_b), with the seconds t alone, t'
        alone within the budgets, and the slowdowns s of the row whose batch sizes are nearest in
        ratio. Without budgets a pair that is slower together saves nothing: it need not run
        together. Within budgets it must, and where no row was measured it takes t'_a + t'_b. The
        loop is written out, since the search spends its time here.
        """
        found = self._savings.get((size_a, size_b))
        if found is None:
            found = self._savings[size_a, size_b] = [0.0] * self._width**2
            measured = measured_size(size_a), measured_size(size_b)
            alone_a, alone_b = self._seconds(size_a), self._seconds(size_b)
            for (budgeted, batch_sizes), pairs in self._pairs.items():
                row = nearest(batch_sizes, *measured) if batch_sizes else None
                if budgeted:
                    self._save_within(found, pairs, row, size_a, size_b)
                    continue
                for pair in pairs:
                    slow_a, slow_b = pair.slowdowns[row or 0]
                    time_a, time_b = alone_a[pair.first], alone_b[pair.second]
                    slowed_a, slowed_b = time_a * slow_a, time_b * slow_b
                    together = slowed_a if slowed_a > slowed_b else slowed_b
                    if time_a + time_b > together:
                        found[pair.place] = time_a + time_b - together
        return found

    def _save_within(
        self, found: list[float], pairs: Sequence[Pair], row: int | None, size_a: int, size_b: int
    ) -> None:
        """Writes the seconds that pairs within budgets save or lose, measured together or not."""
        alone_a, alone_b = self._seconds(size_a), self._seconds(size_b)
        within_a, within_b = self._seconds_within(size_a), self._seconds_within(size_b)
        for pair in pairs:
            time_a, time_b = alone_a[pair.first], alone_b[pair.second]
            slower_a, slower_b = within_a[pair.first], within_b[pair.second]
            if row is None:
                together = slower_a + slower_b
            else:
                slow_a, slow_b = pair.slowdowns[row]
                together = max(slower_a * slow_a, slower_b * slow_b)
            # No slot is shorter than its longest stage alone on all SMs.
            found[pair.place] = time_a + time_b - max(together, time_a, time_b)

    def _saved_by_three(
        self,
        sizes: Sequence[int],
        times: Sequence[tuple[float, ...]],
        pattern: Sequence[tuple[int, tuple[int, ...]]],
    ) -> float:
        width = self._width
        saved_01, saved_02 = self._saved(sizes[0], sizes[1]), self._saved(sizes[0], sizes[2])
        saved_12 = self._saved(sizes[1], sizes[2])
        times_0, times_1, times_2 = times
        total = 0.0
        for count, (a, b, c) in pattern:
            saved = saved_01[a * width + b] + saved_02[a * width + c] + saved_12[b * width + c]
            if saved:
                x, y, z = times_0[a], times_1[b], times_2[c]
                total += count * min(saved, x + y + z - max(x, y, z))
        return total

    def _sum_pairs(self, saved: Sequence[float]) -> list[float]:
        last = len(self.summary.block) - 1
        totals = [0.0] * (2 * last + 1)
        for pairs in self._pairs.values():
            for pair in pairs:
                saving = saved[pair.place]
                if saving:
                    for difference, count in pair.offsets:
                        totals[difference + last] += count * saving
        return totals


def evaluate(
    summary: ProgramSummary,
    profile: Profile,
    split: Split,
    staggers: tuple[int, ...],
    *,
    sm_budgets: Mapping[str, int] | None = None,
) -> Prediction:
    """Predicts one split of a program; for many, keep an `Evaluator`."""
    return Evaluator(summary, profile, sm_budgets).evaluate(split, staggers)
