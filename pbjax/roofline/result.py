"""The roofline of a program: as plain data, and as text. Computes nothing new."""

from dataclasses import asdict, dataclass, field
from typing import Literal

from pbjax.device import Device
from pbjax.roofline.points import Measured, Memory, Point, Total, grouped
from pbjax.text_tables import count, short, size, wrapped

_BOUNDS = {"memory": "memory bandwidth", "compute": "arithmetic"}

_HEAD = (
    f"{'':22}{'':>3} {'GFLOP':>9} {'weights':>8} {'activ.':>8} {'KV':>8} {'FLOP/B':>7} "
    f"{'class':<6} {'TFLOP/s':>7} {'ms':>8} {'share':>5}"
)
_UNITS = f"{'stage and group':22}{'x':>3} {'':>9} {'MB':>8} {'MB':>8} {'MB':>8}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The costs of a call of a model on a device, predicted from its traced operations.

    Attributes:
      model: Name of the model.
      phase: "prefill", "decode" or "forward".
      device: The device whose peaks give the seconds.
      points: Groups of operations in program order.
      memory: Device memory that the call needs.
      attention: "fused" if scores never reach memory, else "unfused".
      items: Rows of the batch; 0 if not known.
      tokens: Tokens that a call takes in; 0 if not known.
      cached: Tokens that a row's cache holds with the new ones; 0 without one, or if not known.
      unknown: Primitives whose cost is not known: they count by their bytes.
      exact: False if a loop's length, a branch or iterations are decided only when it runs.
      measured: Measured seconds; None if it was not measured.
    """

    model: str
    phase: str
    device: Device
    points: tuple[Point, ...]
    memory: Memory
    attention: Literal["fused", "unfused"]
    items: int = 0
    tokens: int = 0
    cached: int = 0
    unknown: tuple[str, ...] = field(default=())
    exact: bool = True
    measured: Measured | None = None

    @property
    def total(self) -> Total:
        """The whole call."""
        return Total(name="total", points=self.points)

    @property
    def stages(self) -> tuple[Total, ...]:
        """Each stage, in program order."""
        return grouped(self.points, "stage")

    @property
    def kinds(self) -> tuple[Total, ...]:
        """Dense layers, attention and the rest."""
        return grouped(self.points, "kind")

    def measured_s(self, point: Point) -> float | None:
        """Device seconds of a group; None if it was not measured."""
        groups = self.measured.groups if self.measured else {}
        return groups.get(f"{point.stage}/{point.name}")

    @property
    def dtype(self) -> str:
        """The dtype in which most contractions are done."""
        flops: dict[str, float] = {}
        for point in self.points:
            if point.dtype:
                flops[point.dtype] = flops.get(point.dtype, 0.0) + point.flops
        return max(flops, key=lambda dtype: flops[dtype]) if flops else "float32"

    @property
    def ridge_point(self) -> float:
        """FLOP/byte above which the device's tensor cores bound a contraction in that dtype."""
        return self.device.ridge_point(self.dtype)

    @property
    def fits(self) -> bool:
        """Whether the device has enough memory."""
        return self.memory.peak_bytes <= self.device.memory_bytes

    def to_dict(self) -> dict[str, object]:
        """The whole report as JSON-compatible data."""
        device = self.device
        return {
            "model": self.model,
            "phase": self.phase,
            "items": self.items,
            "tokens": self.tokens,
            "cached": self.cached,
            "attention": self.attention,
            "device": {
                "kind": device.kind,
                "source": device.source,
                "dtype": self.dtype,
                "peak_flops_per_s": device.contraction_flops_per_s(self.dtype),
                "peak_vector_flops_per_s": device.cuda_flops_per_s,
                "peak_bytes_per_s": device.memory_bytes_per_s,
                "memory_bytes": device.memory_bytes,
                "ridge_point_flop_per_byte": self.ridge_point,
            },
            "total": self.total.row(),
            "stages": [stage.row() for stage in self.stages],
            "groups": [
                {"stage": point.stage, "kind": point.kind, "dtype": point.dtype}
                | Total(name=point.name, points=(point,)).row()
                | {"measured_s": self.measured_s(point)}
                for point in self.points
            ],
            "memory": {**asdict(self.memory), "peak_bytes": self.memory.peak_bytes},
            "fits": self.fits,
            "unknown_primitives": list(self.unknown),
            "exact": self.exact,
            "measured": asdict(self.measured) if self.measured else None,
        }

    def __str__(self) -> str:
        """A title, a table of stages and groups, totals, memory."""
        return "\n".join((_title(self), _table(self), summary_text(self)))


def _title(report: Roofline) -> str:
    device, sizes = report.device, []
    if report.items:
        sizes.append(f"batch {report.items:,}")
    if report.tokens:
        sizes.append(f"{count(report.tokens, 'token')} in")
    if report.cached:
        sizes.append(f"{report.cached:,} cached a row")
    sized = f" ({', '.join(sizes)})" if sizes else ""
    rates = (
        f"predicted for {device.kind}: {_rate(device.contraction_flops_per_s(report.dtype))} of "
        f"tensor cores, {_rate(device.cuda_flops_per_s)} of others, "
        f"{device.memory_bytes_per_s / 1e12:.3g} TB/s, ridge point {report.ridge_point:.0f} "
        f"FLOP/byte ({device.source})"
    )
    head = f"{report.model}, {report.phase}{sized}, {report.dtype}, attention {report.attention}"
    return "\n".join((head, *wrapped(rates)))


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
        "x: how often a call runs it; MB: bytes moved, by contents; TFLOP/s: the attainable rate",
    )
    return "\n".join([*lines, *legend])


def _row(name: str, total: Total, whole_s: float, repeats: str | None = None) -> str:
    moved = total.traffic
    times = f"{total.repeats}" if repeats is None else repeats
    share = total.seconds / whole_s if whole_s else 0.0
    return (
        f"{name[:22]:22}{times:>3} {short(total.flops / 1e9):>9} "
        f"{short(moved.weights / 1e6):>8} {short(moved.activations / 1e6):>8} "
        f"{short(moved.kv_cache / 1e6):>8} {short(total.intensity):>7} "
        f"{total.resource:<6} {short(total.attainable_flops_per_s / 1e12):>7} "
        f"{short(total.seconds * 1e3):>8} {share:>5.0%}"
    )


def summary_text(report: Roofline) -> str:
    """Totals, kinds, memory, and what the prediction leaves out."""
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
        lines.append(
            "a loop without a known length counts once, a branch as its costliest, eigenvalues by "
            "their usual iterations"
        )
    return "\n".join(line for text in lines for line in wrapped(text))


def _rate(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e12:,.4g} TFLOP/s"
