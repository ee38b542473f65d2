"""Ceilings, predicted stages and starts; the table of devices in the guide."""

from collections.abc import Iterable, Mapping
from typing import Any

from pbjax.device import Device, devices, find_device
from result_pages.markdown import (
    Tables,
    conditions,
    error,
    given,
    ms,
    number,
    page,
    percent,
    section,
    table,
)

Row = Mapping[str, Any]


def ceilings(tables: Tables) -> str:
    """The page of what an H200 sustains."""
    found = tables["ceilings"]["ceilings"]
    device = find_device(found["provenance"]["device_kind"])
    return page(
        "Ceilings of an H200",
        "What `pbjax calibrate` measured in long runs, beside the datasheet. What each figure "
        "means: [roofline](../design/roofline.md).",
        table(("what", "sustained", "datasheet", "share"), _ceilings(found, device)),
        section("Functions", table(("function", "G/s"), _functions(found))),
        conditions(tables, "ceilings"),
    )


def _ceilings(found: Row, device: Device) -> list[tuple[str, ...]]:
    rows = [
        (f"product, {dtype}, TFLOP/s", rate / 1e12, device.tensor_flops_per_s[dtype] / 1e12)
        for dtype, rate in found["tensor_flops_per_s"].items()
    ]
    rows += [
        (f"attention, heads of {width}, TFLOP/s", rate / 1e12, None)
        for width, rate in found["attention_flops_per_s"].items()
    ]
    bandwidth = device.memory_bytes_per_s / 1e12
    rows += [
        (
            "multiplications and additions, f32, TFLOP/s",
            found["cuda_flops_per_s"] / 1e12,
            device.cuda_flops_per_s / 1e12,
        ),
        ("copy, TB/s", found["memory_bytes_per_s"] / 1e12, bandwidth),
        ("reading weights, TB/s", found["weight_bytes_per_s"] / 1e12, bandwidth),
        ("launch of an XLA kernel, us", found["launch_s"] * 1e6, None),
        ("launch of a Pallas kernel, us", found["pallas_launch_s"] * 1e6, None),
    ]
    return [
        (name, given(rate), *(("-", "-") if peak is None else (given(peak), percent(rate / peak))))
        for name, rate, peak in rows
    ]


def _functions(found: Row) -> list[tuple[str, str]]:
    return [(name, given(rate / 1e9)) for name, rate in found["functions_per_s"].items()]


def stages(tables: Tables) -> str:
    """The page of predicted and measured stages."""
    document = tables["roofline_predicted"]
    rows = document["rows"]
    errors = sorted(
        stage["predicted_s"] / stage["measured_s"] - 1 for row in rows for stage in row["stages"]
    )
    within = max(abs(errors[0]), abs(errors[-1]))
    calls = [row["predicted_s"] / row["measured_device_s"] - 1 for row in rows]
    return page(
        "Roofline: predicted and measured stages",
        f"All {len(errors)} stages that take 2 % of their call or more lie within "
        f"{percent(within)} of their prediction ({100 * errors[0]:+.0f} to "
        f"{100 * errors[-1]:+.0f} %); the {len(rows)} calls, by device time, within "
        f"{percent(max(map(abs, calls)))}. Predictions are from the ceilings alone, with the "
        "kernels of the device; some of each model's layers were measured. How it is counted: "
        "[roofline](../design/roofline.md).",
        section("Stages", _stages(rows)),
        section(
            "Whole models",
            "Items per second without a head, predicted, against what "
            "[models](models.md) measured, which nothing here was fitted to.",
            _whole(document["models"], tables),
        ),
        conditions(tables, "roofline_stages", "roofline_predicted", "bench_models"),
    )


def _stages(rows: Iterable[Row]) -> str:
    found = []
    for row in rows:
        length = f" x {row['length']:,}" if row["length"] else ""
        call = f"{row['model']}, {row['phase']} {row['items']}{length}"
        for stage in row["stages"]:
            predicted, measured = stage["predicted_s"], stage["measured_s"]
            found.append(
                (
                    call,
                    stage["stage"],
                    ms(predicted),
                    ms(measured),
                    error(predicted, measured),
                    number(stage["flops_per_s"] / 1e12),
                    number(stage["bytes_per_s"] / 1e12),
                    percent(predicted / measured),
                )
            )
    columns = ("stage", "predicted, ms", "measured, ms", "error", "TFLOP/s", "TB/s")
    return table(("call", *columns, "of attainable"), found)


def _whole(models: Iterable[Row], tables: Tables) -> str:
    from result_pages.models import NAMES, runs

    found = []
    for model, (name, by) in zip(models, runs(tables).items(), strict=True):
        library, kernels = (by[mode]["items_per_s"] for mode in ("library", "with_kernels"))
        found.append(
            (
                NAMES[name],
                given(library),
                f"{number(model['library_per_s'])} ({error(model['library_per_s'], library)})",
                given(kernels),
                f"{number(model['kernels_per_s'])} ({error(model['kernels_per_s'], kernels)})",
                number(model["library_datasheet_per_s"]),
            )
        )
    unfused = next(m["library_unfused_per_s"] for m in models if "library_unfused_per_s" in m)
    columns = ("library, measured", "predicted", "pbjax, measured", "predicted")
    note = (
        "XLA fuses no attention with Conformer-L's relative positions: with "
        f"`attention='unfused'` its library program is predicted at {number(unfused)}."
    )
    return table(("model", *columns, "library, by the datasheet"), found) + f"\n\n{note}"


def start(tables: Tables) -> str:
    """The page of a first and a second start."""
    document = tables["bench_start"]
    sides = [document["starts"][name]["parts"] for name in ("cold", "second")]
    rows = []
    for part in dict.fromkeys(part for side in sides for part in side):
        rows.append((f"**{part}**", *(_sum(side.get(part)) for side in sides)))
        if part != "optimize":
            continue
        for phase in dict.fromkeys(phase for side in sides for phase in side[part]):
            rows.append((f"- {phase}", *(_phase(side[part], phase) for side in sides)))
    return page(
        "Starting a plan",
        f"LLaMA3-8B, {document['layers']} layers, 8 x 512, a plan of two sub-batches with all "
        f"kernels, started twice in processes of its own; seconds. {document['kept_programs']} "
        f"programs of {document['kept_bytes'] / 1e6:.0f} MB were kept between them. What is kept: "
        "[starting](../guide/starting.md).",
        table(("part", "first start", "second start"), rows),
        conditions(tables, "bench_start"),
    )


def _sum(phases: Mapping[str, float] | None) -> str:
    return "-" if phases is None else f"{sum(phases.values()):.1f}"


def _phase(phases: Mapping[str, float], name: str) -> str:
    return f"{phases[name]:.1f}" if name in phases else "-"


def device_rates() -> str:
    """Datasheet rates of the devices that pbjax knows."""
    rows = []
    for device in devices():
        if device.kind == "cpu":
            continue
        rates = device.tensor_flops_per_s
        half, memory = rates["bfloat16"], device.memory_bytes_per_s
        link = device.link_bytes_per_s
        rows.append(
            (
                device.kind,
                *(
                    "-" if name not in rates else given(rates[name] / 1e12)
                    for name in ("bfloat16", "float8_e4m3fn", "int8", "float32")
                ),
                given(device.cuda_flops_per_s / 1e12),
                given(memory / 1e12),
                f"{device.memory_bytes / 1e9:.0f}",
                f"{half / memory:.0f}",
                "-" if link is None else f"{link / 1e9:.0f} GB/s",
            )
        )
    columns = ("bf16, fp16", "fp8", "int8", "tf32", "f32 vector", "TB/s", "GB", "ridge", "link")
    return table(("device", *columns), rows)
