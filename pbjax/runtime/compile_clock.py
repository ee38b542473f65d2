"""Seconds that JAX spends on making programs: tracing, lowering, compiling, loading."""

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType

from jax import monitoring

TRACE, LOWER, COMPILE, LOAD = STEPS = ("trace", "lower", "compile", "load programs")
_EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": TRACE,
    "/jax/core/compile/jaxpr_to_mlir_module_duration": LOWER,
    "/jax/core/compile/backend_compile_duration": COMPILE,
    "/jax/compilation_cache/cache_retrieval_time_sec": LOAD,
}


@dataclass(frozen=True, slots=True)
class _Span:
    step: str
    start_s: float
    end_s: float


@dataclass(slots=True)
class CompileClock:
    """Adds up the times that JAX reports in all threads while the context is entered.

    Each moment counts once, for the last of `STEPS` that is running. So tracing inside lowering
    counts as lowering, and two programs that compile at the same time count once. A program from
    the compilation cache counts as loaded, not compiled.
    """

    _spans: list[_Span] = field(default_factory=list)
    # Start of a program's reading by thread; JAX reports that before the step it is part of.
    _reading: dict[int, float] = field(default_factory=dict)

    def __enter__(self) -> "CompileClock":
        """Starts listening."""
        monitoring.register_event_duration_secs_listener(self._hear)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stops listening."""
        monitoring.unregister_event_duration_listener(self._hear)

    def _hear(self, event: str, duration_secs: float, **_: str | int) -> None:
        step, thread = _EVENTS.get(event), threading.get_ident()
        if step is None:
            return
        end = time.perf_counter()
        start = end - duration_secs
        if step == LOAD:
            self._reading[thread] = start
            return
        if step == COMPILE and self._reading.pop(thread, -1.0) >= start:
            step = LOAD
        self._spans.append(_Span(step, start, end))

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by step, in the order of the steps; those that did not occur are left out."""
        edges = [(span.start_s, 1, span.step) for span in self._spans]
        edges += [(span.end_s, -1, span.step) for span in self._spans]
        found: dict[str, float] = {}
        active: Counter[str] = Counter()
        last = 0.0
        for moment, change, step in sorted(edges):
            if busy := next((s for s in reversed(STEPS) if active[s]), None):
                found[busy] = found.get(busy, 0.0) + moment - last
            last = moment
            active[step] += change
        return {step: found[step] for step in STEPS if step in found}

    @property
    def programs(self) -> dict[str, int]:
        """How many programs were compiled, and how many loaded."""
        steps = [span.step for span in self._spans]
        return {step: steps.count(step) for step in (COMPILE, LOAD)}
