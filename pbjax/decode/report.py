"""What `optimize` found out about a step that carries state, as plain data and as text."""

from dataclasses import asdict, dataclass

from pbjax.fusion import FusionReport
from pbjax.planning.plan import Plan
from pbjax.runtime.measured_programs import MeasuredProgram, programs_section
from pbjax.runtime.phases import Phase
from pbjax.tuning.report import phases_section


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Everything that was found out.

    Attributes:
      model: Name of the function.
      device_kind: Of the device.
      batch_size: Rows of the batch.
      state_bytes: Size of the state.
      compute_kernels: Operations of one sub-batch that can share a launch with a memory kernel.
      memory_kernels: Operations of one sub-batch that can run beside a compute kernel.
      overlapped_fraction: Share of the memory kernels' seconds that runs beside compute kernels in
        the interleaved program; 0 if there is none.
      programs: What was compiled and timed.
      plan: The decision.
      phases: Where the time went.
      fusion: What became of the function by kernels.
      warnings: Things that changed a cost.
    """

    model: str
    device_kind: str
    batch_size: int
    state_bytes: int
    compute_kernels: int
    memory_kernels: int
    overlapped_fraction: float
    programs: tuple[MeasuredProgram, ...]
    plan: Plan
    phases: tuple[Phase, ...]
    fusion: FusionReport
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """The report as JSON-compatible data."""
        return asdict(self)

    def _overlap(self) -> str:
        if self.compute_kernels and self.memory_kernels:
            return (
                f"{self.compute_kernels} compute kernels and {self.memory_kernels} memory kernels; "
                f"{self.overlapped_fraction:.0%} of the memory kernels' time is overlapped"
            )
        found = {"compute": self.compute_kernels, "memory": self.memory_kernels}
        lacking = " and no ".join(name for name, count in found.items() if not count)
        return (
            f"nothing can overlap: no {lacking} kernels; the matrix products and the decode "
            "attention of models.with_kernels on a Hopper GPU are such"
        )

    def __str__(self) -> str:
        """The report as text."""
        lines = [
            f"{self.model} on {self.device_kind}, batch {self.batch_size}, state "
            f"{self.state_bytes / 1e6:,.1f} MB",
            self._overlap(),
        ]
        sections = (
            "\n".join(lines),
            str(self.fusion),
            programs_section(self.programs, self.batch_size),
            phases_section(self.phases),
            "\n".join(f"warning: {text}" for text in self.warnings),
            f"decision: {self.plan.decision}: {self.plan.reason}",
        )
        return "\n\n".join(section for section in sections if section)
