"""Where the time of a long job goes: named phases, and progress within them."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from pbjax.reports import Phase

# Called as progress(phase, done, total, item) when a phase begins and after each of its items.
type Progress = Callable[[str, int, int, str], None]


class Phases:
    """Clocks the phases of a job and passes their progress on."""

    def __init__(self, progress: Progress | None = None):
        """Starts with no phase.

        Args:
          progress: Told of every phase and item; may be None.
        """
        self._progress = progress
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, total: int = 1) -> Generator[Callable[[int, int, str], None]]:
        """Clocks what runs inside; yields a function to report items as (done, total, item)."""

        def report(done: int, total: int, item: str) -> None:
            if self._progress is not None:
                self._progress(name, done, total, item)

        report(0, total, "")
        start = time.perf_counter()
        try:
            yield report
        finally:
            seconds = time.perf_counter() - start
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        report(total, total, "done")

    def finished(self) -> tuple[Phase, ...]:
        """The phases so far, in the order in which they first began."""
        return tuple(Phase(name=name, seconds=s) for name, s in self._seconds.items())
