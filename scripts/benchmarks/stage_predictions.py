"""What predict_stages.py predicts: the calls that bench_roofline.py measured, and whole models."""

import argparse
from contextlib import nullcontext

COMMAND = (
    "python scripts/predict_stages.py --table profiles/nvidia_h200/roofline_stages.json --out "
    "profiles/nvidia_h200/roofline_predicted.json"
)
# Preset, rows, tokens of a row: as bench_peers.py runs them.
WHOLE = [
    ("vit-base", 256, None),
    ("bert-base", 96, 384),
    ("conformer-l", 32, 512),
    ("gpt2-xl", 16, 512),
    ("bloom-7b1", 8, 512),
    ("llama3-8b", 8, 512),
]
LENGTHS = {preset: length for preset, _, length in WHOLE}


def run(args: argparse.Namespace) -> None:
    """Predicts every row of the table and the six models, and writes one JSON."""
    from pbjax.files import write_json
    from pbjax.planning.ceilings import calibrated
    from pbjax.roofline.measured_table import MeasuredTable
    from pbjax.runtime.provenance import provenance_here

    table = MeasuredTable.load(args.table)
    device = calibrated(find(table.provenance.device_kind))
    provenance = provenance_here(device.kind, COMMAND)
    document = {
        "schema_version": 1,
        "provenance": {
            "device_kind": device.kind,
            "jax": provenance.jax,
            "commit": provenance.commit,
            "date": provenance.date,
            "command": COMMAND,
        },
        "models": [predicted_model(*case, device) for case in WHOLE],
        "rows": [predicted_call(row, device, table) for row in table.rows],
    }
    write_json(args.out, document)


def find(kind: str):
    """The device of a kind, at the peaks of its datasheet."""
    from pbjax.device import find_device

    return find_device(kind)


def predicted_call(row, device, table) -> dict[str, object]:
    """The stages of a measured call, predicted and measured."""
    from pbjax.roofline.measured_table import stage_checks

    preset, layers = named(row.model)
    length = row.cached or row.tokens // row.items or LENGTHS[preset]
    report = predict(preset, layers, row.phase, row.items, length, device, row.model)
    checks = stage_checks(table.attached(report))
    print(f"{row.model}, {row.phase}, {row.items} rows", flush=True)
    return {
        "model": row.model,
        "phase": row.phase,
        "items": row.items,
        "length": length,
        "predicted_s": report.total.seconds,
        "measured_s": row.measured.seconds,
        "measured_device_s": row.measured.device_s,
        "stages": [
            {
                "stage": check.stage.name,
                "predicted_s": check.stage.seconds,
                "measured_s": check.measured_s,
                "flops_per_s": check.flops_per_s,
                "bytes_per_s": check.bytes_per_s,
            }
            for check in checks
        ],
    }


def named(model: str) -> tuple[str, int | None]:
    """The preset and the number of layers in a name such as "gpt2-xl, 4 layers"."""
    preset, _, layers = model.partition(", ")
    return preset, int(layers.split()[0]) if layers else None


def predicted_model(preset: str, rows: int, length: int | None, device) -> dict[str, object]:
    """Items per second of a whole model without a head: of XLA's kernels, of ours, by datasheet."""
    print(preset, flush=True)
    datasheet = find(device.kind)

    def rate(target, kernels: bool, attention: str = "fused") -> float:
        report = predict(preset, None, "forward", rows, length, target, preset, kernels, attention)
        return rows / report.total.seconds

    found = {
        "model": preset,
        "rows": rows,
        "length": length,
        "library_per_s": rate(device, False),
        "kernels_per_s": rate(device, True),
        "library_datasheet_per_s": rate(datasheet, False),
    }
    if preset == "conformer-l":  # XLA fuses no attention with relative positions
        found["library_unfused_per_s"] = rate(device, False, "unfused")
    return found


def predict(preset, layers, phase, rows, length, device, name, kernels=True, attention="fused"):
    """The report of one call in shapes; a forward pass has no head."""
    from models.presets import find_shape, traced_for
    from pbjax.roofline.report import roofline_report

    shape = find_shape(preset, "bfloat16", layers)
    shape = shape.without_head() if phase == "forward" else shape
    with traced_for(device.kind, device.num_sms) if kernels else nullcontext():
        call = (shape.calling_kernels() if kernels else shape).call(phase, rows, length)
        return roofline_report(
            call.function,
            *call.inputs,
            device=device,
            cache=call.cache,
            attention=attention,
            name=name,
            phase=phase,
            items=rows,
            tokens=call.tokens,
            cached=call.cached,
        )
