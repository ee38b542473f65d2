"""The command `pbjax calibrate`: measures what this machine reaches, for rooflines and steps."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pbjax.cli.options import Json, path_option, this_device
from pbjax.files import check_writable

if TYPE_CHECKING:
    from pbjax.device import Device
    from pbjax.planning.ceilings import Ceilings


def calibrate(
    out: Annotated[
        Path | None,
        path_option(help="Where to write; the user's cache otherwise, where pbjax finds it."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the real ceilings of this machine: products, bandwidth, functions, launches."""
    from pbjax.planning.ceilings import NAME, user_folder
    from pbjax.progress import ProgressPrinter
    from pbjax.tuning import calibration

    datasheet = this_device("pbjax calibrate")
    path = out or user_folder() / datasheet.slug / f"{NAME}.json"
    check_writable("pbjax calibrate --out", path)
    with ProgressPrinter() as progress:
        found = calibration.calibrate(datasheet.kind, progress)
    found.save(path)
    print(json.dumps(asdict(found)) if as_json else ceilings_text(found, datasheet))
    if not as_json:
        print(f"written: {path}")


def ceilings_text(found: "Ceilings", datasheet: "Device") -> str:
    """What was measured beside the datasheet, as a table.

    Args:
      found: What was measured.
      datasheet: The device's peaks.
    """
    from pbjax.text_tables import table_text

    rows: list[tuple[object, ...]] = []

    def add(name: str, unit: str, scale: float, measured: float | None, peak: float | None) -> None:
        if measured is None:
            return
        share = f"{measured / peak:.0%}" if peak else "-"
        rows.append((name, measured / scale, peak / scale if peak else "-", share, unit))

    for dtype, rate in found.tensor_flops_per_s.items():
        peak = datasheet.tensor_flops_per_s.get(dtype)
        add(f"product, {dtype}", "TFLOP/s", 1e12, rate, peak)
    for width, rate in found.attention_flops_per_s.items():
        add(f"attention, heads of {width}", "TFLOP/s", 1e12, rate, None)
    add("multiply-adds", "TFLOP/s", 1e12, found.cuda_flops_per_s, datasheet.cuda_flops_per_s)
    add("copy", "TB/s", 1e12, found.memory_bytes_per_s, datasheet.memory_bytes_per_s)
    add("reading weights", "TB/s", 1e12, found.weight_bytes_per_s, datasheet.memory_bytes_per_s)
    for name, rate in found.functions_per_s.items():
        add(name, "G/s", 1e9, rate, None)
    add("launch", "us", 1e-6, found.launch_s, None)
    if found.pallas_launch_s is not None:
        add("launch of our kernels", "us", 1e-6, found.pallas_launch_s, None)
    where = found.provenance
    title = f"ceilings of {where.device_kind}, sustained, not in bursts, {where.date[:10]}"
    return table_text(title, ("", "measured", "datasheet", "share", "unit"), rows)
