"""Higher Transformer inference throughput on one GPU by staggered sub-batches.

Names are resolved when first used, so that `import pbjax.search` and the like need no JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pbjax.device import Device
    from pbjax.errors import PbjaxError
    from pbjax.generation import generate, stream
    from pbjax.optimized import Optimized
    from pbjax.pipeline import optimize
    from pbjax.plan import Plan
    from pbjax.profiling import Profile
    from pbjax.roofline import roofline_report
    from pbjax.schedule import Split, Timetable
    from pbjax.step import OptimizedStep

_HOMES = {
    "Device": "device",
    "Optimized": "optimized",
    "OptimizedStep": "step",
    "PbjaxError": "errors",
    "Plan": "plan",
    "Profile": "profiling",
    "Split": "schedule",
    "Timetable": "schedule",
    "generate": "generation",
    "optimize": "pipeline",
    "roofline_report": "roofline",
    "stream": "generation",
}

__all__ = [
    "Device",
    "Optimized",
    "OptimizedStep",
    "PbjaxError",
    "Plan",
    "Profile",
    "Split",
    "Timetable",
    "generate",
    "optimize",
    "roofline_report",
    "stream",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'pbjax' has no attribute {name!r}")
    value = getattr(import_module(f"pbjax.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
