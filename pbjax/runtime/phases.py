"""The phases of a long job: their seconds, and progress within them."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from pbjax.runtime.compile_clock import CompileClock

# Called as progress(phase, done, total, item) when a phase begins and after each of its items.
type Progress = Callable[[str, int, int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Wall-clock seconds of one step of a job."""

    name: str
    seconds: float


class Phases:
    """Clocks the phases of a job and passes their progress on.

    The time that JAX spends on making programs in any of them counts as phases of its own: trace,
    lower, compile, and "load programs" for those from the compilation cache.
    """

    def __init__(self, progress: Progress | None = None):
        """Starts with no phase.

        Args:
          progress: Called for every phase and item; None for no progress.
        """
        self._progress = progress
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, total: int = 1) -> Generator[Callable[[int, int, str], None]]:
        """Clocks the code inside; yields a function to report items as (done, total, item)."""

        def report(done: int, total: int, item: str) -> None:
            if self._progress is not None:
                self._progress(name, done, total, item)

        report(0, total, "")
        clock, start = CompileClock(), time.perf_counter()
        try:
            with clock:
                yield report
        finally:
            made = clock.seconds
            self._add(name, max(0.0, time.perf_counter() - start - sum(made.values())))
            for step, seconds in made.items():
                self._add(step, seconds)
        report(total, total, "done")

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def finished(self) -> tuple[Phase, ...]:
        """The phases so far, in the order in which they first began."""
        return tuple(Phase(name=name, seconds=s) for name, s in self._seconds.items())
