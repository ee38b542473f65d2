"""Higher Transformer inference throughput on one GPU by staggered sub-batches.

Names are resolved when first used, so that `import pbjax.planning.search` and the like need no JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pbjax.device import Device
    from pbjax.errors import PbjaxError
    from pbjax.inference.generation import generate, stream
    from pbjax.pipeline import optimize
    from pbjax.planning.plan import Plan
    from pbjax.planning.profiling import Profile
    from pbjax.planning.timetable import Split, Timetable
    from pbjax.roofline.report import roofline_report
    from pbjax.tuning.optimized import Optimized

_HOMES = {
    "Device": "device",
    "Optimized": "tuning.optimized",
    "PbjaxError": "errors",
    "Plan": "planning.plan",
    "Profile": "planning.profiling",
    "Split": "planning.timetable",
    "Timetable": "planning.timetable",
    "generate": "inference.generation",
    "optimize": "pipeline",
    "roofline_report": "roofline.report",
    "stream": "inference.generation",
}

__all__ = [
    "Device",
    "Optimized",
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
