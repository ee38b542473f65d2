"""Seconds in which JAX makes programs: traces, lowers, compiles, or loads one that was kept."""

import time
from dataclasses import dataclass, field
from types import TracebackType

from jax import monitoring

_STEPS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
    "/jax/compilation_cache/cache_retrieval_time_sec": "load programs",
}


@dataclass(frozen=True, slots=True)
class _Span:
    step: str
    start_s: float
    end_s: float


@dataclass(slots=True)
class CompileClock:
    """Adds up what JAX reports while it is entered; what ran inside another step counts once.

    A program that is read from the compilation cache counts as loaded, not as compiled. Programs
    made in several threads at once add up to more than the time that passed.
    """

    _spans: list[_Span] = field(default_factory=list)

    def __enter__(self) -> "CompileClock":
        """Starts to listen."""
        monitoring.register_event_duration_secs_listener(self._hear)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Listens no more."""
        monitoring.unregister_event_duration_listener(self._hear)

    def _hear(self, event: str, duration_secs: float, **_: str | int) -> None:
        step = _STEPS.get(event)
        if step is None:
            return
        end = time.perf_counter()
        start = end - duration_secs
        # Steps end in order, so that those inside this one are the last.
        while self._spans and self._spans[-1].start_s >= start:
            if step == "compile" and self._spans[-1].step == "load programs":
                step = "load programs"
            self._spans.pop()
        self._spans.append(_Span(step, start, end))

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by step, in the order of the steps; those that did not occur are left out."""
        found = {}
        for step in _STEPS.values():
            if spans := [span for span in self._spans if span.step == step]:
                found[step] = sum(span.end_s - span.start_s for span in spans)
        return found

    @property
    def programs(self) -> dict[str, int]:
        """How many programs were compiled, and how many loaded."""
        steps = [span.step for span in self._spans]
        return {step: steps.count(step) for step in ("compile", "load programs")}
