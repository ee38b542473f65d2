"""The timetable of a staggered program: the stages and sub-batches of every slot.

Sub-batch j runs o_j stages ahead (its stagger). With S stages in a block, step i of the steady
state runs, in slot s and for sub-batch j,

  stage (o_j + s) mod S of block i + (o_j + s) div S,

so that sub-batches with different staggers are at different stages in every slot. The fill brings
each sub-batch to its stagger, the drain takes each to its end. How long a slot takes is not decided
here.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from pbjax.arguments import whole_numbers
from pbjax.errors import InputError
from pbjax.planning.program_summary import ProgramSummary

PROLOGUE = -1
MAX_SUB_BATCHES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Sizes of one to three sub-batches, in the order of the batch's rows."""

    sizes: tuple[int, ...]

    def __post_init__(self):
        """Refuses anything but one to three positive sizes."""
        whole_numbers("Split(sizes)", self.sizes)
        if not 1 <= len(self.sizes) <= MAX_SUB_BATCHES or min(self.sizes) < 1:
            raise InputError(
                f"Split(sizes={self.sizes}): {len(self.sizes)} sizes; a split has one to "
                f"{MAX_SUB_BATCHES} sizes of at least one row each; leave empty sub-batches out"
            )

    @property
    def batch_size(self) -> int:
        """Rows of the whole batch."""
        return sum(self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One stage of one block, run for one sub-batch.

    Attributes:
      sub_batch: Number of the sub-batch.
      stage: PROLOGUE, a stage of the block from 0, or the number of stages for the epilogue.
      block: Number of the block; in the steady part 0 or 1, counted from the step's own block.
    """

    sub_batch: int
    stage: int
    block: int


type Slot = tuple[Task, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timetable:
    """Slots of a staggered program: fill, num_blocks - 1 times steady, drain.

    Attributes:
      num_stages: Stages of the block; also the stage number of the epilogue.
      num_blocks: How often the block repeats.
      staggers: How many stages each sub-batch runs ahead.
      has_prologue: Whether the program has a prologue.
      has_epilogue: Whether the program has an epilogue.
      fill: Slots before the first step; blocks are absolute (0).
      steady: Slots of one step; blocks are relative to the step's number.
      drain: Slots after the last step; blocks are absolute (num_blocks - 1).
    """

    num_stages: int
    num_blocks: int
    staggers: tuple[int, ...]
    has_prologue: bool
    has_epilogue: bool
    fill: tuple[Slot, ...]
    steady: tuple[Slot, ...]
    drain: tuple[Slot, ...]

    def slots(self) -> Iterator[Slot]:
        """Every slot of the program in order, with absolute blocks."""
        yield from self.fill
        for step in range(self.num_blocks - 1):
            for slot in self.steady:
                yield tuple(
                    Task(sub_batch=task.sub_batch, stage=task.stage, block=step + task.block)
                    for task in slot
                )
        yield from self.drain


def timetable(summary: ProgramSummary, staggers: tuple[int, ...]) -> Timetable:
    """Lays out the slots of a program for sub-batches with the given staggers.

    Args:
      summary: The program.
      staggers: How many stages of the block each sub-batch runs ahead.

    Returns:
      A timetable in which every sub-batch runs every stage of every block once and in order.

    Raises:
      InputError: There are no staggers or too many, or one of them is a block or more.
    """
    num_stages = len(summary.block)
    check_staggers(num_stages, staggers)
    return Timetable(
        num_stages=num_stages,
        num_blocks=summary.num_blocks,
        staggers=staggers,
        has_prologue=summary.prologue is not None,
        has_epilogue=summary.epilogue is not None,
        fill=_fill(summary, staggers),
        steady=_steady(num_stages, staggers),
        drain=_drain(summary, staggers),
    )


def check_staggers(num_stages: int, staggers: tuple[int, ...]) -> None:
    """Refuses staggers that no timetable exists for."""
    if 1 <= len(staggers) <= MAX_SUB_BATCHES and all(0 <= o < num_stages for o in staggers):
        return
    raise InputError(
        f"timetable(staggers={staggers}): a block of {num_stages} stages has no such timetable; "
        f"one to {MAX_SUB_BATCHES} staggers from 0 to {num_stages - 1} are allowed; "
        "give one for each sub-batch"
    )


def _fill(summary: ProgramSummary, staggers: tuple[int, ...]) -> tuple[Slot, ...]:
    first = PROLOGUE if summary.prologue is not None else 0
    length = max(staggers) - first
    return tuple(
        tuple(
            Task(sub_batch=j, stage=stage, block=0)
            for j, stagger in enumerate(staggers)
            if (stage := slot - length + stagger) >= first
        )
        for slot in range(length)
    )


def _steady(num_stages: int, staggers: tuple[int, ...]) -> tuple[Slot, ...]:
    return tuple(
        tuple(
            Task(sub_batch=j, stage=(o + slot) % num_stages, block=(o + slot) // num_stages)
            for j, o in enumerate(staggers)
        )
        for slot in range(num_stages)
    )


def _drain(summary: ProgramSummary, staggers: tuple[int, ...]) -> tuple[Slot, ...]:
    end = len(summary.block) + (summary.epilogue is not None)
    return tuple(
        tuple(
            Task(sub_batch=j, stage=stagger + slot, block=summary.num_blocks - 1)
            for j, stagger in enumerate(staggers)
            if stagger + slot < end
        )
        for slot in range(end - min(staggers))
    )
