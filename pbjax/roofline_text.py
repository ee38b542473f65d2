"""A roofline report as text of at most 100 columns. Computes nothing new."""

import textwrap
from collections.abc import Iterable, Sequence

from pbjax.roofline_points import Roofline, Total

WIDTH = 100
_BOUNDS = {"memory": "memory bandwidth", "compute": "arithmetic"}

_HEAD = (
    f"{'':22}{'':>3} {'GFLOP':>9} {'weights':>8} {'activ.':>8} {'KV':>8} {'FLOP/B':>7} "
    f"{'class':<6} {'TFLOP/s':>7} {'ms':>8} {'share':>5}"
)
_UNITS = f"{'stage and group':22}{'x':>3} {'':>9} {'MB':>8} {'MB':>8} {'MB':>8}"


def report_text(report: Roofline) -> str:
    """The whole report: what it is of, a table of stages and groups, totals, memory.

    Args:
      report: Any report.
    """
    sections = (_title(report), _table(report), summary_text(report))
    return "\n".join(sections)


def _title(report: Roofline) -> str:
    device, sizes = report.device, []
    if report.items:
        sizes.append(f"batch {report.items:,}")
    if report.tokens:
        sizes.append(f"{count(report.tokens, 'token')} in")
    if report.cached:
        sizes.append(f"{report.cached:,} cached a row")
    sized = f" ({', '.join(sizes)})" if sizes else ""
    figures = (
        f"predicted for {device.kind}: {_rate(device.contraction_flops_per_s(report.dtype))} of "
        f"tensor cores, {_rate(device.cuda_flops_per_s)} of others, "
        f"{device.memory_bytes_per_s / 1e12:.3g} TB/s, ridge point {report.ridge_point:.0f} "
        f"FLOP/byte ({device.source})"
    )
    head = f"{report.model}, {report.phase}{sized}, {report.dtype}, attention {report.attention}"
    return "\n".join((head, *wrapped(figures)))


def _table(report: Roofline) -> str:
    whole = report.total.seconds
    lines = ["", _HEAD, _UNITS, "-" * len(_HEAD)]
    for stage in report.stages:
        lines.append(_row(stage.name, stage, whole))
        if len(stage.points) > 1:
            groups = (Total(name=point.name, points=(point,)) for point in stage.points)
            lines += [_row(f"  {group.name}", group, whole) for group in groups]
    lines += ["-" * len(_HEAD), _row("total", report.total, whole, repeats="")]
    legend = (
        "class: what takes longest; MEMORY is bound by its bytes, TENSOR and CUDA by arithmetic",
        "x: how often a call runs it; MB: moved, by what they hold; TFLOP/s: what is attainable",
    )
    return "\n".join([*lines, *legend])


def _row(name: str, total: Total, whole_s: float, repeats: str | None = None) -> str:
    moved = total.traffic
    times = f"{total.repeats}" if repeats is None else repeats
    share = total.seconds / whole_s if whole_s else 0.0
    return (
        f"{name[:22]:22}{times:>3} {_short(total.flops / 1e9):>9} "
        f"{_short(moved.weights / 1e6):>8} {_short(moved.activations / 1e6):>8} "
        f"{_short(moved.kv_cache / 1e6):>8} {_short(total.intensity):>7} "
        f"{total.resource:<6} {_short(total.attainable_flops_per_s / 1e12):>7} "
        f"{_short(total.seconds * 1e3):>8} {share:>5.0%}"
    )


def summary_text(report: Roofline) -> str:
    """Totals, kinds, memory, and what the figures leave out."""
    total, memory, device = report.total, report.memory, report.device
    peak = total.attainable_flops_per_s / device.contraction_flops_per_s(report.dtype)
    used = total.traffic.total / total.seconds / device.memory_bytes_per_s if total.seconds else 0.0
    rates = [f"{report.items / total.seconds:,.0f} rows/s"] if report.items else []
    rates += [f"{report.tokens / total.seconds:,.0f} tokens/s"] if report.tokens else []
    shares = (
        f"{kind.name} {kind.seconds / total.seconds:.0%} ({kind.intensity:,.4g} FLOP/byte)"
        for kind in sorted(report.kinds, key=lambda kind: -kind.seconds)
    )
    room = "fits" if report.fits else "DOES NOT FIT"
    lines = [
        f"total: {total.flops / 1e12:,.4g} TFLOP, {total.traffic.total / 1e9:,.4g} GB, "
        f"{total.seconds * 1e3:,.4g} ms{''.join(f', {rate}' for rate in rates)}; "
        f"{peak:.0%} of the FLOP/s, {used:.0%} of the bytes/s",
        f"time: {', '.join(shares)}",
        f"memory: weights {size(memory.weight_bytes)} + KV cache {size(memory.kv_cache_bytes)} + "
        f"inputs {size(memory.input_bytes)} + temporaries {size(memory.temporary_bytes)} = "
        f"{size(memory.peak_bytes)} of {size(device.memory_bytes)}: {room}",
    ]
    for bound in ("memory", "compute"):
        found = [s for s in report.stages if s.bound == bound and s.seconds >= 0.01 * total.seconds]
        if found:
            lines.append(f"bound by {_BOUNDS[bound]}: {', '.join(stage.name for stage in found)}")
    if report.unknown:
        lines.append(f"cost unknown, counted by bytes: {', '.join(report.unknown)}")
    if not report.exact:
        lines.append("a loop without a known length counts once, a branch as its costliest")
    return "\n".join(line for text in lines for line in wrapped(text))


def table_text(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A plain table; the first column is aligned to the left, all others to the right.

    Args:
      title: Line above it.
      columns: Heads.
      rows: Cells; numbers are written with four digits.
    """
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(columns), *cells]) for i in range(len(columns))]

    def line(row: Sequence[str]) -> str:
        rest = (f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        return "  ".join((f"{row[0]:{widths[0]}}", *rest)).rstrip()

    rule = "-" * len(line(list(columns)))
    return "\n".join([title, line(list(columns)), rule, *(line(row) for row in cells)])


def count(number: int, noun: str) -> str:
    """A number of things: 1 token, 2 tokens."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return _short(value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def wrapped(text: str) -> list[str]:
    """A text as lines of at most WIDTH columns."""
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False)


def _short(value: int | float) -> str:
    """At most four digits, and a dot or a comma."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) < 0.001:
        return "0.000"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def _rate(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e12:,.4g} TFLOP/s"


def size(num_bytes: int | float) -> str:
    """Bytes in the unit that leaves the fewest digits."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.1f} {unit}"
    return f"{num_bytes:,.0f} B"
