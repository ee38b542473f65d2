"""The part of a report that only steps have."""

from pbjax.decode.interleave import Role
from pbjax.decode.interleaved_program import role_of
from pbjax.decode.programs import StepWorkload
from pbjax.tuning.report import StateReport
from pbjax.tuning.shortlist import Shortlist


def state_report(workload: StepWorkload, shortlist: Shortlist) -> StateReport:
    """The size of the state, the kernels that can overlap, and how much of them does."""
    roles = [role_of(operation) for operation in workload.analysis.graph.operations]
    specs, splits = workload.specs, shortlist.splits
    found = specs.at(splits[0].sizes) if specs and splits else None
    return StateReport(
        state_bytes=workload.state_bytes,
        compute_kernels=roles.count(Role.COMPUTE),
        memory_kernels=roles.count(Role.MEMORY),
        overlapped_fraction=found.overlapped_fraction if found else 0.0,
    )
