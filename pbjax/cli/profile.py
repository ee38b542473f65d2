"""The command `pbjax profile`: measures the stages of a model on the device of JAX, into a table.

The model is a preset's name or a folder with a config.json, with random weights, up to its last
hidden states.
"""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pbjax.cli.exits import interrupted_with
from pbjax.cli.options import (
    Batch,
    Dtype,
    Json,
    Model,
    Seq,
    named_device,
    path_option,
    this_device,
)
from pbjax.errors import DeviceError
from pbjax.files import check_writable

if TYPE_CHECKING:
    from pbjax.device import Device


def profile(
    model: Model,
    batch: Batch,
    out: Annotated[Path, path_option(help="Table to write, or to complete if it is there.")],
    seq: Seq = None,
    dtype: Dtype = "bfloat16",
    device: Annotated[
        str | None, typer.Option(help="What this device must be; any that is there if absent.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the stages of a model on this device, alone and side by side."""
    from pbjax.progress import ProgressPrinter
    from pbjax.runtime.phases import Phases
    from pbjax.tuning.measured_table import measured_table
    from pbjax.tuning.preset_model import ForwardPass

    began = time.perf_counter()
    here = _profiled_device(device)
    asked = ForwardPass(model=model, batch_size=batch, seq_len=seq, dtype=dtype)
    if not out.exists():
        check_writable("pbjax profile --out", out)
    with interrupted_with(f"what was measured is kept in {out}"), ProgressPrinter() as progress:
        phases = Phases(progress)
        with phases.phase("analyse"):
            analysis, leaves = asked.filled(here)
        found = measured_table(analysis, leaves, out, phases, asked.command(here, out.name))
    seconds = {phase.name: round(phase.seconds, 1) for phase in phases.finished()}
    document = {
        "table": str(out),
        "device_kind": here.kind,
        "rows": len(found.profile.rows),
        "pairs": len(found.profile.corun),
        "measured": found.rows_measured,
        "seconds": round(time.perf_counter() - began, 1),
        "phases": seconds,
    }
    print(json.dumps(document) if as_json else _profile_text(document, asked.command(here, out)))


def _profiled_device(wanted: str | None) -> "Device":
    asked = "pbjax profile"
    named = None if wanted is None else named_device(asked, wanted)  # before JAX looks for devices
    here = this_device(asked)
    if named is not None and named.kind != here.kind:
        raise DeviceError(
            f"{asked} --device {wanted}: the first device of JAX is {here.kind!r}; a table "
            "is measured on its device; run this there, or leave out --device"
        )
    return here


def _profile_text(document: dict[str, Any], command: str) -> str:
    phases = ", ".join(f"{name} {seconds} s" for name, seconds in document["phases"].items())
    done = "written" if document["measured"] else "complete already"
    return (
        f"{document['device_kind']}: {document['rows']} rows and {document['pairs']} pairs, "
        f"{document['measured']} of them new, in {document['seconds']} s ({phases})\n"
        f"{done}: {document['table']}\nagain: {command}"
    )
