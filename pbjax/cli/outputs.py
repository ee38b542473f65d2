"""What `pbjax optimize` writes beside its report: the plan, a trace, figures, a page."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pbjax.errors import InputError
from pbjax.files import check_writable

if TYPE_CHECKING:
    from pbjax.runtime.device_trace import Kernel
    from pbjax.tuning.optimized import Optimized
    from pbjax.tuning.report import Report


def check_drawable(figures: Path | None, html: Path | None) -> None:
    """Refuses figures that cannot be drawn or written, before the work that they are of.

    Raises:
      FileError: The folder or the page cannot be written.
      InputError: matplotlib is missing.
    """
    check_writable("--figures", figures, folder=True)
    check_writable("--html", html)
    if figures is not None or html is not None:
        from pbjax.figures.roofline import empty_figure

        empty_figure(1.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What `pbjax optimize` writes beside its report; None for what is not wanted.

    Attributes:
      plan: The file of the plan.
      trace: The file of a Chrome trace of the timetable.
      figures: The folder of the figures.
      html: The file of a page with the figures.
    """

    plan: Path | None
    trace: Path | None
    figures: Path | None
    html: Path | None

    def check(self, *, has_table: bool) -> None:
        """Refuses what cannot be written, before the work that it is of.

        Args:
          has_table: Whether a table is measured: a loaded plan brings none, and one row needs none.

        Raises:
          FileError: A place cannot be written.
          InputError: There will be no timetable to write, or matplotlib is missing.
        """
        for option, path in self._drawn():
            if not has_table:
                raise InputError(
                    f"{option} {path}: a loaded plan, and a batch of one row, come without the "
                    "measured table that timetables are drawn from; a search over two rows or more "
                    f"is allowed; leave out --plan or raise --batch, or leave out {option}"
                )
        check_writable("--save-plan", self.plan)
        check_writable("--trace", self.trace)
        check_drawable(self.figures, self.html)

    def check_split(self, unsplittable: str) -> None:
        """Refuses timetables of a batch that cannot be split, before anything is compiled.

        Args:
          unsplittable: Why it cannot be split; empty if it can.

        Raises:
          InputError: There will be no timetable to write.
        """
        for option, path in self._drawn() if unsplittable else ():
            raise InputError(
                f"{option} {path}: the batch cannot be split ({unsplittable}), so there is no "
                "timetable; models whose rows do not depend on each other are allowed; leave out "
                f"{option}"
            )

    def _drawn(self) -> list[tuple[str, Path]]:
        drawn = {"--trace": self.trace, "--figures": self.figures, "--html": self.html}
        return [(option, path) for option, path in drawn.items() if path is not None]

    def write(self, fast: "Optimized", inputs: tuple[object, ...]) -> list[Path]:
        """Writes what was asked for.

        Args:
          fast: What `optimize` returned.
          inputs: The inputs of a call, for the trace of a measured one.

        Returns:
          The files.
        """
        from pbjax.figures.plan import write_plan_figures, write_plan_page, write_trace

        written, report = [], fast.report()
        if self.plan is not None:
            fast.plan.save(self.plan)
            written.append(self.plan)
        if self.trace is not None:
            write_trace(report, _kernels(fast, inputs), self.trace)
            written.append(self.trace)
        if self.figures is not None:
            written += write_plan_figures(report, self.figures)
        if self.html is not None:
            write_plan_page(report, self.html)
            written.append(self.html)
        return written


def _kernels(fast: "Optimized", inputs: tuple[object, ...]) -> "tuple[Kernel, ...]":
    """The kernels of one call on a GPU; elsewhere a profiler's trace has none."""
    import jax

    from pbjax.runtime.device_trace import read_kernels

    if jax.default_backend() != "gpu":
        return ()
    jax.block_until_ready(fast(*inputs))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(fast(*inputs))
        return read_kernels(Path(folder))


def exhaustive_line(report: "Report", progress: Callable[[str, int, int, str], None]) -> str:
    """The best of all splits beside the one that the search found, in a line.

    Args:
      report: The report of `optimize`.
      progress: Called as progress(phase, done, total, item).
    """
    from pbjax.planning.search import search
    from pbjax.runtime.measured_programs import joined, milliseconds

    if report.profile is None:
        return "exhaustive: nothing was measured to predict splits from"
    progress("exhaustive search", 0, 1, "")
    found = search(report.summary, report.profile, report.batch_size, policy="exhaustive")
    best = found.best
    line = (
        f"exhaustive optimum: {joined(best.split.sizes)}, "
        f"{milliseconds(best.prediction.makespan_s)} ms, "
        f"{found.evaluations:,} evaluations in {found.seconds:.1f} s"
    )
    if report.search is None:
        return line
    excess = report.search.best.prediction.makespan_s / best.prediction.makespan_s - 1
    return f"{line}; the search is {excess:.2%} above it"
