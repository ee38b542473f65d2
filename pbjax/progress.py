"""Progress of long jobs on stderr: a bar on a terminal, else a plain line every five seconds."""

import sys
import threading
import time
from types import TracebackType

PLAIN_INTERVAL_S = 5.0
BAR_INTERVAL_S = 0.5


class ProgressPrinter:
    """Shows phase, done of total, elapsed, time left and the current item; a context manager.

    Call it as progress(phase, done, total, item), as `optimize` does.
    """

    def __init__(self):
        """Prints to what stderr is now, once entered."""
        self._stream = sys.stderr
        self._bar = _bar() if self._stream.isatty() else None
        self._state = ("start", 0, 1, "")
        self._began = time.monotonic()
        self._stop = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> "ProgressPrinter":
        """Starts to print."""
        if self._bar is not None:
            self._bar.add_task("", total=None, visible=False)
            self._bar.start()
        self._ticker.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stops, and takes the bar away."""
        self._stop.set()
        self._ticker.join()
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, phase: str, done: int, total: int, item: str) -> None:
        """Notes where the job is."""
        if phase != self._state[0]:
            self._began = time.monotonic()
        self._state = (phase, done, total, item)
        if self._bar is not None:
            self._show()

    def _tick(self) -> None:
        """Shows where the job is also while it says nothing, as in a long compilation."""
        while not self._stop.wait(PLAIN_INTERVAL_S if self._bar is None else BAR_INTERVAL_S):
            self._show()

    def _show(self) -> None:
        phase, done, total, item = self._state
        clock = f"{time.monotonic() - self._began:.0f} s{self._left()}"
        if self._bar is None:
            line = f"{phase}: {done} of {total} {item}".rstrip()
            print(f"{line}, {clock}", file=self._stream, flush=True)
        else:
            text = f"{phase} {item}".rstrip()
            self._bar.update(
                self._bar.task_ids[0],
                description=f"{text}, {clock}",
                total=total,
                completed=done,
                visible=True,
            )

    def _left(self) -> str:
        _, done, total, _ = self._state
        if not 0 < done < total:
            return ""
        elapsed = time.monotonic() - self._began
        return f", about {elapsed / done * (total - done):.0f} s left"


def _bar():
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
