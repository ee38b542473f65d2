"""Which batch to run a model at: the smallest that is as good as any within a limit of latency.

Predicted from the traced operations at two batches; on the device that it is for, the prediction's
choice and its neighbours are measured, and the choice is made again among what was measured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pbjax.batch_axes.inputs import BatchAxes, find_batch
from pbjax.device import Device
from pbjax.errors import InputError
from pbjax.graph.functional import Model, functional
from pbjax.roofline.batch_study import (
    BATCH_NODES,
    PLATEAU,
    SizeChoice,
    SizePoint,
    choose_point,
    interpolated,
    largest_batch,
    size_point,
)
from pbjax.roofline.report import roofline_report
from pbjax.roofline.result import Roofline
from pbjax.runtime.timing import time_function
from pbjax.text_tables import size, table_text, wrapped

MAX_BATCH = 1 << 16
MEASURED_AT_MOST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchChoice:
    """A batch and why.

    Attributes:
      model: Name of the model.
      device_kind: Kind of the device that the choice is for.
      latency_s: The longest that a call may take; None = any.
      choice: The batch, the next best, and what decided.
      predicted: Predicted points, by batch size.
      measured: Measured points, by batch size; empty if nothing was measured.
      largest_batch: The most rows that fit the device's memory.
      kv_bytes_per_row: Bytes of the KV cache for one row; 0 without one.
    """

    model: str
    device_kind: str
    latency_s: float | None
    choice: SizeChoice
    predicted: tuple[SizePoint, ...]
    measured: tuple[SizePoint, ...]
    largest_batch: int
    kv_bytes_per_row: float

    @property
    def batch_size(self) -> int:
        """The batch."""
        return self.choice.chosen.batch_size

    def to_dict(self) -> dict[str, object]:
        """All of it as JSON-compatible data."""
        return {"batch_size": self.batch_size, **asdict(self)}

    def __str__(self) -> str:
        """A table of the batches, and the choice in words."""
        found = {point.batch_size: point for point in self.measured}
        rows = [
            (
                f"{p.batch_size:,}",
                p.seconds * 1e3,
                found[p.batch_size].seconds * 1e3 if p.batch_size in found else "-",
                found.get(p.batch_size, p).tokens_per_s,
                size(p.peak_bytes),
                "<- chosen" if p.batch_size == self.batch_size else "" if p.fits else "no room",
            )
            for p in self.predicted
        ]
        limit = "any latency" if self.latency_s is None else f"{self.latency_s * 1e3:,.4g} ms"
        columns = ("batch", "predicted ms", "measured ms", "items/s", "memory", "")
        title = f"{self.model} on {self.device_kind} within {limit}, one call a batch"
        other = self.choice.runner_up
        lines = [
            f"batch {self.batch_size:,}: {self.choice.reason}"
            + (f"; runner-up {other.batch_size:,}" if other else ""),
            f"largest batch that fits: {self.largest_batch:,}"
            + (f" ({size(self.kv_bytes_per_row)} of KV cache a row)" if self.has_cache else ""),
        ]
        return "\n".join(
            [table_text(title, columns, rows), *(line for text in lines for line in wrapped(text))]
        )

    @property
    def has_cache(self) -> bool:
        """Whether the model keeps keys and values between calls."""
        return self.kv_bytes_per_row > 0


def choose_batch(
    model: Model,
    *inputs: object,
    device: Device | str,
    variables: Mapping[str, object] | None = None,
    batch_axes: object = 0,
    cache: Sequence[int] = (),
    latency_s: float | None = None,
    max_batch: int | None = None,
    measure: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> BatchChoice:
    """Chooses the batch of a model.

    Args:
      model: An nnx or linen module, a method of one, or any callable; of arrays or of their shapes.
      *inputs: Inputs of a call, or their shapes and dtypes, at any batch.
      device: The device, or its kind.
      variables: Variables of an unbound linen module.
      batch_axes: Where the batch is in the inputs, as in `optimize`.
      cache: Which of the inputs hold a KV cache.
      latency_s: The longest that a call may take; None = any.
      max_batch: No larger batch is asked for; None = as large as the memory.
      measure: Also run a few batches on the first device of JAX, which `device` must be, and choose
        among these. Weights and inputs must be arrays then; rows are repeated.
      progress: Called as progress(done, total, item) before each measurement.

    Returns:
      The choice.

    Raises:
      InputError: Not one batch keeps the limit, by what was measured or else predicted; or an
        argument has a wrong value.
      MemoryBudgetError: Not one row fits.
    """
    if latency_s is not None and not latency_s > 0:
        raise InputError(
            f"choose_batch(latency_s={latency_s}): not a time; seconds above 0 are allowed; give "
            "the longest that a call may take, or leave it out"
        )
    batch = find_batch(inputs, batch_axes)

    def report(phase: str, rows: int, seq_len: int) -> Roofline:
        return roofline_report(
            model,
            *_shapes(inputs, batch, rows),
            device=device,
            variables=variables,
            cache=cache,
            phase=phase,
            items=rows,
            tokens=rows,
        )

    nodes = {rows: report("forward", rows, 0) for rows in BATCH_NODES}
    largest = largest_batch(report, nodes, "forward", 0)
    sizes = candidates(min(largest, max_batch or MAX_BATCH))
    points = tuple(size_point(interpolated(nodes, rows), rows, 0) for rows in sizes)
    low = nodes[BATCH_NODES[0]]
    found: tuple[SizePoint, ...] = ()
    if measure:
        timed = _Timed(model, variables, inputs, batch)
        found = measured_points(points, timed, latency_s, progress)
    return BatchChoice(
        model=low.model,
        device_kind=low.device.kind,
        latency_s=latency_s,
        choice=choose_point(found or points, latency_s),
        predicted=points,
        measured=found,
        largest_batch=largest,
        kv_bytes_per_row=low.memory.kv_cache_bytes / BATCH_NODES[0],
    )


def candidates(largest: int) -> tuple[int, ...]:
    """Powers of two and one and a half of them up to a batch, and the batch itself."""
    powers = [1 << i for i in range(largest.bit_length())]
    return tuple(sorted({n for p in powers for n in (p, p + p // 2) if n <= largest} | {largest}))


def measured_points(
    points: Sequence[SizePoint],
    seconds_at: Callable[[int], float],
    latency_s: float | None,
    progress: Callable[[int, int, str], None] | None = None,
) -> tuple[SizePoint, ...]:
    """Measures what is predicted to be best, and goes on in the direction that gets better.

    Args:
      points: Predicted, by batch.
      seconds_at: Measures a call with so many rows.
      latency_s: The longest that a call may take; None = any.
      progress: Called as progress(done, total, item) before each measurement.

    Returns:
      A few of the points, with measured seconds and rates.
    """
    room = [point for point in points if point.fits]
    within = [i for i, p in enumerate(room) if latency_s is None or p.seconds <= latency_s]
    # Predicted to be too slow at every batch, one may still be fast enough.
    start = room.index(choose_point(room, latency_s).chosen) if within else 0
    found: dict[int, SizePoint] = {}
    waiting = [start]
    while waiting and len(found) < MEASURED_AT_MOST:
        place = waiting.pop(0)
        point = room[place]
        if progress is not None:
            progress(len(found), MEASURED_AT_MOST, f"batch {point.batch_size}")
        seconds = seconds_at(point.batch_size)
        found[place] = replace(point, seconds=seconds, tokens_per_s=point.batch_size / seconds)
        waiting = waiting or _next(found, len(room), latency_s)
    return tuple(found[place] for place in sorted(found))


def _next(found: Mapping[int, SizePoint], count: int, latency_s: float | None) -> list[int]:
    """The batch to measure next: smaller while all are too slow, larger while that still gains.

    One that gains nothing does not end it, as a sample may be off: two in a row do.
    """
    allowed = [i for i, p in found.items() if latency_s is None or p.seconds <= latency_s]
    low, high = min(found), max(found)
    if not allowed:
        return [low - 1] if low > 0 else []
    best = max(allowed, key=lambda i: found[i].tokens_per_s)
    if high - best <= 1 and high in allowed and high + 1 < count:
        return [high + 1]
    smallest = min(allowed)
    good = found[smallest].tokens_per_s >= (1 - PLATEAU) * found[best].tokens_per_s
    return [low - 1] if smallest == low and good and low > 0 else []


class _Timed:
    """Seconds of a call of a model with any number of rows."""

    def __init__(
        self,
        model: Model,
        variables: Mapping[str, object] | None,
        inputs: Sequence[object],
        batch: BatchAxes,
    ):
        """Refuses shapes, which cannot be run."""
        seam = functional(model, variables)
        leaves = jax.tree.leaves((seam.params, tuple(inputs)))
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            raise InputError(
                f"choose_batch({seam.name}, measure=True): weights or inputs are shapes; arrays "
                "are needed to run a call; pass arrays, or leave out measure="
            )
        self._seam, self._inputs, self._batch = seam, tuple(inputs), batch

    def __call__(self, rows: int) -> float:
        leaves = [
            leaf if axis is None else _repeated(jnp.asarray(leaf), axis, rows)
            for leaf, axis in zip(jax.tree.leaves(self._inputs), self._batch.axes, strict=True)
        ]
        inputs = jax.tree.unflatten(self._batch.tree, leaves)
        function = jax.jit(self._seam.apply)
        return time_function(function, self._seam.params, *inputs, samples=3).median_s


def _repeated(x: Array, axis: int, rows: int) -> Array:
    return jnp.take(x, jnp.arange(rows) % x.shape[axis], axis=axis)


def _shapes(inputs: Sequence[object], batch: BatchAxes, rows: int) -> Sequence[object]:
    leaves = []
    for leaf, axis in zip(jax.tree.leaves(tuple(inputs)), batch.axes, strict=True):
        shape = list(leaf.shape)
        if axis is not None:
            shape[axis] = rows
        leaves.append(jax.ShapeDtypeStruct(tuple(shape), leaf.dtype))
    return jax.tree.unflatten(batch.tree, leaves)
