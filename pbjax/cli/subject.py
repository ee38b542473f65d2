"""A model on a device as the commands ask about it: its predicted and its measured reports."""

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from pbjax.cli.devices import named_device, this_device
from pbjax.errors import InputError, MemoryBudgetError

if TYPE_CHECKING:
    from pbjax.device import Device
    from pbjax.roofline.batch_study import SizePoint
    from pbjax.roofline.measured_table import MeasuredTable
    from pbjax.roofline.result import Roofline

# Of a deeper model so many are traced, and one less: the rest are like the last. In three a
# Conformer's layers are not yet found to repeat as they do in nine.
TRACED_LAYERS = 5

Peaks = Literal["measured", "datasheet"]


@runtime_checkable
class Shape(Protocol):
    """What is asked of a model; `models` makes it, which nothing here imports."""

    @property
    def config(self) -> Any:
        """Its sizes."""

    @property
    def module(self) -> Any:
        """The module, of shapes and dtypes or with weights."""

    @property
    def phases(self) -> tuple[str, ...]:
        """What a call of it can do."""
        ...

    def call(self, phase: str, batch_size: int, seq_len: int | None, new_tokens: int = 1) -> Any:
        """A call of it in shapes."""

    def with_layers(self, num_layers: int) -> "Shape":
        """The same with another number of layers."""
        ...

    def calling_kernels(self) -> "Shape":
        """The same with the kernels of the device that is traced for."""
        ...

    def filled(self) -> "Shape":
        """The same with random weights and the kernels of this device."""
        ...

    def values(self, call: Any) -> tuple[object, ...]:
        """Random inputs of a call."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model on a device; makes its reports, each once.

    Attributes:
      name: Of the model, for reports.
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
    if subject.num_layers is not None:
        return _deep_report(subject, phase, batch_size, seq_len, new_tokens)
    device, target = subject.device, nullcontext()
    if subject.kernels:
        target = import_module("models.presets").traced_for(device.kind, device.num_sms)
    with target:
        shape = subject.shape.calling_kernels() if subject.kernels else subject.shape
        call = shape.call(phase, batch_size, seq_len, new_tokens)
        return _call_report(subject, phase, batch_size, call, call.inputs, measure=False)


def _deep_report(subject: Subject, *call: Any) -> "Roofline":
    from pbjax.roofline.depth import deepened

    assert subject.num_layers is not None
    shapes = (subject.shape.with_layers(TRACED_LAYERS - 1), subject.shape)
    reports = (replace(subject, shape=shape, num_layers=None).report(*call) for shape in shapes)
    return deepened(*reports, num_more=subject.num_layers - TRACED_LAYERS + 1)


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


def find_folder(folder: Path, asked: str, fits: Callable[[Shape], bool], allowed: str) -> Shape:
    """The model of a folder without its weights: what is of no use is refused before they are read.

    Args:
      folder: A Hugging Face folder, or one of `pbjax convert`.
      asked: The command, for the message.
      fits: Whether the command can do anything with a model.
      allowed: Models of which that is so, for the message.

    Raises:
      InputError: It is another model.
      CheckpointError: The folder has no configuration, or one that is not supported.
    """
    shape = import_module("models.presets").find_shape(str(folder.absolute()))
    if not fits(shape):
        raise InputError(
            f"{asked}({folder}): a {type(shape.module).__name__}; {allowed} is allowed; give the "
            "folder of such a model"
        )
    return shape


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
    whole = subject.num_layers
    shape = subject.shape if whole is None else subject.shape.with_layers(whole)
    filled = replace(subject, shape=shape.filled(), num_layers=None)
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
