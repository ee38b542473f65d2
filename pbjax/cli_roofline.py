"""The command `pbjax roofline`: what bounds a model, from shapes alone."""

import json
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pbjax.errors import MemoryBudgetError

if TYPE_CHECKING:
    from pbjax.roofline_points import Roofline

Phase = Literal["prefill", "decode", "forward"]
Attention = Literal["fused", "unfused"]


def roofline(
    model: Annotated[
        str, typer.Argument(help="A preset, such as llama3-8b, or a folder with a config.json.")
    ],
    device: Annotated[str, typer.Option(help="Kind of device, such as nvidia-h200 or l40s.")],
    phase: Annotated[
        Phase | None, typer.Option(help="One phase; all that the model has otherwise.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows of the batch.")] = 1,
    seq: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of a row, or samples, or frames; in decode those that the cache holds.",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of weights and activations.")] = "bfloat16",
    attention: Annotated[
        Attention, typer.Option(help="Whether scores stay out of memory.")
    ] = "fused",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of text.")
    ] = False,
) -> None:
    """Predict what bounds each part of a model on a device; needs neither weights nor a GPU."""
    reports = _reports(model, device, phase, (batch, seq), dtype, attention)
    if as_json:
        print(json.dumps({"reports": [report.to_dict() for report in reports]}))
    else:
        from pbjax.roofline_text import report_text

        print("\n\n".join(report_text(report) for report in reports))
    for report in reports:
        _require_room(report)


def _reports(
    model: str,
    device: str,
    phase: Phase | None,
    sizes: tuple[int, int | None],
    dtype: str,
    attention: Attention,
) -> "list[Roofline]":
    from pbjax.device import find_device

    figures = find_device(device)  # before what takes longer
    presets = import_module("models.presets")
    from pbjax.roofline import roofline_report

    shape = presets.find_shape(model, dtype)
    calls = [(name, shape.call(name, *sizes)) for name in ((phase,) if phase else shape.phases)]
    return [
        roofline_report(
            call.function,
            *call.inputs,
            device=figures,
            cache=call.cache,
            attention=attention,
            name=model,
            phase=name,
            items=sizes[0],
            tokens=call.tokens,
        )
        for name, call in calls
    ]


def _require_room(report: "Roofline") -> None:
    if not report.fits:
        memory = report.memory
        raise MemoryBudgetError(
            f"pbjax roofline: {report.phase} at batch {report.items} needs "
            f"{memory.peak_bytes / 1e9:,.1f} GB ({memory.weight_bytes / 1e9:,.1f} weights, "
            f"{memory.kv_cache_bytes / 1e9:,.1f} KV cache, {memory.temporary_bytes / 1e9:,.1f} "
            f"temporaries); {report.device.kind} has {report.device.memory_bytes / 1e9:,.1f} GB; "
            "lower --batch or --seq, or choose a larger --device"
        )
