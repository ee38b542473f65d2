"""A workload as the tuning core sees it: a call without state, or a step that carries state."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from pbjax.planning.profiling import Timing
from pbjax.program.analysis import Analysis
from pbjax.runtime.compilation import CompiledProgram, LoweredProgram, ProgramSpec
from pbjax.runtime.measured_programs import MeasuredProgram
from pbjax.runtime.timing import Sampler, summary
from pbjax.runtime.verification import Difference


@runtime_checkable
class Workload(Protocol):
    """A function with example inputs, of which any `ProgramSpec` can be made a program."""

    @property
    def analysis(self) -> Analysis:
        """The function."""
        ...

    @property
    def held_bytes(self) -> int:
        """Device memory in use beside a program while programs are compared."""
        ...

    def lower(self, spec: ProgramSpec) -> LoweredProgram:
        """Lowers the program of a spec."""
        ...

    def differences(
        self,
        programs: Sequence[CompiledProgram],
        reference: CompiledProgram,
        progress: Callable[[int, int, str], None],
    ) -> list[Difference]:
        """How far each program's outputs are from those of a reference."""
        ...

    def sampler(self, program: CompiledProgram) -> Sampler:
        """Times calls of a program on the example inputs."""
        ...

    def overlapped_fraction(self, program: CompiledProgram) -> float | None:
        """Share of memory-bound time that compute kernels cover, by a trace; None without one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedProgram:
    """A program with its seconds.

    Attributes:
      program: The program.
      seconds: Seconds of a call, round by round.
      overlapped_share: See `MeasuredProgram`.
    """

    program: CompiledProgram
    seconds: tuple[float, ...]
    overlapped_share: float | None = None

    @property
    def spec(self) -> ProgramSpec:
        """The spec of the program."""
        return self.program.spec

    @property
    def median_s(self) -> float:
        """Median seconds of a call."""
        return summary(self.seconds).median_s

    def gain_over(self, other: "TimedProgram") -> Timing:
        """Seconds saved in each round, in which a drift of the device hits both programs alike."""
        pairs = zip(other.seconds, self.seconds, strict=True)
        return summary([theirs - own for theirs, own in pairs])

    def row(self) -> MeasuredProgram:
        """The program as a report shows it."""
        program, spec, timing = self.program, self.spec, summary(self.seconds)
        return MeasuredProgram(
            name=spec.name,
            variant=spec.variant,
            sizes=spec.sizes,
            staggers=spec.staggers,
            predicted_s=spec.predicted_s,
            measured_s=timing.median_s,
            spread_s=timing.spread_s,
            temporary_bytes=program.temporary_bytes,
            weight_bytes=program.weight_bytes,
            compile_s=program.compile_s,
            sm_budgets=spec.sm_budgets,
            unroll=spec.unroll,
            needed_bytes=program.needed_bytes,
            overlapped_share=self.overlapped_share,
        )
