"""Progress of long jobs on stderr: rich's bar on a terminal, else a line every five seconds."""

import sys
import threading
import time
from types import TracebackType

PLAIN_INTERVAL_S = 5.0
# The time left is estimated from the items of this span: some take minutes to compile.
ESTIMATE_SPAN_S = 3600.0


class ProgressPrinter:
    """Shows phase, current item, how many are done, and the time left; a context manager.

    Call it as progress(phase, done, total, item), as `optimize` does.
    """

    def __init__(self):
        """Prints to the stderr of this moment, once entered."""
        self._display = _Bar() if sys.stderr.isatty() else _Lines()

    def __enter__(self) -> "ProgressPrinter":
        """Starts to print."""
        self._display.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stops, and takes the bar away."""
        self._display.stop()

    def __call__(self, phase: str, done: int, total: int, item: str) -> None:
        """Notes where the job is.

        Args:
          phase: The name of the step; its clock starts anew when the name changes.
          done: How many items are done.
          total: How many there are.
          item: The current one; may be empty.
        """
        self._display.show(phase, done, total, item)


class _Lines:
    """One plain line at fixed intervals, also while the job says nothing."""

    def __init__(self):
        self._stream = sys.stderr
        self._state = ("start", 0, 1, "")
        self._began = time.monotonic()
        self._stop = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def start(self) -> None:
        self._ticker.start()

    def stop(self) -> None:
        self._stop.set()
        self._ticker.join()

    def show(self, phase: str, done: int, total: int, item: str) -> None:
        if phase != self._state[0]:
            self._began = time.monotonic()
        self._state = (phase, done, total, item)

    def _tick(self) -> None:
        while not self._stop.wait(PLAIN_INTERVAL_S):
            print(self._line(), file=self._stream, flush=True)

    def _line(self) -> str:
        phase, done, total, item = self._state
        elapsed_s = time.monotonic() - self._began
        where = f"{phase}: {done} of {total} {item}".rstrip()
        left_s = elapsed_s / done * (total - done) if 0 < done < total else None
        left = "" if left_s is None else f", about {left_s:.0f} s left"
        return f"{where}, {elapsed_s:.0f} s{left}"


class _Bar:
    """The bar of rich, which redraws itself."""

    def __init__(self):
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            speed_estimate_period=ESTIMATE_SPAN_S,
            # What a job prints goes above the bar; into a file or pipe it goes as it is.
            redirect_stdout=sys.stdout.isatty(),
        )
        self._phase = "start"
        self._task = self._progress.add_task(self._phase, total=1)

    def start(self) -> None:
        self._progress.start()

    def stop(self) -> None:
        self._progress.stop()

    def show(self, phase: str, done: int, total: int, item: str) -> None:
        text = f"{phase} {item}".rstrip()
        if phase != self._phase:
            self._phase = phase
            self._progress.reset(self._task, description=text, total=total)
        self._progress.update(self._task, description=text, total=total, completed=done)
