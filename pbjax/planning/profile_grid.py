"""The runs that measure a program: its stages and pairs at batch sizes and SM budgets.

Pure: `runtime.timing` measures the runs, and `profiling` keeps the rows.
"""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import combinations

from pbjax.device import ResourceClass
from pbjax.planning.profile_rows import measured_size
from pbjax.planning.program_summary import ProgramSummary, StageInfo

GRID_POINTS = 8
# Shares of the SMs that a memory kernel gets beside another: 40 of 132 SMs were the best of those
# tried for a matrix product beside a stream of 2 GB.
MEMORY_SHARES = (0.3,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One stage as it is measured.

    Attributes:
      stage: The stage.
      batch_size: Rows of the sub-batch; one row counts as two.
      sm_budget: SMs that its kernels may fill; 0 for all.
    """

    stage: StageInfo
    batch_size: int
    sm_budget: int = 0

    @property
    def size(self) -> int:
        """Rows that the stage really runs with."""
        return measured_size(self.batch_size)

    @property
    def key(self) -> tuple[str, int, int]:
        """The key of its row, as `Row.key`."""
        return self.stage.fingerprint, self.sm_budget, self.size

    @property
    def label(self) -> str:
        """The run in words, for progress."""
        within = f" on {self.sm_budget} SMs" if self.sm_budget else ""
        return f"{self.stage.name} at batch size {self.size}{within}"


def grid(batch_size: int) -> tuple[int, ...]:
    """The batch sizes to measure, so that every size up to batch_size can be interpolated.

    They are the smallest size, the batch itself, and the largest powers of two and three halves of
    powers of two below it, where kernels have no ragged last tile.

    Args:
      batch_size: Rows of the whole batch.

    Returns:
      At most eight sizes, ascending.
    """
    largest = measured_size(batch_size)
    smooth = (base << power for power in range(1, largest.bit_length()) for base in (2, 3))
    # A size within a tenth of the batch would tell little more than the batch itself.
    below = sorted(size for size in {*smooth, 2, 3} if size * 10 < largest * 9)
    return (*sorted({measured_size(1), *below[-(GRID_POINTS - 2) :], largest}),)


def pair_sizes(batch_size: int) -> tuple[int, ...]:
    """The sizes of the grid nearest to half and a third of the batch: pairs are measured there."""
    sizes = grid(batch_size)
    nearest = {min(sizes, key=lambda b, n=n: abs(n * b - batch_size)) for n in (2, 3)}
    return tuple(sorted(nearest))


def paired_runs(
    summary: ProgramSummary, batch_size: int, num_sms: int, takers: Collection[str]
) -> tuple[tuple[Run, Run], ...]:
    """The pairs to measure: stages of different classes, which may gain from running together.

    Args:
      summary: The program.
      batch_size: Rows of the whole batch.
      num_sms: SMs of the device; budgets are shares of them.
      takers: Fingerprints of the stages whose kernels take a budget.
    """
    unique = {stage.fingerprint: stage for stage in summary.block}.values()
    pairs = [(a, b) for a, b in combinations(unique, 2) if a.resource != b.resource]
    return tuple(
        (
            Run(stage=a, batch_size=size, sm_budget=budget_a),
            Run(stage=b, batch_size=size, sm_budget=budget_b),
        )
        for a, b in pairs
        for budget_a, budget_b in _budgets(a, b, num_sms, takers)
        for size in pair_sizes(batch_size)
    )


def single_runs(
    summary: ProgramSummary, batch_size: int, num_sms: int, takers: Collection[str]
) -> tuple[Run, ...]:
    """The stages to measure alone, in program order.

    Every stage runs at the sizes of the grid. Stages to which `paired_runs` gives a budget also run
    within it, at a third to two thirds of the batch, since sub-batches that run together are nearly
    alike. The arguments are those of `paired_runs`.
    """
    pairs = paired_runs(summary, batch_size, num_sms, takers)
    budgets = {(run.stage.fingerprint, run.sm_budget) for pair in pairs for run in pair}
    sizes = grid(batch_size)
    middle = {b for b in sizes if batch_size <= 3 * b <= 2 * batch_size} | {*pair_sizes(batch_size)}
    runs = [
        Run(stage=stage, batch_size=size, sm_budget=budget)
        for stage in summary.stages
        for budget in sorted({0} | {b for name, b in budgets if name == stage.fingerprint})
        for size in (sorted(middle) if budget else sizes)
    ]
    return tuple(runs)


def _budgets(
    a: StageInfo, b: StageInfo, num_sms: int, takers: Collection[str]
) -> list[tuple[int, int]]:
    """No budgets, then those of each share of the memory kernel; 0 where a stage takes none."""
    budgets = [(0, 0)]
    for share in MEMORY_SHARES:
        memory = round(share * num_sms)
        shared = (
            (memory, num_sms - memory) if _is_memory_kernel(a, b) else (num_sms - memory, memory)
        )
        taken_a, taken_b = (shared[i] * (s.fingerprint in takers) for i, s in enumerate((a, b)))
        if taken_a or taken_b:
            budgets.append((taken_a, taken_b))
    return budgets


def _is_memory_kernel(a: StageInfo, b: StageInfo) -> bool:
    """Whether the first of two stages is the memory kernel: bandwidth bounds it more."""
    order = (ResourceClass.MEMORY, ResourceClass.CUDA, ResourceClass.TENSOR)
    return order.index(a.resource) < order.index(b.resource)
