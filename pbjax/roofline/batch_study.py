"""The effect of batch and length on a decoder: curves, critical and largest batch, a choice.

Everything here is arithmetic on a few traced reports, which the caller makes: the FLOPs and bytes
of a group of operations are a straight line in the batch and at most a parabola in the length, so
two or three sizes give all others exactly.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from pbjax.errors import InputError, MemoryBudgetError
from pbjax.roofline.points import Memory, Point, Total, Traffic
from pbjax.roofline.result import Roofline

# Phase, rows of the batch, tokens of a row.
type ReportAt = Callable[[str, int, int], Roofline]

# A batch whose throughput is this near to the best counts as equal: it answers sooner.
PLATEAU = 0.02
# The batches that define the lines. JAX programs treat one row specially, so it is left out.
BATCH_NODES = (2, 64)
MIN_SEQ = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SizePoint:
    """A phase at one batch and length, predicted.

    Attributes:
      phase: "prefill" or "decode".
      batch_size: Rows of the batch.
      seq_len: Tokens of a row; in decode those that its cache holds.
      seconds: Seconds of a call: until the first token of a prompt, or for one more token of every
        row.
      tokens_per_s: Tokens taken in by prefill, or made by decode, per second.
      dense_intensity: FLOP/byte of the dense layers.
      dense_flops_per_s: The rate that the dense layers can reach.
      attention_intensity: FLOP/byte of attention.
      attention_flops_per_s: The rate that attention can reach.
      peak_bytes: Device memory that the call needs.
      fits: Whether the device has that much.
    """

    phase: str
    batch_size: int
    seq_len: int
    seconds: float
    tokens_per_s: float
    dense_intensity: float
    dense_flops_per_s: float
    attention_intensity: float
    attention_flops_per_s: float
    peak_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseStudy:
    """One phase over batch and over length.

    Attributes:
      phase: "prefill" or "decode".
      by_batch: Points at one length, over the batch.
      by_seq: Points at one batch, over the length.
      critical_batch: Rows at which the dense layers together reach the ridge point; infinite if no
        batch is large enough.
      layers: The critical batch of each dense layer.
      largest_batch: The most rows that fit into the device's memory.
      kv_bytes_per_row: Bytes of the KV cache for one row.
    """

    phase: str
    by_batch: tuple[SizePoint, ...]
    by_seq: tuple[SizePoint, ...]
    critical_batch: float
    layers: Mapping[str, float]
    largest_batch: int
    kv_bytes_per_row: float

    def to_dict(self) -> dict[str, object]:
        """The study as JSON-compatible data; infinity becomes null."""
        data = asdict(self)
        data["critical_batch"] = _finite(self.critical_batch)
        data["layers"] = {name: _finite(rows) for name, rows in self.layers.items()}
        return data


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeChoice:
    """A chosen batch and the reason.

    Attributes:
      chosen: The chosen batch.
      runner_up: The best of the other allowed batches in throughput; None if there is none.
      front: The batches that no other beats in both latency and throughput, fastest first.
      reason: The reason for the choice.
      latency_s: The longest that a call may take; None = any.
    """

    chosen: SizePoint
    runner_up: SizePoint | None
    front: tuple[SizePoint, ...]
    reason: str
    latency_s: float | None = None


def interpolated(known: Mapping[int, Roofline], at: int) -> Roofline:
    """A report at another size, by the polynomial through known ones.

    Args:
      known: Reports of one model by the size in which alone they differ: two for the batch or for
        the tokens of a cache, three for the length of a prompt.
      at: The size.

    Returns:
      A report that is exact where the values, `items` and `tokens` among them, are polynomials of
      that degree. The temporary bytes are as long as the same values are alive at the peak.
    """
    shares = {
        size: math.prod((at - other) / (size - other) for other in known if other != size)
        for size in known
    }
    reports = list(known.values())
    if len({tuple((p.stage, p.name) for p in report.points) for report in reports}) > 1:
        raise AssertionError("reports of one model have the same groups at every size")
    weighted = [(share, known[size]) for size, share in shares.items()]

    def mean(value: Callable[[Roofline], float]) -> float:
        # Rounding must not turn 0 into a negative number.
        return max(0.0, sum((share * value(report) for share, report in weighted), 0.0))

    points = tuple(_point(mean, i, point) for i, point in enumerate(reports[0].points))
    memory = Memory(
        weight_bytes=round(mean(lambda report: report.memory.weight_bytes)),
        input_bytes=round(mean(lambda report: report.memory.input_bytes)),
        kv_cache_bytes=round(mean(lambda report: report.memory.kv_cache_bytes)),
        temporary_bytes=round(mean(lambda report: report.memory.temporary_bytes)),
    )
    return replace(
        reports[0],
        points=points,
        memory=memory,
        items=round(mean(lambda report: report.items)),
        tokens=round(mean(lambda report: report.tokens)),
    )


def _point(mean: Callable[[Callable[[Roofline], float]], float], i: int, point: Point) -> Point:
    return replace(
        point,
        flops=mean(lambda report: report.points[i].flops),
        traffic=Traffic(
            weights=mean(lambda report: report.points[i].traffic.weights),
            activations=mean(lambda report: report.points[i].traffic.activations),
            kv_cache=mean(lambda report: report.points[i].traffic.kv_cache),
        ),
        tensor_s=mean(lambda report: report.points[i].tensor_s),
        cuda_s=mean(lambda report: report.points[i].cuda_s),
        memory_s=mean(lambda report: report.points[i].memory_s),
    )


def study_phase(
    report_at: ReportAt,
    phase: str,
    *,
    batch_size: int,
    seq_len: int,
    batches: Sequence[int] | None = None,
    lengths: Sequence[int] = (64, 128, 256, 512, 1024, 2048, 4096, 8192),
    max_seq_len: int | None = None,
    curves: Literal["interpolated", "traced"] = "interpolated",
) -> PhaseStudy:
    """Predicts a phase over batch and over length from a handful of reports.

    Args:
      report_at: Makes a report.
      phase: "prefill" or "decode".
      batch_size: Rows of the batch while the length varies.
      seq_len: Tokens of a row while the batch varies.
      batches: The batches; None takes powers of two up to the largest that fits, and that one.
      lengths: The lengths; those that the model does not take are left out.
      max_seq_len: The longest that the model takes; None = any.
      curves: "traced" asks for a report at every batch and length: seconds of kernels by their
        tiles are no straight line.

    Raises:
      InputError: Too few of the lengths fit the model.
      MemoryBudgetError: Not even one row fits.
    """
    allowed = [s for s in lengths if MIN_SEQ <= s <= (max_seq_len or s)]
    nodes = _nodes(allowed, 2 if phase == "decode" else 3)
    by_batch = {rows: report_at(phase, rows, seq_len) for rows in BATCH_NODES}
    largest = largest_batch(report_at, by_batch, phase, seq_len)
    if batches is None:
        powers = (2**i for i in range(largest.bit_length()))
        batches = sorted({*(rows for rows in powers if rows <= largest), largest})
    by_seq = {length: report_at(phase, batch_size, length) for length in nodes}
    if curves == "traced":
        by_batch |= {rows: report_at(phase, rows, seq_len) for rows in batches}
        by_seq |= {length: report_at(phase, batch_size, length) for length in allowed}
    low, high = by_batch[BATCH_NODES[0]], by_batch[BATCH_NODES[1]]
    return PhaseStudy(
        phase=phase,
        by_batch=tuple(size_point(_at(by_batch, b), b, seq_len) for b in batches),
        by_seq=tuple(size_point(_at(by_seq, s), batch_size, s) for s in allowed),
        critical_batch=_critical(_dense(low), _dense(high), low.ridge_point),
        layers={
            f"{a.stage}/{a.name}": _critical(_single(a), _single(b), low.ridge_point)
            for a, b in zip(low.points, high.points, strict=True)
            if a.kind == "dense"
        },
        largest_batch=largest,
        kv_bytes_per_row=low.memory.kv_cache_bytes / BATCH_NODES[0],
    )


def _at(known: Mapping[int, Roofline], size: int) -> Roofline:
    return known[size] if size in known else interpolated(known, size)


def _nodes(lengths: Sequence[int], count: int) -> list[int]:
    """The shortest and the longest length, and others evenly between them in the list."""
    if len(lengths) < count:
        raise InputError(
            f"study over the length: {len(lengths)} of the lengths fit the model; {count} lengths "
            f"of {MIN_SEQ} tokens or more are needed; ask for a model with more positions, or "
            "without a study"
        )
    return [lengths[round(i * (len(lengths) - 1) / (count - 1))] for i in range(count)]


def size_point(report: Roofline, batch_size: int, seq_len: int) -> SizePoint:
    """A report as a point of the curves."""
    kinds = {total.name: total for total in report.kinds}
    empty = Total(name="", points=())
    dense, attention = kinds.get("dense", empty), kinds.get("attention", empty)
    seconds = report.total.seconds
    return SizePoint(
        phase=report.phase,
        batch_size=batch_size,
        seq_len=seq_len,
        seconds=seconds,
        tokens_per_s=report.tokens / seconds,
        dense_intensity=dense.intensity,
        dense_flops_per_s=dense.attainable_flops_per_s,
        attention_intensity=attention.intensity,
        attention_flops_per_s=attention.attainable_flops_per_s,
        peak_bytes=report.memory.peak_bytes,
        fits=report.fits,
    )


def choose_point(points: Sequence[SizePoint], latency_s: float | None = None) -> SizeChoice:
    """The smallest batch whose throughput is within 2 % of the best that is allowed.

    Args:
      points: Points of one phase over the batch.
      latency_s: The longest that a call may take; None = any.

    Raises:
      InputError: No batch fits both the memory and the limit.
    """
    room = sorted((p for p in points if p.fits), key=lambda point: point.batch_size)
    allowed = [p for p in room if latency_s is None or p.seconds <= latency_s]
    if not allowed:
        fastest = min(points, key=lambda point: point.seconds)
        limit = "any" if latency_s is None else f"{latency_s * 1e3:,.4g} ms"
        raise InputError(
            f"choose a batch (latency {limit}): the fastest of {len(points):,} looked at is "
            f"{fastest.batch_size:,} with {fastest.seconds * 1e3:,.4g} ms and "
            f"{fastest.peak_bytes / 1e9:,.2g} GB; it must keep the limit and fit the memory; allow "
            "more time, or shorten the sequences"
        )
    best = max(allowed, key=lambda point: point.tokens_per_s)
    enough = (1 - PLATEAU) * best.tokens_per_s
    chosen = next(point for point in allowed if point.tokens_per_s >= enough)
    others = [point for point in allowed if point != chosen]
    return SizeChoice(
        chosen=chosen,
        runner_up=max(others, key=lambda point: point.tokens_per_s, default=None),
        front=_front(points),
        reason=_reason(chosen, best, allowed, room, points),
        latency_s=latency_s,
    )


def _reason(
    chosen: SizePoint,
    best: SizePoint,
    allowed: Sequence[SizePoint],
    room: Sequence[SizePoint],
    points: Sequence[SizePoint],
) -> str:
    if chosen != best:
        return (
            f"throughput: batch {best.batch_size:,} is within {PLATEAU:.0%} of it and takes "
            f"{_milliseconds(best)} ms instead of {_milliseconds(chosen)}"
        )
    after = next((point for point in room if point.batch_size > best.batch_size), None)
    if after is not None:
        larger = f"batch {after.batch_size:,} would take {_milliseconds(after)} ms"
        return (
            f"throughput: {larger}, and give no more" if after in allowed else f"latency: {larger}"
        )
    if len(room) < len(points):
        return "memory: the next larger batch does not fit"
    return f"throughput: it is the best of the {len(points):,} looked at, and the largest"


def _milliseconds(point: SizePoint) -> str:
    value = 1e3 * point.seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _front(points: Sequence[SizePoint]) -> tuple[SizePoint, ...]:
    """The points that fit and that no other beats, fastest first."""
    front: list[SizePoint] = []
    for point in sorted((p for p in points if p.fits), key=lambda p: (p.seconds, -p.tokens_per_s)):
        if not front or point.tokens_per_s > front[-1].tokens_per_s:
            front.append(point)
    return tuple(front)


def largest_batch(
    report_at: ReportAt, known: Mapping[int, Roofline], phase: str, seq_len: int
) -> int:
    """The most rows that fit, by the line through two batches, then through nearer ones."""
    low, high = sorted(known)
    reports = dict(known)
    for _ in range(8):
        rows = _rows_that_fit(reports[low], reports[high], low, high)
        if rows in reports and reports[rows].fits:
            return rows
        reports[rows] = report_at(phase, rows, seq_len)
        if rows > high:
            low, high = high, rows
        elif rows < low:
            low, high = rows, low
        else:
            low = rows
    raise AssertionError("peak memory is not a line in the batch even where the batch is large")


def _rows_that_fit(a: Roofline, b: Roofline, low: int, high: int) -> int:
    peaks = [report.memory.peak_bytes for report in (a, b)]
    per_row = (peaks[1] - peaks[0]) / (high - low)
    fixed = peaks[0] - low * per_row
    rows = math.floor((a.device.memory_bytes - fixed) / per_row)
    if rows < 1:
        memory = a.memory
        raise MemoryBudgetError(
            f"{a.phase} of {a.model}: {fixed / 1e9:,.1f} GB whatever the batch "
            f"({memory.weight_bytes / 1e9:,.1f} of weights) and {per_row / 1e9:,.3f} GB a row; "
            f"{a.device.kind} has {a.device.memory_bytes / 1e9:,.1f} GB; shorten the sequences, "
            "use fewer bits, or choose a larger device"
        )
    return rows


def _dense(report: Roofline) -> tuple[float, float]:
    points = tuple(point for point in report.points if point.kind == "dense")
    total = Total(name="dense", points=points)
    return total.flops, total.traffic.total


def _single(point: Point) -> tuple[float, float]:
    return point.flops, point.traffic.total


def _critical(low: tuple[float, float], high: tuple[float, float], ridge: float) -> float:
    """Rows at which FLOPs are ridge times bytes, both as straight lines through two batches."""
    a, b = BATCH_NODES
    slopes = [(y - x) / (b - a) for x, y in zip(low, high, strict=True)]
    starts = [x - a * slope for x, slope in zip(low, slopes, strict=True)]
    gain = slopes[0] - ridge * slopes[1]
    return (ridge * starts[1] - starts[0]) / gain if gain > 0 else math.inf


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
