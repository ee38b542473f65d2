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
      hosts: Operations of one sub-batch that can carry a partner.
      guests: Operations of one sub-batch that can ride.
      riding: Share of the guests' seconds that rides, in the woven program; 0 if there is none.
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
    hosts: int
    guests: int
    riding: float
    programs: tuple[MeasuredProgram, ...]
    plan: Plan
    phases: tuple[Phase, ...]
    fusion: FusionReport
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """The report as JSON-compatible data."""
        return asdict(self)

    def _riding(self) -> str:
        if self.hosts and self.guests:
            return (
                f"{self.hosts} operations can carry a partner, {self.guests} can ride; "
                f"{self.riding:.0%} of what can ride does"
            )
        found = {"carry a partner": self.hosts, "ride": self.guests}
        lacking = " or ".join(name for name, count in found.items() if not count)
        return (
            f"nothing rides: no operation can {lacking}; products and decode attention by kernels, "
            "as after models.with_kernels on a Hopper GPU, can"
        )

    def __str__(self) -> str:
        """The report as text."""
        lines = [
            f"{self.model} on {self.device_kind}, batch {self.batch_size}, state "
            f"{self.state_bytes / 1e6:,.1f} MB",
            self._riding(),
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
