"""Timelines: a timetable in predicted seconds, measured kernels, and both as one trace.

A trace is Chrome's JSON, which Perfetto opens: predicted and measured are two processes on one axis
that begins at 0, sub-batches and kinds of kernels are their rows.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pbjax.files import write_atomically
from pbjax.planning.profile_table import Profile
from pbjax.planning.program_summary import ProgramSummary, StageInfo
from pbjax.planning.throughput import Evaluator
from pbjax.planning.timetable import Slot, timetable
from pbjax.runtime.device_trace import Kernel

PREDICTED, MEASURED = "predicted", "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A stage or kernel with its start and end.

    Attributes:
      row: The row it is drawn in: a sub-batch, or a kind of kernels.
      name: Name of the stage or kernel.
      start_s: Seconds from the first start to its start.
      end_s: Seconds from the first start to its end.
      details: Further facts: rows, class, block, SM budget.
    """

    row: str
    name: str
    start_s: float
    end_s: float
    details: Mapping[str, str | int] = field(default_factory=dict, hash=False)


def predicted_slices(
    summary: ProgramSummary,
    profile: Profile,
    sizes: Sequence[int],
    staggers: tuple[int, ...],
    sm_budgets: Mapping[str, int] | None = None,
) -> tuple[Slice, ...]:
    """A split's timetable in the seconds of a measured table.

    In each slot the first sub-batch's stage starts with the slot and the last one's ends with it,
    each as long as alone: they overlap by the seconds that they save together.

    Args:
      summary: The program.
      profile: Its measured table.
      sizes: Rows of each sub-batch.
      staggers: How many stages each runs ahead.
      sm_budgets: SMs by resource class, as in `Plan`.

    Returns:
      The slices in order; the last ends at the predicted makespan.

    Raises:
      InputError: A stage or size was not measured, or the staggers do not fit.
    """
    evaluator = Evaluator(summary, profile, sm_budgets)
    every = (summary.prologue, *summary.block, summary.epilogue)
    found, now = [], 0.0
    for number, slot in enumerate(timetable(summary, staggers).slots()):
        if not slot:
            continue
        seconds = evaluator.slot_seconds(sizes, slot)
        stages = [every[task.stage + 1] for task in slot]
        alone = [
            profile.seconds(stage, sizes[task.sub_batch])
            for stage, task in zip(stages, slot, strict=True)
            if stage is not None
        ]
        budgets = dict(sm_budgets or {}) if len({s.resource for s in stages if s}) > 1 else {}
        for place, (task, stage) in enumerate(zip(slot, stages, strict=True)):
            if stage is None:
                raise AssertionError("the timetable runs a prologue or epilogue that is missing")
            begin = now + _offset(alone, place, seconds)
            found.append(
                Slice(
                    row=f"sub-batch {task.sub_batch + 1}: {sizes[task.sub_batch]} rows",
                    name=stage.name,
                    start_s=begin,
                    end_s=begin + alone[place],
                    details=_details(stage, slot, place, number, sizes, budgets),
                )
            )
        now += seconds
    return tuple(found)


def _offset(alone: Sequence[float], place: int, slot_s: float) -> float:
    """Start of a stage in its slot: after those before it, but early enough for the rest."""
    return max(0.0, min(sum(alone[:place]), slot_s - sum(alone[place:])))


def _details(
    stage: StageInfo,
    slot: Slot,
    place: int,
    number: int,
    sizes: Sequence[int],
    budgets: Mapping[str, int],
) -> dict[str, str | int]:
    task = slot[place]
    found: dict[str, str | int] = {
        "class": str(stage.resource),
        "rows": sizes[task.sub_batch],
        "block": task.block,
        "slot": number,
    }
    if str(stage.resource) in budgets:
        found["sm_budget"] = budgets[str(stage.resource)]
    return found


def measured_slices(kernels: Sequence[Kernel]) -> tuple[Slice, ...]:
    """Kernels of a device trace, from the start of the first."""
    begin = min((kernel.start_s for kernel in kernels), default=0.0)
    return tuple(
        Slice(
            row="Tensor-Core kernels" if kernel.uses_tensor_cores else "other kernels",
            name=kernel.name,
            start_s=kernel.start_s - begin,
            end_s=kernel.end_s - begin,
        )
        for kernel in kernels
    )


def chrome_trace(timelines: Mapping[str, Sequence[Slice]]) -> dict[str, object]:
    """Timelines as a Chrome trace: a process each, a thread for each row, times in microseconds.

    Args:
      timelines: Slices by the name of their timeline, such as PREDICTED.
    """
    events: list[dict[str, object]] = []
    for process, (name, slices) in enumerate(timelines.items(), start=1):
        events.append(_named("process_name", process, 0, name))
        rows = {row: i for i, row in enumerate(dict.fromkeys(s.row for s in slices), start=1)}
        for row, thread in rows.items():
            events.append(_named("thread_name", process, thread, row))
            index = {"sort_index": thread}
            events.append(_named("thread_sort_index", process, thread, row) | {"args": index})
        events += [
            {
                "name": s.name,
                "cat": str(s.details.get("class", name)),
                "ph": "X",
                "pid": process,
                "tid": rows[s.row],
                "ts": round(1e6 * s.start_s, 4),
                "dur": round(1e6 * (s.end_s - s.start_s), 4),
                "args": dict(s.details),
            }
            for s in slices
        ]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def save_trace(path: Path, timelines: Mapping[str, Sequence[Slice]]) -> None:
    """Writes timelines as a Chrome trace.

    Raises:
      FileError: The file cannot be written.
    """
    write_atomically(path, json.dumps(chrome_trace(timelines)) + "\n")


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
