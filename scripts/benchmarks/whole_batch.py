"""The work of bench_whole.py: whole-batch programs of presets, compiled and timed in turn."""

import argparse
import json
import os
import sys
from dataclasses import asdict

import jax
import jax.numpy as jnp

from models.presets import find_shape
from pbjax.device import find_device
from pbjax.errors import InputError
from pbjax.program.analysis import analyse
from pbjax.runtime.phases import Phases
from pbjax.runtime.provenance import provenance_here
from pbjax.text_tables import table_text
from pbjax.tuning.autotune import Tuned, autotune
from pbjax.tuning.calls import CallWorkload, StackedWeights
from pbjax.tuning.shortlist import Shortlist
from pbjax.tuning.whole_batch import whole_programs

CASES = ["bert-base:4x128", "conformer-l:4x512", "vit-base:8", "gpt2-xl:1x128"]


def run(args: argparse.Namespace) -> None:
    """Times the cases, prints a table, and writes JSON after each of them."""
    kind = jax.devices()[0].device_kind
    provenance = asdict(provenance_here(kind, " ".join(["python", *sys.argv])))
    if args.commit:
        provenance["commit"] = args.commit
    rows = []
    for case in args.cases:
        rows.append(row(case, tuned(case, kind)))
        print(f"{case}: {rows[-1]['reason']}", file=sys.stderr, flush=True)
        if args.out:
            document = {"schema_version": 1, "provenance": provenance, "rows": rows}
            args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(rows))


def tuned(case: str, kind: str) -> Tuned:
    """The programs of a case, compiled, verified and timed."""
    name, batch_size, length = parsed(case)
    shape = find_shape(name, "bfloat16").without_head().filled()
    call = shape.call("forward", batch_size, length)
    inputs = tuple(shape.values(call))
    device = find_device(kind, num_cores=os.cpu_count() or 1)
    analysis = analyse(call.function, inputs, device=device)
    leaves = tuple(map(jnp.asarray, jax.tree.leaves(inputs)))
    workload = CallWorkload(analysis=analysis, stacked=StackedWeights(analysis), leaves=leaves)
    wholes = whole_programs(analysis)
    shortlist = Shortlist(batch_size=batch_size, wholes=wholes, reason="the whole batch alone")
    return autotune(workload, shortlist, Phases())


def parsed(case: str) -> tuple[str, int, int | None]:
    """Preset, batch size and length of a case; images have no length.

    Raises:
      InputError: It is written in another way.
    """
    name, _, sizes = case.partition(":")
    try:
        batch_size, *length = map(int, sizes.split("x"))
    except ValueError:
        raise InputError(
            f"--cases {case}: not a case; preset:batch or preset:batch x length is allowed; "
            "write it as bert-base:4x128"
        ) from None
    return name, batch_size, length[0] if length else None


def row(case: str, found: Tuned) -> dict:
    """What was found out, as JSON-compatible data."""
    programs = {program.label: program for program in found.programs}
    return {
        "case": case,
        "seconds": {label: float(f"{p.measured_s:.4g}") for label, p in programs.items()},
        "spread_s": {label: float(f"{p.spread_s:.2g}") for label, p in programs.items()},
        "compile_s": {label: round(p.compile_s, 1) for label, p in programs.items()},
        "kept": found.kept.spec.label,
        "max_difference": found.plan.max_difference,
        "reason": found.plan.reason,
    }


def table(rows: list[dict]) -> str:
    """Milliseconds of every program, and the speed over the model with kernels as it is written."""
    cells = [
        (row["case"], label, f"{1e3 * s:.3f}", f"{row['seconds']['unsplit'] / s:.2f}x", mark)
        for row in rows
        for label, s in row["seconds"].items()
        for mark in ["kept" if label == row["kept"] else ""]
    ]
    title = "programs of the whole batch; ms a call"
    return table_text(title, ("case", "program", "ms", "speed", ""), cells, left=("program",))
