"""A model on a device as the commands ask about it: its predicted and its measured reports."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pbjax.cli.model_folder import Shape
from pbjax.cli.options import named_device, this_device
from pbjax.errors import InputError, MemoryBudgetError
from pbjax.roofline.depth import TRACED_LAYERS, deep_report

if TYPE_CHECKING:
    from pbjax.device import Device
    from pbjax.roofline.batch_study import SizePoint
    from pbjax.roofline.measured_table import MeasuredTable
    from pbjax.roofline.result import Roofline

Peaks = Literal["measured", "datasheet"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model on a device; makes its reports, each once.

    Attributes:
      name: The model's name, for reports.
      shape: The model.
      device: Where it would run.
      attention: "fused" or "unfused".
      kernels: Whether its layers call the kernels that the device has.
      num_layers: How many it has, where the shape has only `TRACED_LAYERS` of them; None where it
        has all.
    """

    name: str
    shape: Shape
    device: "Device"
    attention: str
    kernels: bool = False
    num_layers: int | None = None

    def report(
        self, phase: str, batch_size: int, seq_len: int | None, new_tokens: int = 1
    ) -> "Roofline":
        """What a call is predicted to take."""
        return _report(self, phase, batch_size, seq_len, new_tokens)

    def measured(self, phase: str, batch_size: int, seq_len: int | None) -> "Roofline":
        """The same of a shape that is filled, with what its stages take here."""
        call = self.shape.call(phase, batch_size, seq_len)
        return _call_report(self, phase, batch_size, call, self.shape.values(call), measure=True)


@cache
def _report(
    subject: Subject, phase: str, batch_size: int, seq_len: int | None, new_tokens: int
) -> "Roofline":
    asked = phase, batch_size, seq_len, new_tokens
    if subject.num_layers is None:
        return _traced_report(subject, *asked)
    return deep_report(
        lambda count: _traced_report(_with_layers(subject, count), *asked), subject.num_layers
    )


@cache
def _with_layers(subject: Subject, num_layers: int) -> Subject:
    return replace(subject, shape=subject.shape.with_layers(num_layers), num_layers=None)


def _traced_report(
    subject: Subject, phase: str, batch_size: int, seq_len: int | None, new_tokens: int
) -> "Roofline":
    device, target = subject.device, nullcontext()
    if subject.kernels:
        target = import_module("models.presets").traced_for(device.kind, device.num_sms)
    with target:
        shape = subject.shape.calling_kernels() if subject.kernels else subject.shape
        call = shape.call(phase, batch_size, seq_len, new_tokens)
        return _call_report(subject, phase, batch_size, call, call.inputs, measure=False)


def _call_report(
    subject: Subject,
    phase: str,
    batch_size: int,
    call: Any,
    inputs: tuple[object, ...],
    *,
    measure: bool,
) -> "Roofline":
    from pbjax.roofline.report import roofline_report

    return roofline_report(
        call.function,
        *inputs,
        device=subject.device,
        cache=call.cache,
        attention=subject.attention,
        name=subject.name,
        phase=phase,
        items=batch_size,
        tokens=call.tokens,
        cached=call.cached,
        measure=measure,
    )


def find_figures(kind: str | None, peaks: Peaks, *, here: bool) -> "Device":
    """The figures of a kind of device; of this machine's if none is named.

    Raises:
      InputError: Words name no device, or another one is named than is to be measured.
      DeviceError: This machine's is to be taken, of which no figures are known.
    """
    from pbjax.planning.ceilings import calibrated

    asked = "pbjax roofline"
    remedy = "only such can be measured" if here else "name one of them by --device"
    found = this_device(asked, remedy) if kind is None else named_device(asked, kind)
    if here and kind is not None and found.kind != (own := this_device(asked, remedy)).kind:
        raise InputError(
            f"pbjax roofline --measure --device {kind}: this machine has {own.kind!r}; "
            "only that can be measured; leave out --device, or --measure"
        )
    return calibrated(found) if peaks == "measured" else found


def find_subject(
    model: str, device: "Device", dtype: str, attention: str, layers: int | None
) -> Subject:
    """A preset or a folder on a device, with all of its layers or as many as are given."""
    from pbjax.text_tables import count

    traced = None if layers is None else min(layers, TRACED_LAYERS)
    shape = import_module("models.presets").find_shape(model, dtype, traced)
    name = Path(model).name
    name += "" if layers is None else f", {count(layers, 'layer')}"
    whole = layers or shape.config.num_layers
    if whole > TRACED_LAYERS:
        shape = shape.with_layers(TRACED_LAYERS)
    return Subject(
        name=name,
        shape=shape,
        device=device,
        attention=attention,
        num_layers=whole if whole > TRACED_LAYERS else None,
    )


def check_calls(
    subject: Subject, phases: Sequence[str], sizes: Sequence[tuple[int, int | None]]
) -> None:
    """Refuses phases and lengths that the model does not have, before anything is traced.

    Args:
      subject: The model.
      phases: Phases of the calls.
      sizes: Rows of the calls, and tokens of a row.

    Raises:
      InputError: The message names the phase or the length.
    """
    for phase in phases:
        for _, seq in sizes:
            subject.shape.call(phase, 1, seq)


def measured_reports(
    subject: Subject, phases: Sequence[str], sizes: Sequence[tuple[int, int | None]]
) -> "list[Roofline]":
    """Reports with what the stages take on this machine, once all are known to fit.

    Args:
      subject: The model.
      phases: Of which calls.
      sizes: Rows of the calls, and tokens of a row; those of the first come first.
    """
    calls = [(phase, *size) for size in dict.fromkeys(sizes) for phase in phases]
    for phase, batch, seq in calls:
        require_room(subject, subject.report(phase, batch, seq), seq)
    whole = subject if subject.num_layers is None else _with_layers(subject, subject.num_layers)
    filled = replace(whole, shape=whole.shape.filled())
    return [filled.measured(*call) for call in calls]


def measured_points(
    subject: Subject, reports: "Sequence[Roofline]", table: "MeasuredTable | None"
) -> "list[tuple[SizePoint, SizePoint]]":
    """Predicted and measured points: all that a table has, else what was measured now."""
    from pbjax.roofline.batch_study import size_point
    from pbjax.roofline.measured_table import measured_point

    phases = {report.phase for report in reports}
    found = [report for report in reports if report.measured is not None]
    if table is not None:
        rows = [r for r in table.rows if r.model == subject.name and r.phase in phases]
        found = [
            table.attached(subject.report(r.phase, r.items, r.cached or r.tokens // r.items))
            for r in rows
        ]
    sizes = [(r, r.items, r.cached or r.tokens // r.items) for r in found]
    return [(size_point(*size), measured_point(*size)) for size in sizes]


def keep_measured(reports: "list[Roofline]", path: Path) -> None:
    """Writes what was measured into a table, and names it on stderr."""
    from pbjax.roofline.measured_table import MeasuredTable, Row
    from pbjax.runtime.provenance import provenance_here

    rows = tuple(
        Row(
            model=r.model,
            phase=r.phase,
            items=r.items,
            tokens=r.tokens,
            cached=r.cached,
            measured=r.measured,
        )
        for r in reports
        if r.measured is not None
    )
    command = f"pbjax roofline {rows[0].model} --measure --save-measured {path.name}"
    where = provenance_here(reports[0].device.kind, command)
    MeasuredTable(provenance=where, rows=rows).save(path)
    print(f"written: {path}", file=sys.stderr)


def require_room(subject: Subject, report: "Roofline", seq: int | None) -> None:
    """Raises MemoryBudgetError unless the device has the memory that a call of a subject needs."""
    if report.fits:
        return
    memory, device, room = report.memory, report.device, _room(subject, report.phase, seq)
    raise MemoryBudgetError(
        f"pbjax roofline: {report.phase} at batch {report.items} needs "
        f"{memory.peak_bytes / 1e9:,.1f} GB ({memory.weight_bytes / 1e9:,.1f} weights, "
        f"{memory.kv_cache_bytes / 1e9:,.1f} KV cache, {memory.input_bytes / 1e9:,.1f} inputs, "
        f"{memory.temporary_bytes / 1e9:,.1f} temporaries); {device.kind} has "
        f"{device.memory_bytes / 1e9:,.1f} GB, {room}; lower --batch or --seq, or choose a larger "
        "--device"
    )


def _room(subject: Subject, phase: str, seq: int | None) -> str:
    """How many rows the device has room for."""
    from pbjax.roofline.batch_study import BATCH_NODES, largest_batch

    known = {rows: subject.report(phase, rows, seq) for rows in BATCH_NODES}
    try:
        most = largest_batch(lambda name, rows, _: subject.report(name, rows, seq), known, phase, 0)
    except MemoryBudgetError:
        return "too little for any batch"
    return f"enough for batch {most:,}"
