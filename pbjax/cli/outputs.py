"""What `pbjax optimize` writes beside its report: a trace, figures, a page."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pbjax.errors import InputError
from pbjax.files import check_writable

if TYPE_CHECKING:
    from pbjax.runtime.device_trace import Kernel
    from pbjax.tuning.optimized import Optimized


def check_drawable(figures: Path | None, html: Path | None) -> None:
    """Refuses figures that cannot be drawn or written, before the work that they are of.

    Raises:
      FileError: The folder or the page cannot be written.
      InputError: matplotlib is missing.
    """
    check_writable("--figures", figures, folder=True)
    check_writable("--html", html)
    if figures is not None or html is not None:
        from pbjax.figures.roofline import empty_figure

        empty_figure(1.0, 1.0)


def check_outputs(
    plan: Path | None, *, trace: Path | None, figures: Path | None, html: Path | None
) -> None:
    """Refuses what cannot be written, before the work that it is of.

    Raises:
      FileError: A place cannot be written.
      InputError: A loaded plan does not tell what is to be written, or matplotlib is missing.
    """
    for name, path in {"trace": trace, "figures": figures, "html": html}.items():
        if plan is not None and path is not None:
            raise InputError(
                f"--{name} {path} --plan {plan}: a loaded plan comes without the measured table "
                "that its timetable is drawn from; a searched plan is allowed; leave out --plan"
            )
    check_writable("--trace", trace)
    check_drawable(figures, html)


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
    from pbjax.figures.plan import write_plan_figures, write_plan_page, write_trace

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

    from pbjax.runtime.device_trace import read_kernels

    if jax.default_backend() != "gpu":
        return ()
    jax.block_until_ready(fast(*inputs))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(fast(*inputs))
        return read_kernels(Path(folder))
