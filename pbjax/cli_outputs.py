"""What `pbjax optimize` writes beside its report: a trace, figures, a page."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pbjax.errors import InputError

if TYPE_CHECKING:
    from pbjax.device_trace import Kernel
    from pbjax.optimized import Optimized


def check_outputs(plan: Path | None, **outputs: Path | None) -> None:
    """Raises InputError where something is to be written that a loaded plan does not tell."""
    for name, path in outputs.items():
        if plan is not None and path is not None:
            raise InputError(
                f"--{name} {path} --plan {plan}: a loaded plan comes without the measured table "
                "that its timetable is drawn from; a searched plan is allowed; leave out --plan"
            )


def write_outputs(
    fast: "Optimized",
    inputs: tuple[object, ...],
    *,
    trace: Path | None,
    figures: Path | None,
    html: Path | None,
) -> list[Path]:
    """Writes what was asked for.

    Args:
      fast: What `optimize` returned.
      inputs: Of a call, for the trace of a measured one.
      trace: Where to write a Chrome trace; None for nowhere.
      figures: Which folder to write figures into; None for none.
      html: Where to write the page; None for nowhere.

    Returns:
      The files.
    """
    from pbjax.plan_pages import write_plan_figures, write_plan_page, write_trace

    written, report = [], fast.report()
    if trace is not None:
        write_trace(report, _kernels(fast, inputs), trace)
        written.append(trace)
    if figures is not None:
        written += write_plan_figures(report, figures)
    if html is not None:
        write_plan_page(report, html)
        written.append(html)
    return written


def _kernels(fast: "Optimized", inputs: tuple[object, ...]) -> "tuple[Kernel, ...]":
    """Those of one call on a GPU; elsewhere a profiler's trace has none."""
    import jax

    from pbjax.device_trace import read_kernels

    if jax.default_backend() != "gpu":
        return ()
    jax.block_until_ready(fast(*inputs))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(fast(*inputs))
        return read_kernels(Path(folder))
