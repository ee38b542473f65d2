"""The programs that were compiled and timed, as plain data and as tables; computes nothing new."""

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

WIDTH = 100

_LEFT = ("stage", "class", "input", "split", "staggers", "sizes")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredProgram:
    """A program for the batch, compiled and timed.

    Attributes:
      name: "plain" (as given, where fusion changed it), "unsplit", "sequential", "split", or
        "interleaved" for a step.
      sizes: Rows of each sub-batch.
      staggers: How many stages each runs ahead.
      predicted_s: Seconds predicted from the profile; None if it was not predicted.
      measured_s: Median seconds of a pass over the batch.
      spread_s: Distance of the quartiles in seconds.
      temporary_bytes: Bytes that the program needs beside weights, inputs and outputs.
      weight_bytes: Bytes of weights that it holds apart from the user's own.
      compile_s: Seconds of its compilation.
      sm_budgets: SMs by resource class, as in `Plan`.
      unroll: Blocks in one step of the loop.
      variant: How the whole batch runs otherwise than as written, such as "unrolled"; or empty.
      needed_bytes: Device memory while it runs, the model's weights included; 0 if not known.
      overlapped_share: Share of the memory kernels' time that overlaps with compute kernels, by a
        device trace; None if none was taken.
    """

    name: str
    sizes: tuple[int, ...]
    staggers: tuple[int, ...]
    predicted_s: float | None
    measured_s: float
    spread_s: float
    temporary_bytes: int
    weight_bytes: int
    compile_s: float
    sm_budgets: Mapping[str, int] = field(default_factory=dict, hash=False)
    unroll: int = 1
    variant: str = ""
    needed_bytes: int = 0
    overlapped_share: float | None = None

    @property
    def label(self) -> str:
        """The name and what was chosen beside sizes and staggers."""
        return program_label(self.name, self.sm_budgets, self.unroll, self.variant)

    @property
    def prediction_error(self) -> float | None:
        """Predicted over measured seconds, less 1; None if it was not predicted."""
        return None if self.predicted_s is None else self.predicted_s / self.measured_s - 1


def program_label(name: str, sm_budgets: Mapping[str, int], unroll: int, variant: str = "") -> str:
    """The name of a program with its variant, SM budgets and unrolled blocks where it has any."""
    budgets = " ".join(f"{kind} {sms}" for kind, sms in sm_budgets.items())
    parts = [f"{budgets} SMs" if budgets else "", f"unroll {unroll}" if unroll > 1 else ""]
    return ", ".join(part for part in (name, variant, *parts) if part)


def programs_section(programs: Sequence[MeasuredProgram], batch_size: int) -> str:
    """Predicted and measured seconds of the compiled programs, and the memory they need."""
    if not programs:
        return ""
    rows = [
        (
            program.label,
            joined(program.sizes),
            milliseconds(program.predicted_s),
            milliseconds(program.measured_s),
            _percent(program.prediction_error, sign=True),
            milliseconds(program.spread_s),
            f"{batch_size / program.measured_s:,.1f}",
            _percent(program.overlapped_share),
        )
        for program in programs
    ]
    columns = ("program", "sizes", "predicted", "measured", "error", "spread", "items/s", "hidden")
    title = (
        f"programs: ms for one pass over {batch_size} rows, median and distance of the "
        "quartiles (spread)"
    )
    if any(program.overlapped_share is not None for program in programs):
        title += (
            ";\nhidden: share of the memory-bound kernels' time in which a Tensor-Core kernel ran"
        )
    return f"{table(title, columns, rows)}\n\n{_memory_table(programs)}"


def _memory_table(programs: Sequence[MeasuredProgram]) -> str:
    rows = [
        (
            program.label,
            joined(program.sizes),
            f"{program.temporary_bytes / 1e6:,.1f}",
            f"{program.weight_bytes / 1e6:,.1f}",
            f"{program.needed_bytes / 1e6:,.1f}" if program.needed_bytes else "-",
            f"{program.compile_s:.1f}",
        )
        for program in programs
    ]
    columns = ("program", "sizes", "temporary", "copied weights", "all", "compile s")
    title = "memory: MB that the compiled programs plan, known before any of them ran"
    return table(title, columns, rows)


def _percent(share: float | None, *, sign: bool = False) -> str:
    return "-" if share is None else f"{share:+.0%}" if sign else f"{share:.0%}"


def joined(sizes: Sequence[int]) -> str:
    """Sizes of sub-batches as a text such as "48+32+16"."""
    return "+".join(map(str, sizes))


def milliseconds(seconds: float | None) -> str:
    """Seconds as milliseconds to three digits, whole above a tenth of a second; "-" for None."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.3g}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table under its title, no wider than a page."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(
            column, justify="left" if index == 0 or column in _LEFT else "right", no_wrap=index == 0
        )
    for row in rows:
        table.add_row(*map(str, row))
    text = io.StringIO()
    Console(file=text, width=WIDTH, color_system=None).print(table)
    lines = [line.rstrip() for line in text.getvalue().split("\n")]
    return "\n".join([title, *lines]).rstrip()
